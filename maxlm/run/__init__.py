"""A training run from its folder to its report: opening, identity, ownership, resuming, elasticity."""
