"""Formats of the optimizer's state and of the master weights (docs/explanation/optimizer-state.md)."""

from collections.abc import Iterator
from typing import Literal

from maxlm.config.capability import Capability, Inert, Problems, State
from maxlm.config.fields import Section
from maxlm.config.part import FAST, FIRST, SECOND, SLOW, OptimizerFacts

MomentFormat = Literal["float32", "bfloat16", "int8"]


FLOAT32: Literal["float32"] = "float32"
HALVES = "halves of masters"
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "factored": 0}  # of a number in each format; factored moments are not counted


class OptimizerStateConfig(Section):
    """State in fewer bytes. Absent: float32. Vectors (norms, biases) and routers are float32 in any case."""

    moments: MomentFormat = FLOAT32
    """Number format of the moments; for Muon of its momentum. int8: 8-bit codes of a dynamic map with a float32 scale for each block (arXiv
    2110.02861).
    """
    second_moment: MomentFormat | Literal["factored"] | None = None
    """Number format of the second moment. factored: means over rows and columns, of which the product stands for the matrix (Adafactor,
    arXiv 1804.04235). null: as `moments`.
    """
    rounding: Literal["stochastic", "nearest"] | None = None
    """Rounding of stored values. stochastic: up or down at random, so that the mean is exact, as a function of the seed and the update;
    nearest: to the nearest code. null: nearest for int8 moments, which then drift less, and stochastic for bfloat16 moments and split24
    masters.
    """
    masters: Literal["float32", "split", "split24"] = FLOAT32
    """Storage of the master weights. float32: 4 bytes a weight; split: a bfloat16 half that matmuls read and the other 16 bits, 4 bytes;
    split24: the half and 8 more bits, 3 bytes.
    """

    def moment_bytes(self, facts: OptimizerFacts) -> int:
        """Bytes that moments take for a number of a hidden matrix, at least: scales and what `facts.more` names come on top."""
        formats = {**dict.fromkeys((FIRST, FAST, SLOW), self.moments), SECOND: self.second}
        return sum(BYTES[formats.get(moment, FLOAT32)] for moment in facts.moments)

    @property
    def second(self) -> str:
        """Format of the second moment."""
        return self.second_moment or self.moments

    def rounds_by_chance(self, format: str) -> bool:
        """True if values stored in `format` (of a moment or of masters) are rounded stochastically."""
        return self.rounding == "stochastic" if self.rounding is not None else format != "int8"


def _problems(
    state: OptimizerStateConfig,
    optimizer_name: str,
    optimizer_facts: OptimizerFacts,
    precision_compute: str,
    diloco: object,
    model_lora: object,
) -> Problems:
    """Formats of the optimizer's state that contradict the optimizer, and masters that contradict what reads them."""
    field, second = "optimizer.state", state.second_moment
    facts = optimizer_facts
    if second is not None and SECOND not in facts.moments and not (facts.factored or facts.adam):
        yield f"{field}.second_moment", second, f"optimizer.name = {optimizer_name} has no second moment", "remove it"
    elif second == "factored" and not facts.factored:
        which = "that is factored" if SECOND in facts.moments else "of matrices"
        rule = f"optimizer.name = {optimizer_name} has no second moment {which}"
        yield f"{field}.second_moment", "factored", rule, "use bfloat16 or int8, or optimizer.name=adamw"
    if state.masters != "float32":
        if precision_compute != "bfloat16":
            rule = f"stores the bfloat16 half that matmuls read, and precision.compute = {precision_compute}"
            yield f"{field}.masters", state.masters, rule, "use float32, or precision.compute=bfloat16"
        if diloco is not None:
            rule = "keeps no float32 weights for diloco to average over workers"
            yield f"{field}.masters", state.masters, rule, "use float32, or remove diloco"
        if model_lora is not None:
            rule = "is for weights that are trained, and model.lora trains few numbers"
            yield f"{field}.masters", state.masters, rule, "use float32"


def _inert(state: OptimizerStateConfig) -> Iterator[Inert]:
    if not {state.moments, state.second, state.masters} & {"bfloat16", "int8", "split24"}:
        yield Inert("optimizer.state.rounding", "optimizer.state stores nothing that would be rounded", "set optimizer.state.moments")


def _identity(state: OptimizerStateConfig) -> dict[str, str]:
    """Formats that change the leaves of the state."""
    formats = {"moments": state.moments, "second_moment": state.second, "masters": state.masters}
    return {f"optimizer.state.{name}": value for name, value in formats.items() if value != FLOAT32}


def _state(settings: OptimizerStateConfig, state: State) -> State:
    """Masters of matrices in two parts: halves that matmuls read, and the rest."""
    if settings.masters == FLOAT32 or not state.matrix:
        return state
    return state.add("masters", 1 if settings.masters == "split24" else 2).add(HALVES, 2)


CAPABILITY = Capability(
    key="optimizer.state",
    rules=(_problems,),
    inert=_inert,
    state=_state,
    identity=_identity,
    transforms=("maxlm.training.split_masters:SplitMasters",),
    stored=("maxlm.training.split_masters:SplitMasters",),
)
