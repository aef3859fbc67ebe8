"""Measures of tools/corpus_quality.py."""
