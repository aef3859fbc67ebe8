"""Corpora of known content, and checks of what `maxlm corpus run` makes of them: called by tools/corpus_checks.py."""
