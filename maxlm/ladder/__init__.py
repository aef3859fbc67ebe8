"""Scaling ladders: grids of small runs, fits of the loss over size, tokens and FLOPs, and their predictions of larger runs."""
