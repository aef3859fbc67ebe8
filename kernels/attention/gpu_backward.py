"""The backward kernel for Hopper: five matmuls a tile, dk and dv in registers, dq added up in HBM by the copy engine.

Scores are held keys by queries: what belongs to the keys of a warpgroup then stays in its registers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels.attention.gpu_parts import (
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    COMPILER_PARAMS,
    COMPUTE,
    MEMORY,
    ROWS,
    Index,
    Ref,
    Shape,
    Side,
    accumulator,
    across,
    add_product,
    bend,
    cost_of,
    count_rows,
    dot,
    here,
    hidden_keys,
    laid_out,
    load,
    mesh_of,
    nothing,
    operand,
    query_bounds,
    swizzled,
    transposed_product,
)

# B batch, S sequence, H query heads, G key/value heads, K head dim

BACKWARD = "attention_hopper_backward"  # what the kernel is called in the compiled program; jax 0.10 calls it new_body
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def backward(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    dout_BSHK: jax.Array,
    lse_BHS: jax.Array,
    delta_BHS: jax.Array,
    segments_BS: jax.Array,
    shape: Shape,
) -> Gradients:
    """Gradients of q, k and v. Heads that share keys come one after the other, and dk and dv stay in registers all the time.

    `lse_BHS` in base 2; `delta_BHS`: sum of output times its gradient, less that of the logsumexp. dq is added up in HBM in float32, in
    the order in which thread blocks come to it: its last bits may differ from run to run.
    """
    batch, dtype, width = q_BSHK.shape[0], q_BSHK.dtype, shape.head_dim
    slots = shape.stages if shape.parts == 2 else 1  # a second tile of 256 columns does not fit into shared memory
    rows = (slots, shape.halves, ROWS)
    scratch = (
        swizzled((shape.parts, ROWS, width), dtype),
        swizzled((shape.parts, ROWS, width), dtype),
        swizzled((*rows, width), dtype),
        swizzled((*rows, width), dtype),
        swizzled((slots, shape.halves, shape.parts, ROWS, ROWS), dtype),
        swizzled((ROWS, ROWS), jnp.float32) if shape.parts == 1 else plgpu.SMEM((ROWS,), jnp.float32),
        swizzled((2, ROWS, ROWS), jnp.float32),
        *(plgpu.SMEM(rows, kind) for kind in (jnp.float32, jnp.float32, jnp.int32)),
        plgpu.SMEM((shape.parts, ROWS), jnp.int32),
        plgpu.SMEM((shape.parts, ROWS), jnp.int32),
        plgpu.Barrier(num_arrivals=4, num_barriers=shape.parts),
        plgpu.Barrier(num_arrivals=5 * shape.halves, num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=shape.parts, num_barriers=slots),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
    )

    def body(*refs: Ref) -> None:
        pl.run_scoped(lambda *scoped: _backward_block(_BackwardRefs(*refs, *scoped), shape), *scratch, collective_axes="warpgroup")

    dq_ref: Any = jax.new_ref(jnp.zeros(q_BSHK.shape, jnp.float32), memory_space=plgpu.GMEM)
    dk_BSGK, dv_BSGK = pl.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in (k_BSGK, v_BSGK)),
        mesh=mesh_of((shape.groups, shape.seq_len // (shape.parts * ROWS), batch), BACKWARD),
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(5, batch, shape, [q_BSHK, dout_BSHK, dq_ref, k_BSGK, k_BSGK, v_BSGK, v_BSGK]),
        name=BACKWARD,
    )(
        query_bounds(segments_BS, shape.parts * ROWS, shape.window),
        q_BSHK,
        k_BSGK,
        v_BSGK,
        dout_BSHK,
        -lse_BHS if shape.softcap is not None else lse_BHS * (-1.0 / shape.slope),
        -delta_BHS,
        segments_BS,
        jnp.arange(ROWS, dtype=jnp.int32),
        dq_ref,
    )
    return (dq_ref[...] * shape.scale).astype(dtype), dk_BSGK, dv_BSGK


class _BackwardRefs(NamedTuple):
    """What the backward kernel reads, writes and shares between its warpgroups; a barrier is passed once its tile is full or free."""

    bounds: Ref
    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    lse: Ref
    delta: Ref
    segments: Ref
    places: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    k_tile: Ref  # a part for each warpgroup; later dk and dv
    v_tile: Ref
    q_tile: Ref
    dout_tile: Ref
    dscores: Ref  # by slot, half of the queries, half of the keys: written again when both have read the next slot
    slopes: Ref  # weights, less what the cap takes off, from the warpgroup of dv to that of dk, where those are apart
    dq_part: Ref
    lse_row: Ref
    delta_row: Ref
    query_segments: Ref
    key_segments: Ref
    query_places: Ref
    k_full: Ref
    q_full: Ref
    free: Ref
    dscores_full: Ref
    slopes_full: Ref
    done: Ref


def _backward_block(refs: _BackwardRefs, shape: Shape) -> None:
    """One block of keys of one head: the first ones first, since they take longest. Queries from the diagonal on."""
    warpgroup = jax.lax.axis_index("warpgroup")
    j, b = jax.lax.axis_index("block"), jax.lax.axis_index("batch")
    end, whole = (refs.bounds[edge, b, j] * (BLOCK // shape.queries) for edge in (0, 1))
    first = j * (shape.parts * ROWS // shape.queries)
    columns = (_Columns if shape.parts == 2 else _WideColumns)(refs, shape, warpgroup, b, j, first, end, whole)

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(MEMORY, action="decrease")
        columns.fetch()

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE, action="increase")
        columns.run()


@dataclass(frozen=True)
class _Columns:
    """The keys of one thread block, a tile for each computing warpgroup, seen by the tiles of queries from `first` to before `end`.

    Queries before tile `whole` that do not share a block with these keys see all of them.
    """

    refs: _BackwardRefs
    shape: Shape
    warpgroup: Index
    b: Index
    j: Index
    first: Index
    end: Index
    whole: Index

    @property
    def steps(self) -> Index:
        """Tiles of queries of all heads that share these keys."""
        return (self.end - self.first) * self.share

    @property
    def share(self) -> int:
        """Query heads that share these keys."""
        return self.shape.heads // self.shape.groups

    def _walk(self, visit: Callable[[Index, Index, Index, Any], Any], carry: Any) -> Any:
        """visit(query head, tile of queries, step, carry) for every step, which gives the carry of the next."""
        tiles = self.end - self.first

        def head(r: Index, carry: Any) -> Any:
            def tile(t: Index, carry: Any) -> Any:
                return visit(jax.lax.axis_index("head") * self.share + r, self.first + t, r * tiles + t, carry)

            return jax.lax.fori_loop(jnp.int32(0), tiles, tile, carry)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.share), head, carry)

    def _slot(self, step: Index) -> Index:
        return jax.lax.rem(step, jnp.int32(self.slots))

    @property
    def slots(self) -> int:
        """Tiles of queries that shared memory holds."""
        return self.refs.q_tile.shape[0]

    def fetch(self) -> None:
        """What the memory warpgroup does."""
        refs, shape = self.refs, self.shape

        def fetch(head: Index, i: Index, step: Index, nothing_carried: None) -> None:
            slot = self._slot(step)

            @pl.when(step >= self.slots)
            def _() -> None:
                plgpu.barrier_wait(refs.free.at[slot])

            for half in range(shape.halves):
                tokens = pl.ds(i * shape.queries + half * ROWS, ROWS)
                full = refs.q_full.at[slot]
                plgpu.copy_gmem_to_smem(refs.q.at[self.b, tokens, head], refs.q_tile.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.query_segments.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.lse.at[self.b, head, tokens], refs.lse_row.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.dout.at[self.b, tokens, head], refs.dout_tile.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.delta.at[self.b, head, tokens], refs.delta_row.at[slot, half], full)

        self._walk(fetch, None)

        @pl.loop(jnp.maximum(self.steps - self.slots, 0), self.steps)
        def _(step: Index) -> None:  # no barrier is left before all have passed it
            plgpu.barrier_wait(refs.free.at[self._slot(step)])

    def run(self) -> None:
        """What a computing warpgroup does."""
        self._fetch_keys(self.warpgroup)
        for part in range(self.shape.parts):  # dq is formed of the other's keys, too
            plgpu.barrier_wait(self.refs.k_full.at[part])
        dk, dv = self._walk(self._step, (self._zero(), self._zero()))
        plgpu.barrier_arrive(self.refs.done)
        plgpu.barrier_wait(self.refs.done)  # the other's last dq was formed of these keys, too
        self._store(dk * self.shape.scale, self.refs.k_tile, self.refs.dk, self.warpgroup)
        self._store(dv, self.refs.v_tile, self.refs.dv, self.warpgroup)
        plgpu.wait_smem_to_gmem(0)

    def _fetch_keys(self, part: Index) -> None:
        refs, tokens, full = self.refs, self._tokens(part), self.refs.k_full.at[part]
        head = jax.lax.axis_index("head")
        plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], refs.k_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.v.at[self.b, tokens, head], refs.v_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.key_segments.at[part], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.query_places.at[part], full)

    def _tokens(self, part: Index) -> Any:
        return pl.ds((self.j * self.shape.parts + part) * ROWS, ROWS)

    def _zero(self) -> jax.Array:
        return laid_out(jnp.zeros((ROWS, self.shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, self.shape)

    def _store(self, total: jax.Array, tile_ref: Ref, ref: Ref, part: Index) -> None:
        tile_ref[part] = total.astype(ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_ref.at[part], ref.at[self.b, self._tokens(part), jax.lax.axis_index("head")])

    def _step(self, head: Index, i: Index, step: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        refs, slot = self.refs, self._slot(step)
        plgpu.barrier_wait(refs.q_full.at[slot])
        weights = [self._weights(i, slot, half, refs.dscores.at[slot, half, self.warpgroup]) for half in range(self.shape.halves)]
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.dscores_full.at[slot])
        dk, dv, dq = self._products(slot, weights, *sums)
        plgpu.barrier_arrive(refs.free.at[slot])
        mine = self.warpgroup * ROWS
        start, column = (mine, 0) if self.shape.halves == 2 else (0, mine)
        self._store_dq(head, i * self.shape.queries + start, column, dq)
        return dk, dv

    def _weights(self, i: Index, slot: Index, half: int, dscores_ref: Ref) -> jax.Array:
        """Of these keys for half of the queries. Gradients of their scores go to shared memory, where all read them."""
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        q_ref, dout_ref = refs.q_tile.at[slot, half], refs.dout_tile.at[slot, half]
        part = here(mine)
        k_ref, v_ref = refs.k_tile.at[part], refs.v_tile.at[part]
        below, weigh = self._weigh(i, slot, half)
        delta = load(refs.delta_row.at[slot, half], BY_COLUMN, shape)

        def form(scores_ref: Ref, dweights_ref: Ref) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            assert below is not None, "else one comes after the other"
            scores_ref[...] = across(below, (ROWS, ROWS), 1)
            dweights_ref[...] = across(delta, (ROWS, ROWS), 1)
            plgpu.wgmma(scores_ref, k_ref, plgpu.transpose_ref(q_ref, (1, 0)))
            plgpu.wgmma(dweights_ref, v_ref, plgpu.transpose_ref(dout_ref, (1, 0)))
            return weigh(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)), dweights_ref[...]

        if shape.interpret or below is None:  # one after the other: a cap takes the registers that the second would need
            weights, slopes = weigh(transposed_product(k_ref, q_ref, nothing, shape, below))
            dweights = transposed_product(v_ref, dout_ref, nothing, shape, delta)
        else:
            (weights, slopes), dweights = pl.run_scoped(form, *[accumulator((ROWS, ROWS))] * 2)
        dscores_ref[...] = (slopes * dweights).astype(refs.q.dtype)
        return weights

    def _weigh(self, i: Index, slot: Index, half: int) -> tuple[jax.Array | None, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
        """(what the product of keys and queries goes on from, a number a query; what makes of it weights and their slopes).

        Products go on from what is taken off them where they can: the numbers of a row then need no registers beside them.
        """
        shape = self.shape
        lse = load(self.refs.lse_row.at[slot, half], BY_COLUMN, shape)

        def weigh(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
            bent = bend(raw, shape)
            scores = self._masked(i, slot, half, bent) * shape.slope
            weights = jnp.exp2(scores if shape.softcap is None else scores + across(lse, scores.shape, 1))
            slopes = weights if shape.softcap is None else weights * (1.0 - bent * bent)
            return weights.astype(self.refs.q.dtype), slopes

        return lse if shape.softcap is None else None, weigh

    def _masked(self, i: Index, slot: Index, half: int, scores: jax.Array) -> jax.Array:
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        offset = i * shape.queries + half * ROWS - (self.j * shape.parts + mine) * ROWS

        def masked(scores: jax.Array) -> jax.Array:
            queries = load(refs.query_segments.at[slot, half], BY_COLUMN, shape)
            query_at = load(refs.query_places.at[mine], BY_COLUMN, shape) + offset
            keys = load(refs.key_segments.at[mine], BY_ROW, shape)
            hidden = hidden_keys(Side(queries, query_at), Side(keys, count_rows(ROWS, shape)), 1, scores.shape, shape, ordered=False)
            return jnp.where(hidden, -jnp.inf, scores)

        own_block = self.j * (shape.parts * ROWS) // BLOCK
        cut = (i < (own_block + 1) * (BLOCK // shape.queries)) | (i >= self.whole)
        return jax.lax.cond(cut, masked, lambda scores: scores, scores)

    def _products(self, slot: Index, weights: list[jax.Array], dk: jax.Array, dv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(dk, dv, this warpgroup's part of dq: half of the queries, or of the head dim)."""
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        halves = [
            (weights[half], refs.dout_tile.at[slot, half], refs.dscores.at[slot, half, mine], refs.q_tile.at[slot, half])
            for half in range(shape.halves)
        ]

        def of_dq(part: int) -> tuple[Ref, Ref]:
            if shape.halves == 2:
                return refs.dscores.at[slot, mine, part], refs.k_tile.at[here(part)]
            return refs.dscores.at[slot, 0, part], refs.k_tile.at[here(part), :, pl.ds(mine * ROWS, ROWS)]

        if shape.interpret:
            for half_weights, dout_ref, dscores_ref, q_ref in halves:
                dv = add_product(dv, half_weights, dout_ref, shape)
                dk = add_product(dk, dscores_ref, q_ref, shape)
            plgpu.barrier_wait(refs.dscores_full.at[slot])
            (a_ref, b_ref), (c_ref, d_ref) = map(of_dq, range(2))
            return dk, dv, dot(operand(a_ref).T, operand(b_ref)) + dot(operand(c_ref).T, operand(d_ref))

        def run(dk_ref: Ref, dv_ref: Ref, dq_ref: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
            dk_ref[...], dv_ref[...] = dk, dv
            for half_weights, dout_ref, dscores_ref, q_ref in halves:
                plgpu.wgmma(dv_ref, half_weights, dout_ref)
                plgpu.wgmma(dk_ref, dscores_ref, q_ref)
            plgpu.barrier_wait(refs.dscores_full.at[slot])
            for a_ref, b_ref in map(of_dq, range(2)):
                plgpu.wgmma(dq_ref, plgpu.transpose_ref(a_ref, (1, 0)), b_ref)
            return dk_ref[...], dv_ref[...], dq_ref[...]

        sums = accumulator(dk.shape)
        return pl.run_scoped(run, sums, sums, accumulator((ROWS, ROWS)))

    def _store_dq(self, head: Index, start: Index, column: Index, dq: jax.Array) -> None:
        """Into ROWS queries from `start` and as many columns of dq."""
        refs, mine = self.refs, self.warpgroup
        dq_ref = refs.dq.at[self.b, pl.ds(start, ROWS), head, pl.ds(column, ROWS)]
        if self.shape.interpret:
            dq_ref[...] = dq_ref[...] + dq
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_part[mine] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.dq_part.at[mine], dq_ref, reduction_op="add")


