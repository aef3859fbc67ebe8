"""A moving average of the parameters."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from maxlm.config.capability import FLOAT32, Capability, Problems, Sizes, State
from maxlm.config.fields import BELOW_ONE, Float, Section

if TYPE_CHECKING:
    from maxlm.config.schema import Config


class EmaConfig(Section):
    """An exponential moving average of the parameters, in float32. Update n leaves it min(decay, (1 + n) / (10 + n)) of its old value."""

    decay: Annotated[Float, Field(gt=0, lt=1)] = 0.999


def _problems(config: "Config") -> Problems:
    if config.ema is None:
        return
    if config.ema.decay >= BELOW_ONE:
        yield "ema.decay", config.ema.decay, "must be below 1 in float32, or the average never moves", "use 0.99 to 0.9999"
    if config.diloco is not None:
        rule = "averages parameters after every update, and with diloco they move once in diloco.every"
        yield "ema", "set", rule, "remove one of them, or average checkpoints (`maxlm average`)"


def _identity(config: "Config") -> dict[str, str]:
    """That there is one: its decay may change."""
    return {} if config.ema is None else {"ema": "set"}


def _state(config: "Config", sizes: Sizes, state: State) -> State:
    return state if config.ema is None else state.add("average", FLOAT32, along="masters")


CAPABILITY = Capability(key="ema", rules=(_problems,), identity=_identity, state=_state, implementation="maxlm.training.ema:EmaUpdates")
