"""The training step, the program that compiles it, and the loop around it."""
