"""The Python API: `maxlm.load_config`, `fit`, `build`, `Run`, `Model` and the other names of `maxlm/__init__.py`. Each is a door to the
functions that a command calls; docs/reference/python.md has examples. All else of maxlm is private, and changes without notice.
"""
