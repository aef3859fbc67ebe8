"""Readers of raw documents: files of any format, compression and encoding, as records and defects, each with its reason.

The readers decide which records a file has. How strictly they are taken is up to their users: `data prepare` refuses the first defect, and
`corpus run` counts all of them.
"""
