"""Retention of checkpoints: the newest ones, those of some steps, and always the newest that was healthy."""

from collections.abc import Callable, Sequence
from typing import Any

from orbax.checkpoint import v1 as ocp

from maxlm.config.schema import CheckpointConfig

HEALTHY = "healthy"  # entry of a data position: False if training was in trouble when the state was saved


class NewestHealthy:
    """Preserves the newest checkpoint that was healthy (the protocol `PreservationPolicy` of Orbax)."""

    def __init__(self, healthy: Callable[[int], bool]) -> None:
        self._healthy = healthy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Decisions for each checkpoint, oldest first: whether it stays."""
        steps = sorted((one.step for one in checkpoints), reverse=True)
        newest = next((step for step in steps if self._healthy(step)), None)  # mostly the first: no other mark is read
        return [one.step == newest for one in checkpoints]


def retention(config: CheckpointConfig, healthy: Callable[[int], bool]) -> ocp.training.preservation_policies.AnyPreservationPolicy:
    """The policy that `config` describes."""
    policies = ocp.training.preservation_policies
    keep = [policies.LatestN(config.keep), NewestHealthy(healthy)]
    if config.keep_every is not None:
        keep.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(keep)
