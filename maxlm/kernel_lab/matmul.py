"""The plain matmuls of a training step in the kernel lab: what XLA makes of them, and a Pallas kernel with the blocks that suit them best.

The kernel is here and not in `maxlm.kernels`, since it is no faster (docs/benchmarks.md has the figures): a step leaves these to XLA.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from maxlm.hardware.xla_flags import VMEM
from maxlm.kernel_lab.cases import Case, Kernel, from_hbm
from maxlm.kernels.matmul.shapes import MatmulShape
from maxlm.kernels.platform import LANES, VMEM_BYTES, WIDE

# P x Q the result, C what is contracted; M rows, K and N what weights map from and to

NAME = "plain_matmul"
SIZES = (2048, 1024, 512, 256)  # rows and columns of a block
FILLING = 350  # cycles of a grid step beside its matmul; another 0.8 for each 1,024 numbers that are added to a sum in VMEM
MOST_CYCLES = 32768  # of the matmul of a grid step: all of it is straight code
HBM_BYTES = 900  # of a cycle, about
_FORMS = {"": ((1,), (0,)), "right": ((1,), (1,)), "left": ((0,), (0,))}  # the transposed operand: contracted dims

Ref = Any  # what Pallas hands a kernel


@dataclass(frozen=True)
class Block:
    """One grid step: `rows` by `columns` of the result, `deep` of the `contracted`."""

    rows: int
    columns: int
    deep: int
    contracted: int
    cycles: float  # of the matrix unit

    def time(self, results: tuple[int, int]) -> float:
        """Cycles of the whole matmul, with what it waits for when rows change, since copies are one step ahead."""
        whole = self.deep == self.contracted  # and rows stay while columns stream by
        down, across, along = results[0] // self.rows, results[1] // self.columns, self.contracted // self.deep
        computing = self.cycles + FILLING + (0.0 if whole else 0.8 * self.rows * self.columns / 1024)
        leaving = 2 * self.rows * self.columns / along
        again = 2 * self.deep * (self.columns if whole else self.rows + self.columns)
        change = 2 * self.deep * (self.rows + self.columns) / HBM_BYTES
        return down * (across * along * max(computing, (again + leaving) / HBM_BYTES) + max(change - computing, 0.0)) + change

    @property
    def vmem(self) -> int:
        """Bytes: what travels twice, sums in float32, and half a KiB of registers that do not fit for each cycle of straight code."""
        sums = 8 if self.deep < self.contracted else 4
        return (
            4 * (self.deep * (self.rows + self.columns) + 2 * self.rows * self.columns)
            + sums * self.rows * self.columns
            + int(512 * self.cycles)
        )


def block_of(results: tuple[int, int], contracted: int, kind: str) -> Block:
    """The fastest by that account."""
    side = 2 * LANES if kind in WIDE else LANES
    depths = [contracted // parts for parts in range(1, contracted // 1024 + 1) if contracted % (parts * LANES) == 0]
    blocks = [Block(*sizes, contracted, math.prod(sizes) / (4 * side**2)) for sizes in itertools.product(SIZES, SIZES, depths)]
    fitting = [
        block
        for block in blocks
        if block.vmem <= VMEM_BYTES[kind] and block.cycles <= MOST_CYCLES and not (results[0] % block.rows or results[1] % block.columns)
    ]
    return min(fitting, key=lambda block: block.time(results))


def matmul(
    left: Float[Array, "P C"], right: Float[Array, "C Q"], added: Float[Array, "P Q"] | None = None, *, transposed: str = "", kind: str
) -> Float[Array, "P Q"]:
    """left right, and `added` to it (one row of it: to every row); `transposed`: the operand, "left" or "right", that is transposed."""
    (over_left,), (over_right,) = _FORMS[transposed]
    results, contracted = (left.shape[1 - over_left], right.shape[1 - over_right]), left.shape[over_left]
    block = block_of(results, contracted, kind)

    def spec(over: int, size: int, axis: int) -> pl.BlockSpec:
        shape = (block.deep, size) if over == 0 else (size, block.deep)
        return pl.BlockSpec(shape, lambda *at: (at[2], at[axis]) if over == 0 else (at[axis], at[2]))

    whole = pl.BlockSpec((block.rows, block.columns), lambda p, q, c: (p, q))
    beside = [] if added is None else [whole if added.shape[0] > 1 else pl.BlockSpec((1, block.columns), lambda p, q, c: (0, q))]
    steps = contracted // block.deep
    return pl.pallas_call(
        functools.partial(_kernel, _FORMS[transposed], steps, added is not None),
        name=NAME,
        out_shape=jax.ShapeDtypeStruct(results, left.dtype),
        grid=(results[0] // block.rows, results[1] // block.columns, steps),
        in_specs=[spec(over_left, block.rows, 0), spec(over_right, block.columns, 1), *beside],
        out_specs=whole,
        scratch_shapes=[pltpu.VMEM((block.rows, block.columns), jnp.float32)] if steps > 1 else [],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES[kind]),
    )(left, right, *(() if added is None else (added,)))


def _kernel(dims: tuple[tuple[int], tuple[int]], steps: int, adds: bool, left_ref: Ref, right_ref: Ref, *refs: Ref) -> None:
    added_ref, out_ref, *sums = refs if adds else (None, *refs)
    new = jax.lax.dot_general(left_ref[...], right_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)

    def finish(total: jax.Array) -> None:
        result = total.astype(out_ref.dtype)
        out_ref[...] = result if added_ref is None else result + added_ref[...]

    if steps == 1:
        finish(new)
        return
    (sum_ref,), c = sums, pl.program_id(2)

    @pl.when(c == 0)
    def _() -> None:
        sum_ref[...] = new

    @pl.when((c > 0) & (c < steps - 1))
    def _() -> None:
        sum_ref[...] += new

    pl.when(c == steps - 1)(lambda: finish(sum_ref[...] + new))


def matmul_cases(shape: MatmulShape, implementation: str, device_kind: str, *, sweep: bool = False) -> Sequence[Case]:
    """x W, the same with a residual and with a bias added, dy W^T, and x^T dy. There is one choice of blocks, also in a sweep."""
    rows, deep, wide = (shape.rows, shape.d_in, shape.d_out)
    entering, weights, leaving = (rows, deep), (deep, wide), (rows, wide)
    parts: dict[str, tuple[str, list[tuple[int, int]]]] = {
        "forward": ("", [entering, weights]),
        "residual": ("", [entering, weights, leaving]),
        "bias": ("", [entering, weights, (1, wide)]),
        "dx": ("right", [leaving, weights]),
        "dw": ("left", [entering, leaving]),
    }
    options = {VMEM[0].name: str(VMEM[0].value)}  # as in the training step of chips that have as much
    name = NAME if implementation == "pallas" else "fusion"
    return [
        Case(
            from_hbm(_run(implementation, transposed, device_kind)),
            [(size, "bfloat16") for size in sizes],
            [Kernel(part, name, [], 2.0 * rows * deep * wide)],
            options,
        )
        for part, (transposed, sizes) in parts.items()
    ]


def _run(implementation: str, transposed: str, kind: str) -> Callable[..., jax.Array]:
    def xla(left: jax.Array, right: jax.Array, *added: jax.Array) -> jax.Array:
        return sum(added, jax.lax.dot_general(left, right, (_FORMS[transposed], ((), ()))))

    return functools.partial(matmul, transposed=transposed, kind=kind) if implementation == "pallas" else xla
