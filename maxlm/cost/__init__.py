"""Predicts step time and memory of a compiled program, and reports both."""
