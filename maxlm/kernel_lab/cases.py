"""Cases that the kernel lab compiles: an operation at a real shape, forward and backward, by one of its implementations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from maxlm.config.errors import UserError
from maxlm.kernels.attention.shapes import SHAPES as ATTENTION
from maxlm.kernels.grouped_matmul.shapes import SHAPES as GROUPED
from maxlm.kernels.linear_cross_entropy.shapes import SHAPES as LOSS
from maxlm.kernels.matmul.shapes import MATMULS
from maxlm.kernels.matmul.shapes import SHAPES as MLP

OPERATIONS: Mapping[str, tuple[str, ...]] = {  # and implementations, ours first
    "attention": ("flash", "splash"),
    "grouped_matmul": ("tpu", "megablox"),
    "gated_mlp": ("fused", "xla"),
    "matmul": ("xla",),
}
SHAPES: Mapping[str, Sequence[Any]] = {
    "attention": ATTENTION,
    "grouped_matmul": GROUPED,
    "gated_mlp": MLP,
    "matmul": MATMULS,
    "linear_cross_entropy": LOSS,
}
SWEPT = 4  # choices of blocks in a sweep, where a cost model ranks them all


@dataclass(frozen=True)
class Kernel:
    """One part of a compiled case: its name in the program, the scalars it branches on, its FLOPs that masks leave.

    If several operations have the name (XLA's own), it is all of them. `blocks`: its block sizes, as text.
    """

    part: str
    name: str
    scalars: Sequence[np.ndarray]
    flops: float
    blocks: str = ""


@dataclass(frozen=True)
class Case:
    """A function, shapes and dtypes of its arguments, the kernels that it becomes, and options of the compiler."""

    function: Callable[..., Any]
    arguments: Sequence[tuple[tuple[int, ...], str]]
    kernels: Sequence[Kernel]
    options: Mapping[str, str] = field(default_factory=dict)


def from_hbm(run: Callable[..., Any], scalars: int = 0) -> Callable[..., Any]:
    """`run` on arrays in HBM, as in a training step (alone, some would be placed in VMEM), but for the last `scalars` arguments."""

    def constrained(*arrays: Any) -> Any:
        in_hbm = len(arrays) - scalars
        return run(*(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays[:in_hbm]), *arrays[in_hbm:])

    return constrained


def shape_names(operation: str) -> tuple[str, ...]:
    return tuple(shape.name for shape in SHAPES[operation])


def shape_of(operation: str, name: str) -> Any:
    """The shape called `name`. Raises UserError for an unknown one."""
    shape = next((shape for shape in SHAPES[operation] if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
    return shape


def useful(operation: str, shape: Any) -> tuple[float, float]:
    """(FLOPs that masks leave, bytes) of one shape in bfloat16, forward and backward: what enters and leaves both passes, each once."""
    match operation:
        case "attention":  # seven matmuls; q, k, v in and out, out, its gradient and three more
            flops = 7 * 2 * shape.pairs(shape.segments(1)) * shape.heads * shape.head_dim
            numbers = 6 * shape.seq_len * (shape.heads + shape.groups) * shape.head_dim
        case "grouped_matmul":  # the product and two gradients, of the same three arrays
            flops = 3 * 2 * shape.rows * shape.d_in * shape.d_out
            numbers = 3 * (shape.rows * (shape.d_in + shape.d_out) + shape.experts * shape.d_in * shape.d_out)
        case _:  # nine matmuls; x, y and gradients, x again; three weights, twice, and gradients; gate and up, kept
            flops = 9 * 2 * shape.rows * shape.d_model * shape.d_ff
            numbers = 5 * shape.rows * shape.d_model + 9 * shape.d_model * shape.d_ff + 4 * shape.rows * shape.d_ff
    return float(flops), 2.0 * numbers
