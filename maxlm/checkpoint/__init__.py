"""Saving, verifying and restoring what a run needs to continue."""

from maxlm.checkpoint.errors import CheckpointError
from maxlm.checkpoint.store import Checkpoints, Restored

__all__ = ["CheckpointError", "Checkpoints", "Restored"]
