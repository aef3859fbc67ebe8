"""Schedule of checkpoints, and how many of them stay."""

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Positive, Section, StoredPath


class CheckpointConfig(Section):
    """Schedule of checkpoints, and how many of them stay."""

    dir: StoredPath | None = None  # a folder all hosts share, or gs://; None: `checkpoints/` of the run
    every_steps: Positive = 1000  # steps between two checkpoints
    keep: Positive = 3  # newest ones kept
    keep_every: Positive | None = None  # checkpoints of multiples of so many steps are never deleted


def _problems(saved: CheckpointConfig) -> Problems:
    if saved.keep_every is not None and saved.keep_every % saved.every_steps:
        rule = f"is not a multiple of checkpoint.every_steps = {saved.every_steps}, so it would keep nothing"
        yield "checkpoint.keep_every", saved.keep_every, rule, "use a multiple"


CAPABILITY = Capability(key="checkpoint", rules=(_problems,))
