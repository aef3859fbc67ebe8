"""A moving average of the parameters."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import FLOAT32, Capability, Problems
from maxlm.config.fields import BELOW_ONE, Float, Section


class EmaConfig(Section):
    """An exponential moving average of the parameters, in float32. Update n leaves it min(decay, (1 + n) / (10 + n)) of its old value."""

    decay: Annotated[Float, Field(gt=0, lt=1)] = 0.999
    """Share of its old value that the average keeps in an update, once the run is long; it begins smaller. Unit: share."""


def _problems(ema: EmaConfig, diloco: object) -> Problems:
    if ema.decay >= BELOW_ONE:
        yield "ema.decay", ema.decay, "must be below 1 in float32, or the average never moves", "use 0.99 to 0.9999"
    if diloco is not None:
        rule = "averages parameters after every update, and with diloco they move once in diloco.every"
        yield "ema", "set", rule, "remove one of them, or average checkpoints (`maxlm average`)"


CAPABILITY = Capability(
    key="ema",
    rules=(_problems,),
    identity=lambda ema: {"ema": "set"},  # its decay may change
    state=lambda ema, state: state.add("average", FLOAT32, along="masters"),
    average="ema",
    transforms=("maxlm.training.ema:MovingAverage",),
)
