"""How often the loops of a compiled program turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from maxlm.parallel.expert_rows import FURTHER

if TYPE_CHECKING:
    from maxlm.hlo.parser import Computation, Op


def counted(computation: "Computation", computations: Mapping[str, "Computation"]) -> "Computation":
    """`computation` with `trips` of its loops: as XLA states, else from where the counter starts to the constant that ends it.

    XLA may take the first turn out of a loop, which then starts at 1, and unrolls rings of matmuls (windowed einsum), which then step by 2.
    Further rounds of experts turn 0 times, as under an even load. None stays where data decides otherwise.
    """
    if not any(op.opcode == "while" and op.trips is None for op in computation.ops):
        return computation
    ops = tuple(replace(op, trips=_trips(op, computation, computations)) if op.opcode == "while" else op for op in computation.ops)
    return replace(computation, ops=ops)


def _trips(op: "Op", computation: "Computation", computations: Mapping[str, "Computation"]) -> int | None:
    if op.trips is not None:
        return op.trips
    if FURTHER in op.where:
        return 0
    body, condition = (computations[name] for name in op.calls[:2])
    limits = [limit for one in condition.ops if (limit := _number(one)) is not None]
    if not limits:
        return None
    counters = [o.index for o in condition.ops if o.opcode == "get-tuple-element" and o.index is not None and not o.shapes[0].dims]
    first, step = 0, 1
    if len(counters) == 1:
        first = _number(_element(computation, op.operands[0], counters[0])) or 0
        added = _element(body, body.root, counters[0])
        if added is not None and added.opcode == "add":
            step = max((_number(body.source(name)) or 0 for name in added.operands), default=0) or 1
    return max(0, -(-(max(limits) - first) // step))


def _element(computation: "Computation", name: str, place: int) -> "Op | None":
    """What makes element `place` of the tuple `name`."""
    made = computation.source(name)
    held = made is not None and made.opcode == "tuple" and place < len(made.operands)
    return computation.source(made.operands[place]) if made is not None and held else None


def _number(op: "Op | None") -> int | None:
    """The value of a whole, scalar constant."""
    return int(op.literal) if op is not None and op.opcode == "constant" and op.literal.isdigit() and not op.shapes[0].dims else None
