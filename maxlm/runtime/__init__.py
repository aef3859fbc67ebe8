"""Running training for real: joining a cluster, stopping on signals, and the run from its directory to its report."""
