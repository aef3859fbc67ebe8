"""What the kernel lab compiles: an operation at a real shape, forward and backward, by one of its implementations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maxlm.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np

OPERATIONS: Mapping[str, tuple[str, ...]] = {  # and implementations, ours first
    "attention": ("flash", "splash"),
    "grouped_matmul": ("tpu", "megablox"),
    "gated_mlp": ("fused", "xla"),
}


@dataclass(frozen=True)
class Kernel:
    """One part of a compiled case: what it is called in the program, the scalars it branches on, FLOPs that masks leave, of the case.

    Where several operations bear the name, XLA's own, it is all of them.
    """

    part: str
    name: str
    scalars: Sequence["np.ndarray"]
    flops: float


@dataclass(frozen=True)
class Case:
    """A function, shapes and dtypes of its arguments, the kernels that it becomes, and options of the compiler."""

    function: Callable[..., Any]
    arguments: Sequence[tuple[tuple[int, ...], str]]
    kernels: Sequence[Kernel]
    options: Mapping[str, str] = field(default_factory=dict)


def from_hbm(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` on arrays that lie in HBM, as in a training step; alone in a program, some would be given VMEM."""
    from jax.experimental.pallas import tpu as pltpu

    return lambda *arrays: run(*(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays))


def shape_names(operation: str) -> tuple[str, ...]:
    """The shapes that `operation` is looked at."""
    return tuple(shape.name for shape in _shapes(operation))


def shape_of(operation: str, name: str) -> Any:
    """The shape of that name. Raises UserError where there is none."""
    shape = next((shape for shape in _shapes(operation) if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
    return shape


def build(operation: str, name: str, implementation: str, device_kind: str) -> Sequence[Case]:
    """What is compiled for one shape of a TPU. Raises UserError for one that does not exist."""
    from maxlm.planning.lab.attention import attention_case
    from maxlm.planning.lab.gated_mlp import gated_mlp_cases
    from maxlm.planning.lab.grouped_matmul import grouped_matmul_case

    shape = shape_of(operation, name)
    if operation == "gated_mlp":
        return gated_mlp_cases(shape, implementation, device_kind)
    cases: Mapping[str, Callable[..., Case]] = {"attention": attention_case, "grouped_matmul": grouped_matmul_case}
    return [cases[operation](shape, implementation, device_kind)]


def _shapes(operation: str) -> Sequence[Any]:
    from maxlm.kernels.attention.shapes import SHAPES as ATTENTION
    from maxlm.kernels.grouped_matmul.shapes import SHAPES as GROUPED
    from maxlm.kernels.matmul.shapes import SHAPES as MLP

    return {"attention": ATTENTION, "grouped_matmul": GROUPED, "gated_mlp": MLP}[operation]


def gpu_case(operation: str, name: str, implementation: str, heads: int) -> tuple[Callable[..., Any], list[Any]]:
    """Gradients of `operation` at one shape on a GPU, and their arguments' shapes; of attention, by `implementation`, one sequence and at
    most so many query heads, else by what is chosen there. Raises UserError for a shape that does not exist.
    """
    from maxlm.planning.lab.attention import gpu_attention_case
    from maxlm.planning.lab.gated_mlp import gpu_gated_mlp_case
    from maxlm.planning.lab.grouped_matmul import gpu_grouped_matmul_case

    shape = shape_of(operation, name)
    if operation == "attention":
        return gpu_attention_case(shape, implementation, heads)
    cases: Mapping[str, Callable[..., Any]] = {"gated_mlp": gpu_gated_mlp_case, "grouped_matmul": gpu_grouped_matmul_case}
    return cases[operation](shape)
