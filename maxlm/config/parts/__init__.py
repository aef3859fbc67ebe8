"""Records of the parts of maxlm: each file lists the parts of a kind in `PARTS`, and `maxlm.config.choices` finds the files."""
