"""Cases that the kernel lab compiles for a TPU: an operation at a real shape, forward and backward, by one of its implementations.

- attention: ours and splash
- grouped_matmul: ours and megablox, of the jax wheel; ours with operands in int8 or e4m3
- gated_mlp: matmuls that end in something elementwise, ours and what XLA makes of the same
- quantize_gated: what a gated activation makes, quantized, by our kernels and by XLA
- matmul: the plain matmuls of a training step, as XLA makes them. There is no kernel of ours to compare: one written in Pallas was no
  faster, neither in bfloat16 nor in int8 (docs/lab/benchmarks.md has the figures). With 8-bit operands sums are multiplied by scales.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from maxlm.hardware.xla_flags import VMEM
from maxlm.kernels import Quantization, gated_gradient_rows, gated_rows
from maxlm.kernels.attention import splash, tpu as flash
from maxlm.kernels.attention.shapes import AttentionShape
from maxlm.kernels.attention.splash import PassBlocks, SplashBlocks
from maxlm.kernels.attention.tpu import Blocks
from maxlm.kernels.grouped_matmul import group_metadata, tpu as grouped
from maxlm.kernels.grouped_matmul.scales import SCALED_ROWS, GradientScales, ProductScales, summed
from maxlm.kernels.grouped_matmul.shapes import GroupedShape
from maxlm.kernels.matmul import tpu as gated
from maxlm.kernels.matmul.shapes import MatmulShape, MlpShape
from maxlm.kernels.platform import CORES, LANES, VMEM_BYTES
from maxlm.kernels.quantize import gated_tpu
from maxlm.kernels.quantize.tpu import FLOAT8

DTYPES = {"int8": "int8", "e4m3": "float8_e4m3fn"}  # of operands, by implementation; others are in bfloat16
SWEPT = 4  # choices of blocks in a sweep, where a cost model ranks them all
LIKE_A_STEP = {VMEM[0].name: str(VMEM[0].value)}  # options of the compiler, as in the training step of chips that have as much VMEM


@dataclass(frozen=True)
class Kernel:
    """One part of a compiled case: its name in the program, the scalars it branches on, its FLOPs that masks leave.

    If several operations have the name (XLA's own), it is all of them. `blocks`: its block sizes, as text. `others`: names and scalars
    of further kernels of the same part. `summed`: bytes of partial results that XLA reads and adds up after it.
    """

    part: str
    name: str
    scalars: Sequence[np.ndarray]
    flops: float
    blocks: str = ""
    others: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    summed: int = 0


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


# --- attention

GROUPS_OF_A_CASE = 2  # groups of heads that are compiled; all of them cost the same
# Choices of blocks that a sweep compares, as many of either implementation.
BLOCKS = (Blocks(1024, 1024), Blocks(512, 512), Blocks(256, 256), Blocks(2048, 2048))
SPLASH_BLOCKS = (
    SplashBlocks(PassBlocks(1024, 1024, 512), PassBlocks(1024, 1024, 512)),
    SplashBlocks(PassBlocks(512, 1024, 512), PassBlocks(512, 1024, 512)),
    SplashBlocks(PassBlocks(2048, 2048, 512), PassBlocks(1024, 2048, 512)),
    SplashBlocks(PassBlocks(512, 512, 512), PassBlocks(512, 512, 512), fused=False),
)


def attention_cases(shape: AttentionShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """Gradients of attention, by the blocks that run or by all that fit.

    A batch has a row for each core of a megacore chip: splash's backward pass divides rows alone between them, and of one row all is done
    by one core.
    """
    if implementation == "splash":
        chosen = splash.blocks_of(shape.seq_len, device_kind)
        choices = [chosen, *(blocks.within(shape.seq_len) for blocks in SPLASH_BLOCKS)] if sweep else [chosen]
        return [_splash_case(shape, device_kind, blocks) for blocks in dict.fromkeys(choices)]
    chosen_pair = flash.sizes_of(shape.seq_len, shape.head_dim, shape.window, device_kind)
    if not sweep:
        return [_flash_case(shape, device_kind, chosen_pair)]
    pairs = dict.fromkeys([chosen_pair, *(blocks.within(shape.seq_len) for blocks in BLOCKS)])
    fitting = [pair for pair in pairs if not flash.why_not(shape.seq_len, shape.head_dim, device_kind, blocks=pair)]
    return [_flash_case(shape, device_kind, pair) for pair in fitting]


def _flash_case(shape: AttentionShape, device_kind: str, blocks: Blocks) -> Case:
    segments = jnp.asarray(_segments(shape, device_kind))
    ranges = (np.asarray(flash.block_ranges(jnp.stack([segments] * 2, axis=1), block)) for block in blocks)

    def run(*operands: jax.Array) -> jax.Array:
        return flash.attention_flash(*operands, **_options(shape), device_kind=device_kind, blocks=blocks)[0]

    kernels = [
        Kernel(part, name, [of_blocks], 0.0, str(block))
        for part, name, of_blocks, block in zip(PASSES, (flash.FORWARD, flash.BACKWARD), ranges, blocks, strict=True)
    ]
    return _attention_case(shape, device_kind, run, kernels)


def _splash_case(shape: AttentionShape, device_kind: str, blocks: SplashBlocks) -> Case:
    _, heads = _groups_and_heads(shape, device_kind)
    kernel = splash.splash_kernel(heads, shape.seq_len, shape.mask, shape.softcap, interpret=False, blocks=blocks)
    infos = {"splash_mha_fwd": kernel.fwd_mask_info, "splash_mha_dkv": kernel.dkv_mask_info, "splash_mha_dq": kernel.dq_mask_info}
    scalars = {
        name: [np.asarray(array) for array in (info.data_next, info.block_mask, info.mask_next) if array is not None]
        for name, info in infos.items()
        if info is not None
    }
    forward, backward, *others = scalars
    partial_sums = shape.seq_len // blocks.backward.keys if blocks.fused else 0  # of dq, in bfloat16: one a block of keys
    summed = 2 * partial_sums * CORES.get(device_kind, 1) * heads * shape.seq_len * shape.head_dim
    of_backward = f"{blocks.backward}{'' if blocks.fused else ' and dq'}"
    kernels = [
        Kernel("forward", forward, scalars[forward], 0.0, str(blocks.forward)),
        Kernel("backward", backward, scalars[backward], 0.0, of_backward, {name: scalars[name] for name in others}, summed),
    ]

    def run(*operands: jax.Array) -> jax.Array:
        return splash.attention_splash(*operands, **_options(shape), device_kind=device_kind, blocks=blocks)

    return _attention_case(shape, device_kind, run, kernels)


PASSES: Mapping[str, int] = {"forward": 2, "backward": 5}  # matmuls of them


def _options(shape: AttentionShape) -> dict[str, Any]:
    return {"scale": shape.head_dim**-0.5, "mask": shape.mask, "softcap": shape.softcap}


def _segments(shape: AttentionShape, device_kind: str) -> np.ndarray:
    """Segment ids: a row for each core, all of them the same."""
    return np.repeat(shape.segments(1), CORES.get(device_kind, 1), axis=0)


def _groups_and_heads(shape: AttentionShape, device_kind: str) -> tuple[int, int]:
    """Key/value heads and query heads of a row."""
    groups = min(GROUPS_OF_A_CASE // CORES.get(device_kind, 1), shape.groups)
    return groups, groups * shape.heads // shape.groups


def _attention_case(shape: AttentionShape, device_kind: str, run: Callable[..., jax.Array], kernels: Sequence[Kernel]) -> Case:
    (groups, heads), segments = _groups_and_heads(shape, device_kind), _segments(shape, device_kind)

    def gradients(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda q, k, v: run(q, k, v, operands[3]).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*operands[:3])

    one = 2.0 * heads * shape.head_dim * shape.pairs(segments)  # FLOPs of a matmul
    queries, keys = (*segments.shape, heads, shape.head_dim), (*segments.shape, groups, shape.head_dim)
    # All VMEM is the kernels': alone in a program, what they read would lie there, and take no time to come.
    options = {"xla_tpu_scoped_vmem_limit_kib": str(5 * VMEM_BYTES[device_kind] // 4 >> 10)}
    arguments = [(queries, "bfloat16"), (keys, "bfloat16"), (keys, "bfloat16"), (segments.shape, "int32")]
    return Case(gradients, arguments, [replace(kernel, flops=PASSES[kernel.part] * one) for kernel in kernels], options)


# --- grouped matmul

PARTS = ("forward", "dx", "dw")
Parts = Mapping[str, tuple[str, Sequence[np.ndarray], str]]  # of each its kernel's name, the scalars that it branches on, and its blocks
Tiling = tuple[int, int, int]  # rows; of the weights what is contracted and columns, of their gradient its rows and columns

_MEGABLOX = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")  # its package gives this name to a function


def grouped_matmul_cases(shape: GroupedShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """One matmul of experts and both of its gradients, by the tiles that run or by the first that the kernels would choose."""
    rows, deep, wide = shape.rows, shape.d_in, shape.d_out
    if implementation == "megablox":
        tilings = [list(itertools.islice(of_part, SWEPT if sweep else 1)) for of_part in _tilings(shape, device_kind)]
        made = [_megablox(shape, jnp.asarray(shape.group_sizes()), tiling) for tiling in _rounds(tilings)]
        return [_grouped_case(shape, (shape.experts, deep, wide), one, device_kind) for one in made]
    dtype = DTYPES.get(implementation, "bfloat16")
    sizes = jnp.dtype(dtype).itemsize, device_kind, 2
    choices = (
        grouped.product_tiles(rows, deep, wide, *sizes),
        grouped.product_tiles(rows, wide, deep, *sizes),
        grouped.weights_tiles(rows, deep, wide, *sizes),
    )
    best = [list(itertools.islice(tiles, SWEPT if sweep else 1)) for tiles in choices]
    sizes_E = jnp.asarray(shape.group_sizes())
    tiles_of_round = _rounds(best)
    weights = (deep, shape.experts * wide)  # side by side
    cases = [_grouped_case(shape, weights, _ours(shape, sizes_E, tiles, device_kind), device_kind) for tiles in tiles_of_round]
    if dtype == "bfloat16":
        return cases
    return [_in_8_bits(shape, case, tiles, dtype, device_kind) for case, tiles in zip(cases, tiles_of_round, strict=True)]


def _rounds(choices: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The first choice of every part, the second, ...; of the shorter lists the last again."""
    return [[of_part[min(place, len(of_part) - 1)] for of_part in choices] for place in range(max(map(len, choices)))]


def _grouped_case(shape: GroupedShape, weights: tuple[int, ...], made: tuple[Callable[..., Any], Parts], device_kind: str) -> Case:
    rows, deep, wide = shape.rows, shape.d_in, shape.d_out
    (run, parts), sizes_E = made, shape.group_sizes()
    kernels = [Kernel(part, name, own, 2.0 * rows * deep * wide, blocks) for part, (name, own, blocks) in parts.items()]
    operands = [((rows, deep), "bfloat16"), (weights, "bfloat16"), ((rows, wide), "bfloat16"), (sizes_E.shape, "int32")]
    # Megablox asks for no VMEM of its own: it takes what the compiler gives a kernel, by default too little for wide tiles.
    options = {"xla_tpu_scoped_vmem_limit_kib": str(VMEM_BYTES[device_kind] >> 10)}
    return Case(from_hbm(run, scalars=1), operands, kernels, options)


def _ours(shape: GroupedShape, sizes_E: jax.Array, tiles: Sequence[grouped.Tiles], kind: str) -> tuple[Callable[..., Any], Parts]:
    rows = shape.rows

    def run(x_MK: jax.Array, w_KG: jax.Array, dout_MN: jax.Array, group_sizes_E: jax.Array) -> tuple[jax.Array, ...]:
        return (
            grouped.product(x_MK, w_KG, group_sizes_E, device_kind=kind, tiles=tiles[0]),
            grouped.product(dout_MN, w_KG, group_sizes_E, transposed=True, device_kind=kind, tiles=tiles[1]),
            grouped.weights_gradient(x_MK, dout_MN, group_sizes_E, device_kind=kind, tiles=tiles[2]),
        )

    parts = {}
    for part, name, own in zip(PARTS, (grouped.FORWARD, grouped.ROWS, grouped.WEIGHTS), tiles, strict=True):
        plan = (group_metadata.group_visits if part == "dw" else group_metadata.row_visits)(sizes_E, rows, own.rows)
        parts[part] = (name, [np.asarray(array) for array in (plan.total, *plan.scalars)], f"{own.rows}x{own.deep}x{own.wide}")
    return run, parts


def _in_8_bits(shape: GroupedShape, case: Case, tiles: Sequence[grouped.Tiles], dtype: str, kind: str) -> Case:
    """The case with such operands, and scales before them."""
    rows, deep, wide, experts = shape.rows, shape.d_in, shape.d_out, shape.experts
    of_tiles = -(-rows // SCALED_ROWS)
    of_scales = [(rows,), (experts, wide), (experts, deep), (of_tiles, deep), (of_tiles, wide), (experts,)]

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        of_rows_M, of_wide_EN, of_deep_EK, *of_gradient = operands[:6]
        x_MK, x_KM, w_KG, dout_MN, group_sizes_E = operands[6:]
        options: Mapping[str, Any] = {"device_kind": kind, "dtype": jnp.dtype(jnp.bfloat16)}
        by_w, by_transpose = ProductScales(of_rows_M, of_wide_EN), ProductScales(of_rows_M, of_deep_EK)
        return (
            grouped.product(x_MK, w_KG, group_sizes_E, scales=by_w, tiles=tiles[0], **options),
            grouped.product(dout_MN, w_KG, group_sizes_E, transposed=True, scales=by_transpose, tiles=tiles[1], **options),
            grouped.weights_gradient(x_KM, dout_MN, group_sizes_E, scales=GradientScales(*of_gradient), tiles=tiles[2], **options),
        )

    arrays = [((rows, deep), dtype), ((deep, rows), dtype), ((deep, experts * wide), dtype), ((rows, wide), dtype), ((experts,), "int32")]
    finite = np.ones(experts, np.float32)
    kernels = [replace(kernel, scalars=[*kernel.scalars, finite]) if kernel.part == "dw" else kernel for kernel in case.kernels]
    return replace(
        case, function=from_hbm(run, scalars=1), arguments=[*((size, "float32") for size in of_scales), *arrays], kernels=kernels
    )


def _megablox(shape: GroupedShape, sizes_E: jax.Array, choices: Sequence[Tiling]) -> tuple[Callable[..., Any], Parts]:
    rows, tilings = shape.rows, dict(zip(PARTS, choices, strict=True))

    def run(x_MK: jax.Array, w_EKN: jax.Array, dout_MN: jax.Array, group_sizes_E: jax.Array) -> list[jax.Array]:
        # Not jitted by itself, a kernel has the name of the scope.
        gmm, tgmm = (getattr(_MEGABLOX, name).__wrapped__ for name in ("gmm", "tgmm"))
        calls = {
            "forward": lambda tiling: gmm(x_MK, w_EKN, group_sizes_E, jnp.bfloat16, tiling),
            "dx": lambda tiling: gmm(dout_MN, w_EKN, group_sizes_E, jnp.bfloat16, tiling, transpose_rhs=True),
            "dw": lambda tiling: tgmm(x_MK.T, dout_MN, group_sizes_E, jnp.bfloat16, tiling),
        }
        out = []
        for part, call in calls.items():
            with jax.named_scope(f"megablox_{part}"):
                out.append(call(tilings[part]))
        return out

    parts = {}
    for part, tiling in tilings.items():
        metadata, total = _MEGABLOX.make_group_metadata(
            group_sizes=sizes_E,
            m=rows,
            tm=tiling[0],
            start_group=jnp.int32(0),
            num_nonzero_groups=shape.experts,
            visit_empty_groups=part == "dw",
        )
        scalars = [np.asarray(array) for array in (total, *metadata, np.zeros(1, np.int32))]
        parts[part] = (f"megablox_{part}", scalars, "x".join(map(str, tiling)))
    return run, parts


def _tilings(shape: GroupedShape, kind: str) -> Iterator[Iterator[Tiling]]:
    """Choices of each part, the best found on v6e first: small groups, and groups of any size, waste less in low tiles."""
    deep, wide, a_group = shape.d_in, shape.d_out, shape.rows // shape.experts
    height = 256 if shape.skew is not None and a_group <= 512 else 512
    yield _product_tilings(deep, wide, height, kind)
    yield _product_tilings(wide, deep, height, kind)
    first = 1024 if shape.skew is None and a_group > 1024 else height
    heights = dict.fromkeys((first, 512, 256, 1024, 128))
    yield ((tall, min(deep, 2048), min(_share(wide, kind), 2048)) for tall in heights)


def _product_tilings(deep: int, wide: int, height: int, kind: str) -> Iterator[Tiling]:
    """A contraction of 4,096 whole, of a longer one 1,792, and the most columns that fit; then other heights; then other contractions."""
    best = deep if deep <= 4096 else 1792
    tries = [(height, best), (256, best), (512, best), (height, min(deep, 2048)), (1024, best), (128, best)]
    for tall, contracted in dict.fromkeys(tries):
        for columns in (4096, 2048, 1024, 512) if contracted <= 2048 else (2048, 1024, 512):
            tiling = (tall, contracted, min(_share(wide, kind), columns))
            moving = tall * contracted + contracted * tiling[2] + tall * tiling[2]
            if 4 * moving + 4 * tall * tiling[2] <= 0.9 * VMEM_BYTES[kind]:
                yield tiling
                break


def _share(wide: int, kind: str) -> int:
    """Columns that leave a tile to every core."""
    cores = CORES.get(kind, 1)
    return wide if wide % (cores * LANES) else wide // cores


# --- gated feed-forward layer


def gated_mlp_cases(shape: MlpShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """Forward: both matmuls and what the next one reads. Backward: the first matmul, and the gradients of gate and up.

    By the blocks that run, or by the best that the account of them finds.
    """
    if implementation != "fused":
        return [_gated_case(shape, "forward", _xla_forward), _gated_case(shape, "backward", _xla_backward)]
    sizes, cases = (shape.rows, shape.d_model, shape.d_ff, 2, device_kind), []
    for part, run, name, weights in (
        ("forward", gated.gated_forward, gated.FORWARD, 2),
        ("backward", gated.gated_backward, gated.BACKWARD, 1),
    ):
        for block in gated.blocks_of(*sizes, weights=weights)[: SWEPT if sweep else 1]:
            ours = partial(run, activation="silu", device_kind=device_kind, block=block)
            cases.append(_gated_case(shape, part, ours, name, f"{block.rows}x{block.columns}/{block.part}"))
    return cases


def _gated_case(shape: MlpShape, part: str, run: Callable[..., tuple[jax.Array, ...]], name: str = "fusion", blocks: str = "") -> Case:
    rows, d_model, d_ff = shape.rows, shape.d_model, shape.d_ff
    leaving, entering, inside = (rows, d_model), (d_model, d_ff), (rows, d_ff)
    operands = [leaving, entering, entering] if part == "forward" else [leaving, entering[::-1], inside, inside]
    flops = 2.0 * (2 if part == "forward" else 1) * rows * d_model * d_ff
    return Case(from_hbm(run), [(size, "bfloat16") for size in operands], [Kernel(part, name, [], flops, blocks)], LIKE_A_STEP)


def _xla_forward(x_MD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array) -> tuple[jax.Array, ...]:
    gate_MF, up_MF = x_MD @ gate_DF, x_MD @ up_DF
    return jax.nn.silu(gate_MF) * up_MF, gate_MF, up_MF


def _xla_backward(dy_MD: jax.Array, down_FD: jax.Array, gate_MF: jax.Array, up_MF: jax.Array) -> tuple[jax.Array, ...]:
    hidden_MF, transposed = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate_MF, up_MF)
    return hidden_MF, *transposed(jnp.einsum("MD,FD->MF", dy_MD, down_FD))


# --- what the gated activation makes, in 8 bits


def quantize_gated_cases(shape: MlpShape, implementation: str, device_kind: str, *, sweep: bool = False) -> Sequence[Case]:
    """Hidden units in int8, or in e4m3 on chips that convert to it; and from their gradient them again and the gradients of gate and up.

    No FLOPs of the matrix unit.
    """
    in_e4m3, inside, columns = device_kind in FLOAT8, (1, shape.rows, shape.d_ff), (shape.d_ff,)
    form = Quantization(jnp.dtype(DTYPES["e4m3" if in_e4m3 else "int8"]), 448.0 if in_e4m3 else 127.0, 2.0**-100)

    def forward(gate: jax.Array, up: jax.Array) -> Any:
        return gated_rows(gate, up, form, implementation=implementation)

    def backward(dhidden: jax.Array, gate: jax.Array, up: jax.Array, of_gate: jax.Array, of_up: jax.Array) -> Any:
        return gated_gradient_rows(dhidden, gate, up, of_gate, of_up, form, form, implementation=implementation)

    arrays, scales = [(inside, "bfloat16")] * 3, [(columns, "float32")] * 2
    ours = implementation == "tpu"
    parts = (("forward", forward, gated_tpu.FORWARD, arrays[:2]), ("backward", backward, gated_tpu.BACKWARD, [*arrays, *scales]))
    return [  # the library's arrays are too large for VMEM, and jax selects between no arrays of different memories
        Case(from_hbm(run) if ours else run, arguments, [Kernel(part, name if ours else "fusion", [], 0.0)], LIKE_A_STEP)
        for part, run, name, arguments in parts
    ]


# --- plain matmuls

_FORMS = {"": ((1,), (0,)), "right": ((1,), (1,)), "left": ((0,), (0,))}  # the transposed operand: contracted dims


def matmul_cases(shape: MatmulShape, implementation: str, device_kind: str, *, sweep: bool = False) -> Sequence[Case]:
    """x W, the same with a residual and with a bias added, dy W^T, and x^T dy. There are no blocks to sweep."""
    rows, deep, wide = (shape.rows, shape.d_in, shape.d_out)
    entering, weights, leaving = (rows, deep), (deep, wide), (rows, wide)
    parts: dict[str, tuple[str, list[tuple[int, int]]]] = {
        "forward": ("", [entering, weights]),
        "residual": ("", [entering, weights, leaving]),
        "bias": ("", [entering, weights, (1, wide)]),
        "dx": ("right", [leaving, weights]),
        "dw": ("left", [entering, leaving]),
    }
    flops = 2.0 * rows * deep * wide
    if dtype := DTYPES.get(implementation):
        results = {"forward": leaving, "dx": entering, "dw": weights}
        return [
            Case(
                from_hbm(_scaled_matmul(transposed)),
                [*((size, dtype) for size in sizes), ((results[part][0], 1), "float32"), ((1, results[part][1]), "float32")],
                [Kernel(part, "fusion", [], flops)],
                LIKE_A_STEP,
            )
            for part, (transposed, sizes) in parts.items()
            if part in results
        ]
    return [
        Case(from_hbm(_matmul(transposed)), [(size, "bfloat16") for size in sizes], [Kernel(part, "fusion", [], flops)], LIKE_A_STEP)
        for part, (transposed, sizes) in parts.items()
    ]


def _matmul(transposed: str) -> Callable[..., jax.Array]:
    def run(left: jax.Array, right: jax.Array, *added: jax.Array) -> jax.Array:
        return sum(added, jax.lax.dot_general(left, right, (_FORMS[transposed], ((), ()))))

    return run


def _scaled_matmul(transposed: str) -> Callable[..., jax.Array]:
    """Matmul of quantized operands, with a scale a row and a column of the result."""

    def run(left: jax.Array, right: jax.Array, of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
        return (summed(left, right, _FORMS[transposed]).astype(jnp.float32) * of_rows * of_columns).astype(jnp.bfloat16)

    return run


CASES: Mapping[str, Callable[..., Sequence[Case]]] = {
    "attention": attention_cases,
    "grouped_matmul": grouped_matmul_cases,
    "gated_mlp": gated_mlp_cases,
    "quantize_gated": quantize_gated_cases,
    "matmul": matmul_cases,
    **dict.fromkeys(("grouped_matmul_int8", "grouped_matmul_e4m3"), grouped_matmul_cases),
    **dict.fromkeys(("matmul_int8", "matmul_e4m3"), matmul_cases),
}