@dataclass(frozen=True)
class _WideColumns(_Columns):
    """Of a head dim of 256: one tile of keys, whose dv the first warpgroup holds and whose dk the second."""

    def run(self) -> None:
        """What a computing warpgroup does."""
        pl.when(self.warpgroup == 0)(lambda: self._fetch_keys(0))
        plgpu.barrier_wait(self.refs.k_full.at[0])

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            mine = replace(self, warpgroup=0)
            mine._finish(mine._walk(mine._add_dv, mine._zero()), self.refs.v_tile, self.refs.dv)

        @pl.when(self.warpgroup == 1)
        def _() -> None:
            mine = replace(self, warpgroup=1)
            mine._finish(mine._walk(mine._add_dk, mine._zero()) * self.shape.scale, self.refs.k_tile, self.refs.dk)

    def _finish(self, total: jax.Array, tile_ref: Ref, ref: Ref) -> None:
        plgpu.barrier_arrive(self.refs.done)
        plgpu.barrier_wait(self.refs.done)
        self._store(total, tile_ref, ref, 0)
        plgpu.wait_smem_to_gmem(0)

    def _add_dv(self, head: Index, i: Index, step: Index, dv: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, here(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        start, weigh = self._weigh(i, slot, 0)
        weights, slopes = weigh(transposed_product(refs.k_tile.at[here(0)], refs.q_tile.at[slot, 0], nothing, shape, start))
        refs.slopes[...] = slopes
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.slopes_full)
        dv = add_product(dv, weights, refs.dout_tile.at[slot, 0], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        plgpu.barrier_wait(refs.dscores_full.at[slot])
        self._add_dq(head, i, slot)
        return dv

    def _add_dk(self, head: Index, i: Index, step: Index, dk: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, here(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        delta = load(refs.delta_row.at[slot, 0], BY_COLUMN, shape)
        dweights = transposed_product(refs.v_tile.at[here(0)], refs.dout_tile.at[slot, 0], nothing, shape, delta)
        plgpu.barrier_wait(refs.slopes_full)
        dscores = load(refs.slopes, plgpu.Layout.WGMMA, shape) * dweights
        refs.dscores[slot, 0, 0] = dscores.astype(refs.q.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.dscores_full.at[slot])
        dk = add_product(dk, refs.dscores.at[slot, 0, 0], refs.q_tile.at[slot, 0], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        self._add_dq(head, i, slot)
        return dk

    def _add_dq(self, head: Index, i: Index, slot: Index) -> None:
        """This warpgroup's half of the columns, ROWS at a time, since all of them would not fit into registers beside dv or dk."""
        refs, shape, half = self.refs, self.shape, self.shape.head_dim // 2
        for column in range(self.warpgroup * half, (self.warpgroup + 1) * half, ROWS):
            dscores_ref, k_ref = refs.dscores.at[slot, 0, 0], refs.k_tile.at[here(0), :, pl.ds(column, ROWS)]

            def product(dq_ref: Ref, dscores_ref: Ref = dscores_ref, k_ref: Ref = k_ref) -> jax.Array:
                plgpu.wgmma(dq_ref, plgpu.transpose_ref(dscores_ref, (1, 0)), k_ref)
                return dq_ref[...]

            dq = dot(operand(dscores_ref).T, operand(k_ref)) if shape.interpret else pl.run_scoped(product, accumulator((ROWS, ROWS)))
            self._store_dq(head, i * ROWS, column, dq)
