"""Deduplication: exact copies, near copies (MinHash) and repeated lines, by files of signatures on disk.

Substring deduplication (suffix array, Lee et al. 2022, arXiv 2107.06499) is not part of it yet.
"""
