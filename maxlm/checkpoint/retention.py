"""Retention of checkpoints: the newest ones, every n-th step, and always the newest healthy one."""

from collections.abc import Callable, Sequence
from typing import Any

from orbax.checkpoint import v1 as ocp

from maxlm.config.schema import CheckpointConfig

HEALTHY = "healthy"  # entry of a data position: False if training was in trouble when the state was saved


class NewestHealthy:
    """Preserves the newest checkpoint that is known to be healthy, and newer ones of which that is not known (the protocol
    `PreservationPolicy` of Orbax).
    """

    def __init__(self, healthy: Callable[[int], bool | None]) -> None:
        """`healthy`: the mark of the checkpoint of a step; None if it cannot be read."""
        self._healthy = healthy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Decisions for each checkpoint, oldest first: whether it stays."""
        preserved = set()
        for step in sorted((one.step for one in checkpoints), reverse=True):
            mark = self._healthy(step)
            if mark is not False:
                preserved.add(step)
            if mark:  # mostly the first: no other mark is read
                break
        return [one.step in preserved for one in checkpoints]


def retention(config: CheckpointConfig, healthy: Callable[[int], bool | None]) -> ocp.training.preservation_policies.AnyPreservationPolicy:
    """The policy that `config` describes."""
    policies = ocp.training.preservation_policies
    keep = [policies.LatestN(config.keep), NewestHealthy(healthy)]
    if config.keep_every is not None:
        keep.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(keep)
