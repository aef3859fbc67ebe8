"""Reads programs that XLA has compiled: operations, FLOPs, bytes, live buffers, replica groups. Standard library only."""
