"""Quantization on TPU: a block is read once, its scales are computed and its numbers rounded while the next one comes."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Num

from maxlm.kernels.platform import LANES, Index, Ref, vmem_bytes
from maxlm.kernels.quantize.reference import rounded, scale_of

if TYPE_CHECKING:
    from maxlm.kernels.quantize import Quantization

# M rows, C columns, T tiles of rows

ROWS, COLUMNS = "quantize_rows", "quantize_columns"  # names of the kernels in the compiled program
BLOCK = 1 << 21  # numbers of a block of rows, at most
HEIGHTS = (512, 256, 128)  # rows of such a block
STEP = 32  # rows at a time: all of it is straight code
WIDE = 512  # columns of a block of columns
FLOAT8 = ("TPU7x",)  # TPUs that convert to it


def why_not(shape: tuple[int, ...], dtype: jnp.dtype, kind: str) -> str:
    """Reason why the kernels cannot run this; empty when they can. `kind`: of a TPU, or "" where they are interpreted."""
    if shape[1] % LANES:
        return f"{shape[1]} columns are no multiple of {LANES}"
    if shape[1] * HEIGHTS[-1] > 2 * BLOCK:
        return f"a row of {shape[1]} numbers is too long"
    if kind and not jnp.issubdtype(dtype, jnp.integer) and kind not in FLOAT8:
        return f"{kind} does not convert to {jnp.dtype(dtype).name}"
    return ""


def quantize_rows(
    x_MC: Float[Array, "M C"], form: "Quantization", *, interpret: bool = False
) -> tuple[Num[Array, "M C"], Float[Array, " M"]]:
    """See `maxlm.kernels.quantize`."""
    rows, columns = x_MC.shape
    height = next((height for height in HEIGHTS if height * columns <= BLOCK), HEIGHTS[-1])
    values_MC, scale_1M = pl.pallas_call(
        functools.partial(_rows_kernel, form),
        name=ROWS,
        out_shape=(jax.ShapeDtypeStruct((rows, columns), form.dtype), jax.ShapeDtypeStruct((1, rows), jnp.float32)),
        grid=(-(-rows // height),),
        in_specs=[pl.BlockSpec((height, columns), lambda m: (m, 0))],
        out_specs=(pl.BlockSpec((height, columns), lambda m: (m, 0)), pl.BlockSpec((1, height), lambda m: (0, m))),
        scratch_shapes=[pltpu.VMEM((height, LANES), jnp.float32)],
        cost_estimate=_cost(x_MC, form),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes("TPU v5")),
        interpret=interpret,
    )(x_MC)
    return values_MC, scale_1M[0]


def _rows_kernel(form: "Quantization", x_ref: Ref, values_ref: Ref, scale_ref: Ref, upright_ref: Ref) -> None:
    def part(i: Index) -> None:
        rows = pl.Slice(pl.multiple_of(i * STEP, STEP), STEP)
        x = x_ref[rows, :].astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=1, keepdims=True), form)
        values_ref[rows, :] = rounded(x * (1 / scale), form)
        upright_ref[rows, :] = jnp.broadcast_to(scale, (STEP, LANES))

    pl.loop(0, x_ref.shape[0] // STEP)(part)
    scale_ref[...] = jnp.transpose(upright_ref[...])[:1]


def quantize_columns(
    x_MC: Float[Array, "M C"], form: "Quantization", tile: int, *, transposed: bool, interpret: bool = False
) -> tuple[Num[Array, "..."], Float[Array, "T C"]]:
    """See `maxlm.kernels.quantize`."""
    rows, columns = x_MC.shape
    wide = next(wide for wide in (WIDE, WIDE // 2, LANES) if columns % wide == 0)
    tiles = -(-rows // tile)
    shape, block = ((columns, rows), (wide, tile)) if transposed else ((rows, columns), (tile, wide))
    values, scale_T1C = pl.pallas_call(
        functools.partial(_columns_kernel, form, rows, transposed),
        name=COLUMNS,
        out_shape=(jax.ShapeDtypeStruct(shape, form.dtype), jax.ShapeDtypeStruct((tiles, 1, columns), jnp.float32)),
        grid=(tiles, columns // wide),
        in_specs=[pl.BlockSpec((tile, wide), lambda t, c: (t, c))],
        out_specs=(
            pl.BlockSpec(block, lambda t, c: (c, t) if transposed else (t, c)),
            pl.BlockSpec((1, 1, wide), lambda t, c: (t, 0, c)),
        ),
        cost_estimate=_cost(x_MC, form),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_bytes("TPU v5")),
        interpret=interpret,
    )(x_MC)
    return values, scale_T1C[:, 0]


def _columns_kernel(form: "Quantization", rows: int, transposed: bool, x_ref: Ref, values_ref: Ref, scale_ref: Ref) -> None:
    start = pl.program_id(0) * x_ref.shape[0]

    def part(i: Index) -> None:
        columns = pl.Slice(pl.multiple_of(i * LANES, LANES), LANES)
        x = x_ref[:, columns].astype(jnp.float32)
        row = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        x = jnp.where(jnp.isfinite(x) & (row < rows), x, 0)
        scale = scale_of(jnp.max(jnp.abs(x), axis=0, keepdims=True), form)
        scale_ref[0, :, columns] = scale
        scaled = x * (1 / scale)
        at = (columns, slice(None)) if transposed else (slice(None), columns)
        values_ref[at] = rounded(jnp.transpose(scaled) if transposed else scaled, form)

    pl.loop(0, x_ref.shape[1] // LANES)(part)


def _cost(x: jax.Array, form: "Quantization") -> pl.CostEstimate:
    """Cost of two FLOPs a number, its magnitude and its product by the scale, and of the bytes read and written."""
    moved = x.size * (x.dtype.itemsize + jnp.dtype(form.dtype).itemsize)
    return pl.CostEstimate(flops=2 * x.size, transcendentals=0, bytes_accessed=moved)
