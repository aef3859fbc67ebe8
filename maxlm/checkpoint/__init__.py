"""Save, verify and restore the state of a run."""

from maxlm.checkpoint.checkpoints import Checkpoints, Restored
from maxlm.checkpoint.errors import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Restored"]
