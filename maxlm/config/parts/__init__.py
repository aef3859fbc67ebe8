"""Records of the parts of maxlm: each file lists those of a kind in `PARTS`, and `maxlm.config.choices` finds the files."""
