"""Schedule of checkpoints, and how many of them stay."""

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Positive, Section, StoredPath


class CheckpointConfig(Section):
    """Schedule of checkpoints, and how many of them stay."""

    dir: StoredPath | None = None
    """Folder of the checkpoints, which all hosts share, or a gs:// address; null: `checkpoints/` in the folder of the run."""
    every_steps: Positive = 1000
    """Updates between two checkpoints. Unit: updates."""
    keep: Positive = 3
    """Newest checkpoints that are kept; older ones are deleted. Unit: checkpoints."""
    keep_every: Positive | None = None
    """Checkpoints at multiples of this step are never deleted; must be a multiple of every_steps. null: all old ones are deleted. Unit:
    updates.
    """


def _problems(saved: CheckpointConfig) -> Problems:
    if saved.keep_every is not None and saved.keep_every % saved.every_steps:
        rule = f"is not a multiple of checkpoint.every_steps = {saved.every_steps}, so it would keep nothing"
        yield "checkpoint.keep_every", saved.keep_every, rule, "use a multiple"


CAPABILITY = Capability(key="checkpoint", rules=(_problems,))
