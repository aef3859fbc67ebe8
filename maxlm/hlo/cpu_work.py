"""Work of an operation that XLA compiled for a CPU: its matmuls by shape, transposed copies, and functions of numbers."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from maxlm.hlo.parser import Computation, Module, Op

LINE_BYTES = 64  # of a cache line of x86 and of most ARM cores

_LEFT = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_BATCH = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")
_ORDER = re.compile(r"dimensions=\{([\d,]*)\}")
_FUNCTIONS = {
    "cosine", "erf", "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "rsqrt", "sine", "tanh",
}  # fmt: skip


@dataclass(frozen=True)
class CpuDot:
    """A matmul, or several of one shape."""

    side: int  # the shortest of the three sides of one of them
    transposed: bool  # the left operand is summed over a dim that is not its last
    flops: int  # of all; 2 a multiply-add


def cpu_dots(module: Module, op: Op, computation: Computation) -> Iterator[CpuDot]:
    """The matmuls that `op` is or, fused, contains; a convolution counts for none."""
    for inner, body in _inside(module, op, computation):
        if inner.opcode == "dot":
            yield _dot(inner, body)


def transposes(module: Module, op: Op, computation: Computation) -> bool:
    """True if `op` makes rows of an array of what was no row, so that it reads with a stride; rows shorter than a cache line are read as so
    many streams.
    """
    made = (inner for inner, _ in _inside(module, op, computation) if inner.opcode == "transpose")
    return any(_moves_last(inner) and inner.shapes[0].dims[-1] * inner.shapes[0].bits >= 8 * LINE_BYTES for inner in made)


def function_values(module: Module, op: Op, computation: Computation) -> int:
    """Number of exponentials, logarithms and their like that `op` computes."""
    return sum(inner.shapes[0].elements for inner, _ in _inside(module, op, computation) if inner.opcode in _FUNCTIONS)


def _inside(module: Module, op: Op, computation: Computation) -> Iterator[tuple[Op, Computation]]:
    """`op`, or the operations of a fusion, each with the computation that it lies in."""
    if op.opcode != "fusion":
        yield op, computation
        return
    for body in (module.computations[callee] for callee in op.calls):
        for inner in body.ops:
            yield from _inside(module, inner, body)


def _dot(op: Op, computation: Computation) -> CpuDot:
    left, right = (computation.operand(op, place).shapes[0] for place in (0, 1))
    contracted = _dims(_LEFT, op)
    summed = math.prod(left.dims[dim] for dim in contracted)
    batch = math.prod(left.dims[dim] for dim in _dims(_BATCH, op))
    rows, columns = (shape.elements // max(1, summed * batch) for shape in (left, right))
    transposed = bool(contracted) and len(left.dims) - 1 not in contracted
    return CpuDot(min(rows, summed, columns), transposed, 2 * batch * rows * summed * columns)


def _moves_last(op: Op) -> bool:
    order = _dims(_ORDER, op)
    return bool(order) and order[-1] != len(order) - 1


def _dims(pattern: re.Pattern[str], op: Op) -> tuple[int, ...]:
    match = pattern.search(op.attributes)
    return tuple(map(int, filter(None, match.group(1).split(",")))) if match else ()
