"""Finds a layout: enumerate, predict in microseconds, compile the most promising, learn from what was compiled."""
