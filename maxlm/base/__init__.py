"""Errors, paths, locks, retries, atomic files, strict JSON, the machine: what every room uses. No jax, no config."""
