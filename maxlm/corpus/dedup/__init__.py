"""Deduplication: exact copies, near copies (MinHash), repeated lines and repeated substrings, by files of signatures on disk."""
