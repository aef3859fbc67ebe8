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


def build(operation: str, name: str, implementation: str, device_kind: str) -> Sequence[Case]:
    """What is compiled for one shape. Raises UserError for one that does not exist."""
    from maxlm.planning.lab.attention import attention_case
    from maxlm.planning.lab.gated_mlp import gated_mlp_cases
    from maxlm.planning.lab.grouped_matmul import grouped_matmul_case

    shape = next((shape for shape in _shapes(operation) if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
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
    from maxlm.planning.lab.gated_mlp import gpu_gated_mlp_case
    from maxlm.planning.lab.grouped_matmul import gpu_grouped_matmul_case

    shape = next((shape for shape in _shapes(operation) if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
    if operation == "attention":
        return _gpu_attention_case(shape, implementation, heads)
    cases: Mapping[str, Callable[..., Any]] = {"gated_mlp": gpu_gated_mlp_case, "grouped_matmul": gpu_grouped_matmul_case}
    return cases[operation](shape)


def _gpu_attention_case(shape: Any, implementation: str, heads: int) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    from maxlm.kernels import attention

    groups = max(heads * shape.groups // shape.heads, 1)
    sizes = [(1, shape.seq_len, number, shape.head_dim) for number in (groups * shape.heads // shape.groups, groups, groups)]

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "window": shape.window, "implementation": implementation}
        return attention(q, k, v, query_segments_BS=segments, key_segments_BT=segments, **options).astype(jnp.float32).sum()

    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    return jax.grad(total, argnums=(0, 1, 2)), [*arguments, jax.ShapeDtypeStruct((1, shape.seq_len), jnp.int32)]
