"""Ahead-of-time compilation of the training step, without the hardware."""
