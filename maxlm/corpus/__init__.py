"""Raw documents in, clean documents out: read, filter, deduplicate, decontaminate. Knows no jax; needs the extra `corpus`."""
