"""The generated pages of docs/reference/: settings, commands, exit codes, events, metrics, environment. `python -m maxlm.reference`."""
