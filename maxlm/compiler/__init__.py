"""Compiles steps ahead of time, for TPU pods and GPUs that this machine does not have."""
