"""`gated` on TPU: rows are read once and written in 8 bits. A few rows at a time are computed, chunks of columns after each other, which
finds their largest magnitudes, and then rounded from VMEM.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Num

from maxlm.kernels.matmul import tpu as matmul_tpu
from maxlm.kernels.platform import LANES, Index, Ref, vmem_bytes
from maxlm.kernels.quantize.reference import scale_of
from maxlm.kernels.quantize.tpu import FLOAT8

if TYPE_CHECKING:
    from maxlm.kernels.quantize import Quantization

# M rows, F feed-forward width

FORWARD, BACKWARD = "quantize_gated", "quantize_gated_gradient"  # names of the kernels in the compiled program
ROWS = 128  # of a block: scales leave in whole registers
STEP = 32  # rows at a time: as many as a register holds with 8 bits
CHUNKS = (512, 256, LANES)  # columns at a time: all of it is straight code
# SiLU by tanh, which is one instruction: a division takes several.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {**matmul_tpu.ACTIVATIONS, "silu": lambda x: x * (0.5 * jnp.tanh(0.5 * x) + 0.5)}


def why_not(x_MF: Array, options: dict[str, Any], kind: str) -> str:
    """Reason why the kernels cannot run this; empty when they can. `kind`: of a TPU, or "" where they are interpreted."""
    rows, columns = x_MF.shape
    if rows % ROWS or columns % LANES:
        return f"{rows} rows and {columns} columns are not multiples of {ROWS} and {LANES}"
    blocks = 2 * ROWS * columns * (3 * x_MF.dtype.itemsize + 3)
    if blocks + 3 * 4 * STEP * columns > vmem_bytes(kind):
        return f"rows of {columns} numbers do not fit into VMEM"
    forms = [form for name, form in options.items() if name.endswith("form")]
    if kind and kind not in FLOAT8 and not all(jnp.issubdtype(form.dtype, jnp.integer) for form in forms):
        return f"{kind} does not convert to {', '.join(jnp.dtype(form.dtype).name for form in forms)}"
    return ""


def forward(
    gate_MF: Float[Array, "M F"], up_MF: Float[Array, "M F"], form: "Quantization", activation: str, *, kind: str, interpret: bool
) -> tuple[Num[Array, "M F"], Float[Array, " M"]]:
    """See `gated.gated_rows`."""
    act = ACTIVATIONS[activation]
    values, scale = _call(FORWARD, lambda gate, up: ((act(gate) * up,),), (form,), [gate_MF, up_MF], [], kind, interpret)
    return values, scale


def backward(
    dhidden_MF: Float[Array, "M F"],
    gate_MF: Float[Array, "M F"],
    up_MF: Float[Array, "M F"],
    of_gate_1F: Float[Array, "1 F"],
    of_up_1F: Float[Array, "1 F"],
    form: "Quantization",
    gradient_form: "Quantization",
    activation: str,
    *,
    kind: str,
    interpret: bool,
) -> tuple[Array, ...]:
    """See `gated.gated_gradient_rows`."""
    compute = functools.partial(_backward_kernel, ACTIVATIONS[activation])
    rows, columns = [dhidden_MF, gate_MF, up_MF], [of_gate_1F, of_up_1F]
    return _call(BACKWARD, compute, (form, gradient_form), rows, columns, kind, interpret)


def _backward_kernel(
    act: Callable[[Array], Array], dhidden: Array, gate: Array, up: Array, of_gate: Array, of_up: Array
) -> tuple[tuple[Array, ...], ...]:
    hidden, transposed = jax.vjp(lambda gate, up: act(gate) * up, gate, up)
    dgate, dup = transposed(dhidden)
    return (hidden,), (dgate * of_gate, dup * of_up)


def _call(
    name: str,
    compute: Callable[..., tuple[tuple[Array, ...], ...]],
    forms: "Sequence[Quantization]",
    rows: Sequence[Array],
    columns: Sequence[Array],
    kind: str,
    interpret: bool,
) -> tuple[Array, ...]:
    """For each of `forms` values, of all arrays of a group that `compute` returns, and the scale of each row of the group."""
    many, wide = rows[0].shape
    arrays = (1, 2)[: len(forms)]  # of each group
    block, scale = pl.BlockSpec((ROWS, wide), lambda m: (m, 0)), pl.BlockSpec((1, ROWS), lambda m: (0, m))
    out_specs, out_shape = [], []
    for form, number in zip(forms, arrays, strict=True):
        out_specs += [block] * number + [scale]
        out_shape += [jax.ShapeDtypeStruct((many, wide), form.dtype)] * number + [jax.ShapeDtypeStruct((1, many), jnp.float32)]
    computed = pl.estimate_cost(compute, *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (*rows, *columns)))
    cost = pl.CostEstimate(
        flops=computed.flops + 2 * sum(arrays) * rows[0].size,  # and of each result its magnitude, and its product by the scale
        transcendentals=computed.transcendentals,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*rows, *columns)) + sum(x.size * x.dtype.itemsize for x in out_shape),
    )
    results = pl.pallas_call(
        functools.partial(_kernel, compute, forms, arrays, len(rows), len(columns)),
        name=name,
        out_shape=out_shape,
        grid=(many // ROWS,),
        in_specs=[block] * len(rows) + [pl.BlockSpec((1, wide), lambda m: (0, 0))] * len(columns),
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((STEP, wide), jnp.float32)] * sum(arrays) + [pltpu.VMEM((ROWS, LANES), jnp.float32)] * len(forms),
        cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(kind)),
        interpret=interpret,
    )(*rows, *columns)
    return tuple(x[0] if x.dtype == jnp.float32 else x for x in results)


def _kernel(
    compute: Callable[..., tuple[tuple[Array, ...], ...]],
    forms: "Sequence[Quantization]",
    arrays: tuple[int, ...],
    rows: int,
    columns: int,
    *refs: Ref,
) -> None:
    inputs, scales, refs = refs[:rows], refs[rows : rows + columns], refs[rows + columns :]
    outputs, refs = refs[: sum(arrays) + len(forms)], refs[sum(arrays) + len(forms) :]
    computed, upright = refs[: sum(arrays)], refs[sum(arrays) :]
    groups, place = [], 0
    for number in arrays:
        groups.append((outputs[place : place + number], outputs[place + number]))
        place += number + 1
    width = next(width for width in CHUNKS if inputs[0].shape[1] % width == 0)

    def part(i: Index) -> None:
        here = pl.Slice(pl.multiple_of(i * STEP, STEP), STEP)

        def chunk(c: Index, largest: tuple[Array, ...]) -> tuple[Array, ...]:
            at = pl.Slice(pl.multiple_of(c * width, width), width)
            read = [ref[here, at].astype(jnp.float32) for ref in inputs] + [ref[:, at] for ref in scales]
            found, number = [], 0
            for so_far, group in zip(largest, compute(*read), strict=True):
                for x in group:
                    computed[number][:, at] = x
                    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
                    for lane in range(0, width, LANES):
                        so_far = jnp.maximum(so_far, bits[:, lane : lane + LANES])
                    number += 1
                found.append(so_far)
            return tuple(found)

        largest = jax.lax.fori_loop(0, inputs[0].shape[1] // width, chunk, (jnp.zeros((STEP, LANES), jnp.int32),) * len(forms))
        inverse = []
        for form, bits, ref in zip(forms, largest, upright, strict=True):
            scale = scale_of(jax.lax.bitcast_convert_type(jnp.max(bits, axis=1, keepdims=True), jnp.float32), form)
            ref[here, :] = jnp.broadcast_to(scale, (STEP, LANES))
            inverse.append(1 / scale)

        def write(c: Index, _: None) -> None:
            at, number = pl.Slice(pl.multiple_of(c * width, width), width), 0
            for form, by, (values, _) in zip(forms, inverse, groups, strict=True):
                for ref in values:
                    ref[here, at] = _rounded(computed[number][:, at] * by, form)
                    number += 1

        jax.lax.fori_loop(0, inputs[0].shape[1] // width, write, None)

    pl.loop(0, ROWS // STEP)(part)
    for ref, (_, scale_ref) in zip(upright, groups, strict=True):
        scale_ref[...] = jnp.transpose(ref[...])[:1]


def _rounded(scaled: Float[Array, "M F"], form: "Quantization") -> Num[Array, "M F"]:
    """To nearest, ties to even; numbers divided by the scale of the largest do not exceed the largest of the format.

    Added to 1.5 x 2^23, where the unit in the last place is 1, a number is rounded; its bits are the bits of 1.5 x 2^23 plus the integer.
    """
    if jnp.issubdtype(form.dtype, jnp.integer):
        return (jax.lax.bitcast_convert_type(scaled + 1.5 * 2.0**23, jnp.int32) - 0x4B400000).astype(form.dtype)
    return jnp.clip(scaled, -form.largest, form.largest).astype(form.dtype)
