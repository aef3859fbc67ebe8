"""Answers to trouble in training (docs/health.md)."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.fields import AtLeastOne, Count, Positive, Section


class HealthConfig(Section):
    """Answers to trouble in training (docs/health.md). Absent: alarms, and exit code 4 where a run is beyond repair.

    Batches that a roll back leaves out are part of the data order: in every later checkpoint, and in `roll_backs.json` of the run.
    """

    # A loss or gradient norm `spreads` deviations above its recent median. skip: a single update at twice that is not applied; roll_back:
    # after `spike_steps` in a row, or when the loss has long been bad, training goes back before them, and leaves their batches out.
    spike: Literal["warn", "skip", "roll_back"] = "warn"
    not_finite: Literal["skip", "roll_back"] = "skip"  # such an update is never applied; roll_back: after ten in a row
    # A sudden change of the update/weight ratio or the gradient of a layer. None: these figures are not computed.
    layers: Literal["warn", "roll_back"] | None = None
    activations_every: Count = 100  # with `layers`: updates between two looks at activations, attention and weights; 0: none
    spreads: AtLeastOne = 8.0  # deviations from which a value counts as a spike
    spike_steps: Annotated[int, Strict(), Field(ge=1, le=100)] = 5  # spikes in a row before training goes back
    roll_backs: Count = 10  # in a run; one more ends it with exit code 4
    recent_roll_backs: Count = 3  # and in `recent_steps` steps
    recent_steps: Positive = 1000  # steps that recent_roll_backs is about
    leave_out: tuple[Count, ...] = ()  # numbers of batches, from 0, that are not trained on


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
