"""Step time and memory of compiled programs."""
