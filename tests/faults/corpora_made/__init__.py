"""Corpora of known content, and what `maxlm corpus run` must make of them: modules of tests/faults/corpus_checks.py."""
