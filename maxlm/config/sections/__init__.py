"""Sections of settings: a file each, with the rules that belong to it and its record `CAPABILITY` in the table (`maxlm.config.table`)."""
