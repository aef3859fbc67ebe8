"""Processes of a run, and how they agree."""
