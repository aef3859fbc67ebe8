"""Processes of a run: finding them, joining them, agreement, and their end. No model, no data."""
