"""Answers to trouble in training (docs/explanation/health.md)."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.fields import AtLeastOne, Count, Positive, Section


class HealthConfig(Section):
    """Answers to trouble in training (docs/explanation/health.md). Absent: alarms, and exit code 4 where a run is beyond repair.

    Batches that a roll back leaves out are part of the data order: in every later checkpoint, and in `roll_backs.json` of the run.
    """

    spike: Literal["warn", "skip", "roll_back"] = "warn"
    """Answer to a loss or gradient norm that is `spreads` deviations above its recent median. warn: an alarm; skip: a single update at
    twice that height is not applied; roll_back: after `spike_steps` in a row, or when the loss has long been bad, training goes back to a
    checkpoint before them and leaves their batches out.
    """
    not_finite: Literal["skip", "roll_back"] = "skip"
    """Answer to a loss or gradient that is not finite; such an update is never applied. skip: go on with the next batch; roll_back: after
    ten in a row go back to a checkpoint and leave their batches out.
    """
    layers: Literal["warn", "roll_back"] | None = None
    """Answer to a sudden change of the update-to-weight ratio or the gradient of a layer. warn: an alarm; roll_back: go back to a
    checkpoint. null: these figures are not computed.
    """
    activations_every: Count = 100
    """With `layers`, updates between two looks at activations, attention and weights; 0: none. Unit: updates."""
    spreads: AtLeastOne = 8.0
    """Deviations above the recent median from which a value counts as a spike. Unit: deviations."""
    spike_steps: Annotated[int, Strict(), Field(ge=1, le=100)] = 5
    """Spikes in a row after which training goes back. Unit: updates."""
    roll_backs: Count = 10
    """Most returns to a checkpoint in the whole run; one more ends it with exit code 4. Unit: roll backs."""
    recent_roll_backs: Count = 3
    """Most returns to a checkpoint within `recent_steps` updates; one more ends the run with exit code 4. Unit: roll backs."""
    recent_steps: Positive = 1000
    """Window over which recent_roll_backs is counted. Unit: updates."""
    leave_out: tuple[Count, ...] = ()
    """Numbers of batches, counted from 0, that are not trained on. Unit: batch numbers."""


def _problems(health: HealthConfig, diloco: object) -> Problems:
    if diloco is not None and health.layers is not None:
        rule = "compares parameters before and after every update, and with diloco they move once in diloco.every"
        yield "health.layers", health.layers, rule, "remove one of them"
    if len(set(health.leave_out)) < len(health.leave_out):
        yield "health.leave_out", list(health.leave_out), "names a batch twice", "name it once"


def _inert(health: HealthConfig) -> Iterator[Inert]:
    if health.layers is None:
        yield Inert("health.activations_every", "health.layers is not set", "set health.layers=warn")


CAPABILITY = Capability(
    key="health",
    rules=(_problems,),
    inert=_inert,
    opening=("maxlm.training.health:LeftOut",),
    probes=("maxlm.training.layer_probe:LayerProbe",),
    readers=("maxlm.training.layer_probe:UpdateNorms",),
    transforms=("maxlm.training.layer_figures:LayerFiguresOfUpdates", "maxlm.training.spike_guard:SpikeGuard"),
)
