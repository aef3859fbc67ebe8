"""Running training for real: the supervisor, the watchdog, and the run from its directory to its report."""
