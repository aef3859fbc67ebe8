"""What the kernel lab compiles: an operation at a real shape, forward and backward, by one of its implementations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maxlm.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np

OPERATIONS: Mapping[str, tuple[str, ...]] = {"attention": ("flash", "splash"), "grouped_matmul": ("tpu", "megablox")}  # ours first


@dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled case: how it is named in the program, the scalars it branches on, FLOPs that masks leave, of the case."""

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


def shape_names(operation: str) -> tuple[str, ...]:
    """The shapes that `operation` is looked at."""
    return tuple(shape.name for shape in _shapes(operation))


def build(operation: str, name: str, implementation: str, device_kind: str) -> Case:
    """The case of one shape. Raises UserError for one that does not exist."""
    from maxlm.planning.lab.attention import attention_case
    from maxlm.planning.lab.grouped_matmul import grouped_matmul_case

    shape = next((shape for shape in _shapes(operation) if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
    cases: Mapping[str, Callable[..., Case]] = {"attention": attention_case, "grouped_matmul": grouped_matmul_case}
    return cases[operation](shape, implementation, device_kind)


def _shapes(operation: str) -> Sequence[Any]:
    from maxlm.kernels.attention.shapes import SHAPES as ATTENTION
    from maxlm.kernels.grouped_matmul.shapes import SHAPES as GROUPED

    return {"attention": ATTENTION, "grouped_matmul": GROUPED}[operation]
