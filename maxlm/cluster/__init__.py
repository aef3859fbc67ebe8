"""Processes of a run: which there are, how they meet, agree and end. No model, no data."""
