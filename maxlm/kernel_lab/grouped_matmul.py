"""The grouped matmul in the kernel lab: ours and megablox, of the jax wheel."""

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.kernel_lab.cases import SWEPT, Case, Kernel, from_hbm
from maxlm.kernels.grouped_matmul import group_metadata, tpu
from maxlm.kernels.grouped_matmul.shapes import GroupedShape
from maxlm.kernels.platform import CORES, LANES, VMEM_BYTES

PARTS = ("forward", "dx", "dw")
Parts = Mapping[str, tuple[str, Sequence[np.ndarray], str]]  # of each its kernel's name, the scalars that it branches on, and its blocks
Tiling = tuple[int, int, int]  # rows; of the weights what is contracted and columns, of their gradient its rows and columns

_MEGABLOX = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")  # its package gives this name to a function


def grouped_matmul_cases(shape: GroupedShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """One matmul of experts and both of its gradients, by the tiles that run or by the first that the kernels would choose."""
    rows, deep, wide = shape.rows, shape.d_in, shape.d_out
    if implementation != "tpu":
        megablox = _megablox(shape, jnp.asarray(shape.group_sizes()), device_kind)
        return [_case(shape, (shape.experts, deep, wide), megablox, device_kind)]
    choices = (
        tpu.product_tiles(rows, deep, wide, 2, device_kind),
        tpu.product_tiles(rows, wide, deep, 2, device_kind),
        tpu.weights_tiles(rows, deep, wide, 2, device_kind),
    )
    best = [list(itertools.islice(tiles, SWEPT if sweep else 1)) for tiles in choices]
    rounds = range(max(map(len, best)))  # of the shorter lists the last again
    sizes_E = jnp.asarray(shape.group_sizes())
    tiles_of_round = [[tiles[min(place, len(tiles) - 1)] for tiles in best] for place in rounds]
    weights = (deep, shape.experts * wide)  # side by side
    return [_case(shape, weights, _ours(shape, sizes_E, tiles, device_kind), device_kind) for tiles in tiles_of_round]


def _case(shape: GroupedShape, weights: tuple[int, ...], implementation: tuple[Callable[..., Any], Parts], device_kind: str) -> Case:
    rows, deep, wide = shape.rows, shape.d_in, shape.d_out
    (run, parts), sizes_E = implementation, shape.group_sizes()
    kernels = [Kernel(part, name, own, 2.0 * rows * deep * wide, blocks) for part, (name, own, blocks) in parts.items()]
    operands = [((rows, deep), "bfloat16"), (weights, "bfloat16"), ((rows, wide), "bfloat16"), (sizes_E.shape, "int32")]
    # Megablox asks for no VMEM of its own: it takes what the compiler gives a kernel, by default too little for wide tiles.
    options = {"xla_tpu_scoped_vmem_limit_kib": str(VMEM_BYTES[device_kind] >> 10)}
    return Case(from_hbm(run, scalars=1), operands, kernels, options)


def _ours(shape: GroupedShape, sizes_E: jax.Array, tiles: Sequence[tpu.Tiles], kind: str) -> tuple[Callable[..., Any], Parts]:
    rows = shape.rows

    def run(x_MK: jax.Array, w_KG: jax.Array, dout_MN: jax.Array, group_sizes_E: jax.Array) -> tuple[jax.Array, ...]:
        return (
            tpu.product(x_MK, w_KG, group_sizes_E, device_kind=kind, tiles=tiles[0]),
            tpu.product(dout_MN, w_KG, group_sizes_E, transposed=True, device_kind=kind, tiles=tiles[1]),
            tpu.weights_gradient(x_MK, dout_MN, group_sizes_E, device_kind=kind, tiles=tiles[2]),
        )

    parts = {}
    for part, name, own in zip(PARTS, (tpu.FORWARD, tpu.ROWS, tpu.WEIGHTS), tiles, strict=True):
        plan = (group_metadata.group_visits if part == "dw" else group_metadata.row_visits)(sizes_E, rows, own.rows)
        parts[part] = (name, [np.asarray(array) for array in (plan.total, *plan.scalars)], f"{own.rows}x{own.deep}x{own.wide}")
    return run, parts


def _megablox(shape: GroupedShape, sizes_E: jax.Array, kind: str) -> tuple[Callable[..., Any], Parts]:
    rows, deep, wide = shape.rows, shape.d_in, shape.d_out
    height = 256 if shape.skew is not None and rows // shape.experts <= 512 else 512
    choices = (
        _product_tiling(deep, wide, height, kind),
        _product_tiling(wide, deep, height, kind),
        (1024 if shape.skew is None and rows // shape.experts > 1024 else height, min(deep, 2048), min(_share(wide, kind), 2048)),
    )
    tilings = dict(zip(PARTS, choices, strict=True))

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


def _product_tiling(deep: int, wide: int, height: int, kind: str) -> Tiling:
    """The best found on v6e: a contraction of 4,096 whole, of a longer one 1,792, and the most columns for which there is room."""
    contracted = deep if deep <= 4096 else 1792
    for columns in (4096, 2048, 1024, 512) if contracted <= 2048 else (2048, 1024, 512):
        tiling = (height, contracted, min(_share(wide, kind), columns))
        moving = height * contracted + contracted * tiling[2] + height * tiling[2]
        if 4 * moving + 4 * height * tiling[2] <= 0.9 * VMEM_BYTES[kind]:
            return tiling
    raise AssertionError("every shape of the lab fits into every chip")


def _share(wide: int, kind: str) -> int:
    """Columns that leave a tile to every core."""
    cores = CORES.get(kind, 1)
    return wide if wide % (cores * LANES) else wide // cores
