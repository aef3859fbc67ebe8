"""Scaling ladders: grids of small runs, fits of the loss over size, tokens and FLOPs, and what they say of a larger run."""
