"""Compiled XLA programs as data: operations, FLOPs, bytes, live buffers, replica groups."""
