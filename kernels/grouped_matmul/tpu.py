"""Grouped matmul on TPU: rows times the weights of their group, and the gradient of the weights.

A grid step is a visit: one tile of rows for one group that has rows in it. A tile wholly of one group is a single dot; at the edges
of groups a visit computes only the pieces of the tile that hold rows of its group. A dot holds the whole contraction, so sums stay in the
matrix unit: no pass over a float32 accumulator. The weights of a group are fetched once for each tile of columns, while the
rows of the group before are still computed. Operands may be int8 or float8 with scales, which are applied to the float32 result.
"""

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.gradients import differentiable
from maxlm.kernels.grouped_matmul.group_metadata import MetadataRefs, Visit, group_visits, row_visits
from maxlm.kernels.grouped_matmul.scales import SCALED_ROWS, GradientScales, ProductScales, summed
from maxlm.kernels.platform import CORES, LANES, VMEM_BYTES, WIDE, Index, Ref, vmem_bytes

# M rows, E experts, K inputs and N outputs of the weights, G = E N: weights of groups side by side. A product contracts C of its rows to D:
# K to N, or transposed N to K.

# Names of the kernels in the compiled program.
FORWARD, ROWS, WEIGHTS = "grouped_matmul_forward", "grouped_matmul_by_transpose", "grouped_matmul_transposed_dw"
MOST_ROWS = 512  # of a tile
PIECES, DEEP_PIECE = (256, 128), 256  # rows of what is computed of a tile where groups meet; the weights' gradient contracts them
DEEP_PIECES = (512, DEEP_PIECE)  # of 8 bits: the contraction must be longer, to outlast the sum in float32 that follows
MOST_COLUMNS = 2048  # of a product's tile: all rows are read once for each
SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)  # rows of a tile of the weights' gradient, besides multiples of LANES that divide them
MOST_CYCLES = 8192  # of one dot: all of it is straight code, which takes long to compile
_SPARE = 12 << 20  # bytes of VMEM for what the compiler keeps there: registers that do not fit, up to 11 MiB on v6e


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: rows by `deep` (the contraction of a product, weights' rows in their gradient) by `wide` columns of the result.

    A dot computes `chunk` of the columns of a product, of the rows of the weights' gradient.
    """

    rows: int
    deep: int
    wide: int
    chunk: int


def product_tiles(rows: int, contracted: int, columns: int, itemsize: int, kind: str, out: int | None = None) -> Iterator[Tiles]:
    """Tiles of a product that fit into VMEM, best first: the widest, of these the highest. `out`: bytes of a number of the result, by
    default as many as of an operand, `itemsize`.
    """
    heights = dict.fromkeys(min(most, _up(rows, PIECES[-1])) for most in (MOST_ROWS, MOST_ROWS // 2))
    for wide in _widths(columns, CORES.get(kind, 1)):
        for height in heights:
            tiles = Tiles(height, contracted, wide, _chunk(wide, height * contracted, kind))
            if product_bytes(tiles, itemsize, out) <= vmem_bytes(kind):
                yield tiles


def _widths(columns: int, cores: int) -> Iterator[int]:
    """Tiles that divide the columns, the widest first: first tiles that give every core as many, then tiles for one core."""
    if columns % LANES:  # of a product by transposes: rows of the weights
        yield columns
    for shared in dict.fromkeys((cores, 1)):
        yield from (wide for wide in range(MOST_COLUMNS, 0, -LANES) if columns % (shared * wide) == 0)


def weights_tiles(rows: int, deep: int, wide: int, itemsize: int, kind: str, out: int | None = None) -> Iterator[Tiles]:
    """Tiles of the weights' gradient that fit into VMEM, best first: rows are read least often, with little computed beyond edges."""
    height = min(MOST_ROWS if itemsize > 1 else 2 * MOST_ROWS, _up(rows, DEEP_PIECE))
    depths, widths = {*_parts(deep), *(min(deep, size) for size in SIZES)}, _parts(wide)  # no tile may reach into the next group's columns
    tried = (Tiles(height, d, w, _chunk(d, height * w, kind)) for d in sorted(depths) for w in widths)
    fitting = [tiles for tiles in tried if weights_bytes(tiles, itemsize, out) <= vmem_bytes(kind)]

    def time(tiles: Tiles) -> float:
        """Relative time of the computation and of reading rows, at 512 FLOPs a byte."""
        over, across, cores = -(-deep // tiles.deep), wide // tiles.wide, CORES.get(kind, 1)
        idle = over % cores and across % cores  # one core does it all
        return (cores if idle else 1) * over * across * (tiles.deep * tiles.wide + 256 * (tiles.deep + tiles.wide))

    return iter(sorted(fitting, key=time))


def _parts(size: int) -> list[int]:
    """Whole lanes that divide it, no more than the greatest of `SIZES`."""
    return [part for part in range(LANES, min(size, SIZES[-1]) + 1, LANES) if size % part == 0]


def product_bytes(tiles: Tiles, itemsize: int, out: int | None = None) -> int:
    """VMEM of a product: everything twice, for double buffering, and the float32 result of a dot."""
    rows, deep, wide = tiles.rows, _up(tiles.deep, LANES), _up(tiles.wide, LANES)
    return 2 * (itemsize * (rows * deep + deep * wide) + (out or itemsize) * rows * wide) + 4 * rows * tiles.chunk + _SPARE


def weights_bytes(tiles: Tiles, itemsize: int, out: int | None = None) -> int:
    """VMEM of the weights' gradient: everything twice, the sum in float32, and the result of a dot."""
    rows, deep, wide = tiles.rows, _up(tiles.deep, LANES), tiles.wide
    moving = itemsize * (rows * deep + rows * wide) + (out or itemsize) * deep * wide
    return 2 * moving + 4 * deep * wide + 4 * tiles.chunk * wide + _SPARE


def _chunk(size: int, products: int, kind: str) -> int:
    """Share of `size` that one dot of at most `MOST_CYCLES` computes, at `products` multiplications each."""
    side = 2 * LANES if kind in WIDE else LANES
    parts = -(-size * products // (MOST_CYCLES * 4 * side**2))  # multiplications a cycle: 4 units of 128 by 128, or 2 of 256 twice
    return size if parts == 1 else min(_up(-(-size // parts), side), size)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def why_not(rows: int, deep: int, wide: int, itemsize: int, kind: str, out: int | None = None) -> str:
    """Reason why the kernels cannot run this on a device; empty when they can."""
    if problem := unaligned(wide):
        return problem
    if kind not in VMEM_BYTES:
        return f"nothing is known of the VMEM of {kind or 'a device that no mesh names'}"
    products = [product_tiles(rows, *sides, itemsize, kind, out) for sides in ((deep, wide), (wide, deep))]
    if None in (next(tiles, None) for tiles in (*products, weights_tiles(rows, deep, wide, itemsize, kind, out))):
        return f"rows of {max(deep, wide)} do not fit into the {vmem_bytes(kind) >> 20} MiB of VMEM that are available on {kind}"
    return ""


def unaligned(wide: int) -> str:
    """Reason why the kernels cannot run this anywhere, interpreted or not; empty when they can."""
    return f"the {wide} columns of a group's weights are no multiple of {LANES}, and groups lie side by side" if wide % LANES else ""


def product(
    x_MC: Float[Array, "M C"],
    w_KG: Float[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    *,
    transposed: bool = False,
    device_kind: str,
    interpret: bool = False,
    tiles: Tiles | None = None,
    scales: ProductScales | None = None,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "M D"]:
    """Every row times the weights of its group, or, transposed, times their transpose; 0 beyond all groups.

    `tiles`: instead of the first of `product_tiles`. `scales`: of quantized operands; `dtype`: of the result, by default as x.
    """
    (rows, contracted), columns = x_MC.shape, w_KG.shape[0] if transposed else w_KG.shape[1] // len(group_sizes_E)
    dtype = jnp.dtype(dtype or x_MC.dtype)
    itemsizes = x_MC.dtype.itemsize, device_kind, dtype.itemsize
    tiles = tiles or next(product_tiles(rows, contracted, columns, *itemsizes))  # why_not says if there is none
    visits = row_visits(group_sizes_E, rows, tiles.rows)
    across = columns // tiles.wide
    cores = CORES.get(device_kind, 1) if across % CORES.get(device_kind, 1) == 0 else 1
    weights = (tiles.wide, contracted) if transposed else (contracted, tiles.wide)

    def column(core: Index, n: Index) -> Index:
        return core * (across // cores) + n

    groups = len(group_sizes_E)
    of_rows = pl.BlockSpec((1, tiles.rows), lambda core, n, v, weights, ranks, at, *_: (0, at[v]))
    of_columns = pl.BlockSpec(
        (1, 1, tiles.wide), lambda core, n, v, weights, ranks, at, group, *_: (jnp.minimum(group[ranks[v]], groups - 1), 0, column(core, n))
    )
    scaled = () if scales is None else (scales.rows_M[None], scales.columns_ED[:, None])
    return pl.pallas_call(
        functools.partial(_product_kernel, tiles, transposed),
        name=ROWS if transposed else FORWARD,
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits.scalars),
            grid=(cores, across // cores, visits.total),
            in_specs=[
                *((of_rows, of_columns) if scaled else ()),
                pl.BlockSpec((tiles.rows, contracted), lambda core, n, v, weights, ranks, at, *_: (at[v], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((tiles.rows, tiles.wide), lambda core, n, v, weights, ranks, at, *_: (at[v], column(core, n))),
            scratch_shapes=[pltpu.VMEM((2, *weights), w_KG.dtype), pltpu.SemaphoreType.DMA((2,))],
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * contracted * columns,
            transcendentals=0,
            bytes_accessed=x_MC.dtype.itemsize * (across * x_MC.size + w_KG.size) + dtype.itemsize * rows * columns,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=product_bytes(tiles, x_MC.dtype.itemsize, dtype.itemsize),
        ),
        interpret=interpret,
    )(*visits.scalars, *scaled, x_MC, w_KG[None])  # weights have three dims, rows two: so those who read the program tell them apart


def _product_kernel(tiles: Tiles, transposed: bool, *refs: Ref) -> None:
    scalars, (*scale_refs, x_ref, w_hbm, out_ref, w_ref, arrived) = refs[:5], refs[5:]
    plan, v = MetadataRefs(tiles.rows, *scalars), pl.program_id(2)
    visit = plan.at(v, pl.num_programs(2))
    slot = _weights(plan, visit, tiles, transposed, w_hbm, w_ref, arrived)
    has_weights = visit.rank < plan.weights_ref[0]

    def compute(rows: pl.Slice, *, masked: bool) -> None:
        def columns(at: pl.Slice) -> None:
            weights, dims = (w_ref[slot, at, :], ((1,), (1,))) if transposed else (w_ref[slot, :, at], ((1,), (0,)))
            new = summed(x_ref[rows, :], weights, dims)
            if scale_refs:
                of_rows_ref, of_columns_ref = scale_refs
                new = new.astype(jnp.float32) * _upright(of_rows_ref[:, rows]) * of_columns_ref[0, :, at]
            new = new.astype(out_ref.dtype)
            out_ref[rows, at] = _merged(visit, rows, new, out_ref[rows, at]) if masked else new

        _in_chunks(tiles.wide, tiles.chunk, columns)

    whole = has_weights & visit.whole(tiles.rows)
    pl.when(whole)(functools.partial(compute, pl.Slice(0, tiles.rows), masked=False))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        @pl.when(has_weights)
        def _() -> None:
            visit.on_pieces([size for size in PIECES if size <= tiles.rows], functools.partial(compute, masked=True))

        @pl.when(jnp.logical_not(has_weights))
        def _() -> None:
            out_ref[...] = _merged(visit, pl.Slice(0, tiles.rows), jnp.zeros_like(out_ref), out_ref[...])


def _weights(plan: MetadataRefs, visit: Visit, tiles: Tiles, transposed: bool, w_hbm: Ref, w_ref: Ref, arrived: Ref) -> Index:
    """Half of `w_ref` that holds the weights of this visit. The first visit of a group starts the copy of the next group's."""
    core, n, columns, weights = pl.program_id(0), pl.program_id(1), pl.num_programs(1), plan.weights_ref[0]
    slot = (n * weights + visit.rank) & 1

    def copy(n: Index, rank: Index, slot: Index) -> Any:
        group, start = plan.groups_ref[rank], (core * columns + n) * tiles.wide
        if transposed:
            at = pl.Slice(pl.multiple_of(start, LANES) if tiles.wide % LANES == 0 else 0, tiles.wide)
            part = w_hbm.at[0, at, pl.Slice(pl.multiple_of(group * tiles.deep, LANES), tiles.deep)]
        else:
            width = pl.num_programs(0) * columns * tiles.wide
            part = w_hbm.at[0, :, pl.Slice(pl.multiple_of(group * width + start, LANES), tiles.wide)]
        return pltpu.make_async_copy(part, w_ref.at[slot], arrived.at[slot])

    @pl.when(visit.first & (visit.rank < weights))
    def _() -> None:
        final = visit.rank + 1 == weights
        pl.when((n == 0) & (visit.rank == 0))(lambda: copy(n, visit.rank, slot).start())
        pl.when(jnp.logical_not(final))(lambda: copy(n, visit.rank + 1, 1 - slot).start())
        pl.when(final & (n + 1 < columns))(lambda: copy(n + 1, 0, 1 - slot).start())
        copy(n, visit.rank, slot).wait()

    return slot


def weights_gradient(
    x: Float[Array, "M K"],
    dout_MN: Float[Array, "M N"],
    group_sizes_E: Int[Array, " E"],
    *,
    device_kind: str,
    interpret: bool = False,
    tiles: Tiles | None = None,
    scales: GradientScales | None = None,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "K G"]:
    """x^T dout of every group, summed in float32; 0 of an empty one. `tiles`, `scales`, `dtype`: as for `product`, of `weights_tiles`.

    With scales x comes transposed, [K, M]: to transpose 8 bits on the way into the matrix unit takes longer than to multiply them.
    """
    (rows, wide), deep, itemsize = dout_MN.shape, x.size // len(dout_MN), x.dtype.itemsize
    dtype = jnp.dtype(dtype or x.dtype)
    tiles = tiles or next(weights_tiles(rows, deep, wide, itemsize, device_kind, dtype.itemsize))
    visits = group_visits(group_sizes_E, rows, tiles.rows)
    over, across = -(-deep // tiles.deep), wide // tiles.wide
    groups = len(group_sizes_E)
    scaled = () if scales is None else (scales.x_TK[:, None], scales.dout_TN[:, None])
    scalars = visits.scalars if scales is None else (*visits.scalars, scales.groups_E)
    assert scales is None or SCALED_ROWS % tiles.rows == 0, "rows of a dot share their scales"

    def of_tile(v: Index, at: Ref) -> Index:
        return at[v] * tiles.rows // SCALED_ROWS

    of_x = pl.BlockSpec((1, 1, tiles.deep), lambda k, n, v, weights, ranks, at, *_: (of_tile(v, at), 0, k))
    of_transposed = pl.BlockSpec((tiles.deep, tiles.rows), lambda k, n, v, weights, ranks, at, *_: (k, at[v]))
    of_dout = pl.BlockSpec((1, 1, tiles.wide), lambda k, n, v, weights, ranks, at, *_: (of_tile(v, at), 0, n))
    return pl.pallas_call(
        functools.partial(_weights_kernel, tiles, scales is not None),
        name=WEIGHTS,
        out_shape=jax.ShapeDtypeStruct((deep, groups * wide), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(over, across, visits.total),
            in_specs=[
                *((of_x, of_dout) if scaled else ()),
                of_transposed if scaled else pl.BlockSpec((tiles.rows, tiles.deep), lambda k, n, v, weights, ranks, at, *_: (at[v], k)),
                pl.BlockSpec((tiles.rows, tiles.wide), lambda k, n, v, weights, ranks, at, *_: (at[v], n)),
            ],
            out_specs=pl.BlockSpec((tiles.deep, tiles.wide), lambda k, n, v, weights, ranks, *_: (k, ranks[v] * across + n)),
            scratch_shapes=[pltpu.VMEM((tiles.deep, tiles.wide), jnp.float32)],
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * deep * wide,
            transcendentals=0,
            bytes_accessed=itemsize * (across * x.size + over * dout_MN.size) + dtype.itemsize * groups * deep * wide,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=weights_bytes(tiles, itemsize, dtype.itemsize)
        ),
        interpret=interpret,
    )(*scalars, *scaled, x, dout_MN)


def _weights_kernel(tiles: Tiles, scaled: bool, *refs: Ref) -> None:
    scalars, of_groups, (*scale_refs, x_ref, dout_ref, out_ref, sum_ref) = refs[:5], refs[5 : 5 + scaled], refs[5 + scaled :]
    plan = MetadataRefs(tiles.rows, *scalars)
    visit = plan.at(pl.program_id(2), pl.num_programs(2))

    def add(rows: pl.Slice, *, masked: bool) -> None:
        def part(at: pl.Slice) -> None:
            x, dout = x_ref[at, rows] if scaled else x_ref[rows, at], dout_ref[rows, :]
            if masked:
                zero = jnp.zeros_like
                x = _columns_kept(visit, rows, x) if scaled else _merged(visit, rows, x, zero(x))
                dout = _merged(visit, rows, dout, zero(dout))
            new = summed(x, dout, ((1,) if scaled else (0,), (0,)))
            if scaled:
                of_x_ref, of_dout_ref = scale_refs
                across = of_dout_ref[0] * of_groups[0][plan.groups_ref[visit.rank]]
                new = new.astype(jnp.float32) * _upright(of_x_ref[0, :, at]) * across
            total = new + (sum_ref[at, :] if masked else jnp.where(visit.first, 0.0, sum_ref[at, :]))
            sum_ref[at, :] = total
            out_ref[at, :] = total.astype(out_ref.dtype)

        _in_chunks(tiles.deep, tiles.chunk, part)

    whole, pieces = visit.whole(tiles.rows), [size for size in DEEP_PIECES if size <= tiles.rows] if scaled else [DEEP_PIECE]
    pl.when(whole)(functools.partial(add, pl.Slice(0, tiles.rows), masked=False))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        @pl.when(visit.first)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)  # before the first of perhaps several pieces

        pl.when(visit.high > visit.low)(lambda: visit.on_pieces(pieces, functools.partial(add, masked=True)))

        @pl.when(visit.high <= visit.low)
        def _() -> None:
            out_ref[...] = jnp.zeros_like(out_ref)


def _in_chunks(size: int, chunk: int, run: Any) -> None:
    """`run` on every slice of `chunk` of `size`, and on what is left."""
    if size == chunk:
        run(pl.Slice(0, size))
        return

    @pl.loop(0, size // chunk)
    def _(i: Index) -> None:
        run(pl.Slice(pl.multiple_of(i * chunk, LANES), chunk))

    if size % chunk:
        run(pl.Slice(size // chunk * chunk, size % chunk))


def _upright(row_1N: jax.Array) -> jax.Array:
    """A row as a column."""
    return jnp.transpose(row_1N)


def _columns_kept(visit: Visit, columns: pl.Slice, x: jax.Array) -> jax.Array:
    """x with 0 in the columns that are not the visit's. Of integers whatever is there counts for nothing, since rows of dout are 0."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    words = pltpu.bitcast(x, jnp.int32)
    column = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) + columns.start
    return pltpu.bitcast(jnp.where((column >= visit.low) & (column < visit.high), words, 0), x.dtype)


def _merged(visit: Visit, rows: pl.Slice, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the rows that are the visit's, `old` in others; whatever is in these, NaN included, they do not touch."""
    low, high = visit.low - rows.start, visit.high - rows.start
    if new.dtype.itemsize == 4:
        row = jax.lax.broadcasted_iota(jnp.int32, new.shape, 0)
        return jnp.where((row >= low) & (row < high), new, old)
    words_new, words_old = pltpu.bitcast(new, jnp.int32), pltpu.bitcast(old, jnp.int32)  # of two rows or four, the first the lowest bits
    bits, count = 8 * new.dtype.itemsize, 4 // new.dtype.itemsize
    row = count * jax.lax.broadcasted_iota(jnp.int32, words_new.shape, 0)
    ones = [((1 << bits) - 1) << place * bits for place in range(count - 1)] + [-1 << 32 - bits]
    masks = (jnp.where((row + place >= low) & (row + place < high), bits, 0) for place, bits in enumerate(ones))
    mask = functools.reduce(operator.or_, masks)
    return pltpu.bitcast((words_new & mask) | (words_old & ~mask), new.dtype)


grouped_matmul_tpu = differentiable(product, weights_gradient)
