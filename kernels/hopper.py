"""Tiles of matmuls on NVIDIA Hopper, in Pallas's Mosaic GPU: shared by all kernels that multiply matrices.

A thread block of a matmul stays on its multiprocessor and computes tile after tile of the results. Of its three warpgroups one moves
tiles of the operands from HBM to shared memory with the tensor memory accelerator, as far ahead as there is room, beyond the end of a
result too; two compute, 64 rows each, and sums stay in their registers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels.platform import Index, Ref

DEVICES = ("H100", "H200")  # kinds of device that have Hopper's wgmma
MEMORY, COMPUTE = 24, 240  # registers a thread of a warpgroup, of 512 a lane of an SM; multiples of 8
# All layouts are explicit: jax 0.11 would search for them without end.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number a row of a tile, a number a column

ROWS = 128  # of a tile of the results
SHARE = ROWS // 2  # of them that a warpgroup computes: what one wgmma takes
DEPTH = 64  # of a step along the contraction: rows of 128 bytes, as the copy engine swizzles them
PIECE = 64  # columns of the results that leave, or enter, at once
STAGES = 4  # steps that shared memory holds
BLOCKS = 132  # thread blocks, one for each multiprocessor
FEWER = {"NVIDIA H100 PCIe": 114}  # of them, by kind of device: those too many would run after the others

T = TypeVar("T")
Product = tuple[Ref, Ref, int | None]  # what a wgmma multiplies, and which of the two is to be transposed
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax 0.12 takes no index


def blocks_of(kind: str) -> int:
    """Thread blocks that a kind of device runs at once."""
    return FEWER.get(kind, BLOCKS)


def slot_of(step: Index) -> Index:
    """The stage that a step takes."""
    return jax.lax.rem(step, jnp.int32(STAGES))


def launch(
    run: Callable[[Any], None],
    name: str,
    grid: Mapping[str, int],
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    cost: pl.CostEstimate,
) -> tuple[jax.Array, ...]:
    """Results of a kernel of three warpgroups a thread block; `run` gets references to operands, results and shared memory, by name."""
    names = (*operands, *results, *scratch)

    def body(*refs: Ref) -> None:
        def scoped(*memory: Ref) -> None:
            run(SimpleNamespace(**dict(zip(names, (*refs, *memory), strict=True))))

        pl.run_scoped(scoped, *scratch.values(), collective_axes="warpgroup")

    kernel = pl.kernel(
        body,
        out_type=tuple(results.values()),
        mesh=plgpu.Mesh(grid=(*grid.values(),), grid_names=(*grid,), num_threads=3, thread_name="warpgroup", kernel_name=name),
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost,
        name=name,
    )
    return kernel(*operands.values())


def by_warpgroup(warpgroup: Index, memory: Callable[[], None], compute: Callable[[], None]) -> None:
    """Run `memory` on the last of three warpgroups and `compute` on the others, with the registers that each needs."""

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(MEMORY, action="decrease")
        memory()

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE, action="increase")
        compute()


@dataclass(frozen=True)
class Block:
    """One thread block and its warpgroups.

    Barriers of `refs.full` are passed once a stage is loaded, of `refs.free` once it is read. Of `shape` it reads `deep`, the steps along
    the contraction, `columns` of a tile, and `interpret`.
    """

    refs: Any
    shape: Any

    def run(self) -> None:
        """Walk the tiles of this thread block by its three warpgroups."""
        warpgroup = jax.lax.axis_index("warpgroup")

        def memory() -> None:
            steps = self.walk(self.fetch)

            @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
            def _(step: Index) -> None:  # no barrier is left before all have passed it
                plgpu.barrier_wait(self.refs.free.at[slot_of(step)])

        def compute() -> None:
            self.walk(lambda i, j, first: self.compute(warpgroup, i, j, first))
            plgpu.wait_smem_to_gmem(0)

        by_warpgroup(warpgroup, memory, compute)

    def walk(self, visit: Callable[[Index, Index, Index], None]) -> Index:
        """visit(tile of rows, tile of columns, its first step) for each tile of this thread block; returns how many steps they take."""
        raise NotImplementedError

    def fetch(self, i: Index, j: Index, first: Index) -> None:
        """Load the operands of a tile: run by the memory warpgroup."""
        raise NotImplementedError

    def compute(self, mine: Index, i: Index, j: Index, first: Index) -> None:
        """Compute a tile: run by the compute warpgroups."""
        raise NotImplementedError

    def take(self, step: Index) -> Index:
        """The stage for a step, once it is free."""
        slot = slot_of(step)
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(self.refs.free.at[slot]))
        return slot

    def sums(
        self,
        first: Index,
        products: Callable[[Index], list[Product]],
        deep: Index | None = None,
        prepare: Callable[[Index, Index], None] = lambda k, slot: None,
    ) -> list[jax.Array]:
        """[SHARE, columns] each: sums of the products of so many steps along the contraction, from `first` on.

        products(stage): what is multiplied; prepare(step along the contraction, stage) runs before that. `deep`: steps, if not the
        shape's, at least one. A stage is free once the products of the next one are under way.
        """
        shape, number = self.shape, len(products(jnp.int32(0)))
        full, free, deep = self.refs.full, self.refs.free, shape.deep if deep is None else deep

        def interpreted(k: Index, sums: list[jax.Array]) -> list[jax.Array]:
            slot = slot_of(first + k)
            plgpu.barrier_wait(full.at[slot])
            prepare(k, slot)
            pairs = [[operand(x).T if turned == place else operand(x) for place, x in enumerate(ab)] for *ab, turned in products(slot)]
            added = [dot(a, b) for a, b in pairs]
            plgpu.barrier_arrive(free.at[slot])
            return [x + y for x, y in zip(sums, added, strict=True)]

        def run(*sums_ref: Ref) -> list[jax.Array]:
            @pl.loop(0, deep)
            def _(k: Index) -> None:
                slot = slot_of(first + k)
                plgpu.barrier_wait(full.at[slot])
                prepare(k, slot)
                for sum_ref, (*ab, turned) in zip(sums_ref, products(slot), strict=True):
                    a, b = (plgpu.transpose_ref(x, (1, 0)) if turned == place else x for place, x in enumerate(ab))
                    plgpu.wgmma(sum_ref, a, b)
                plgpu.wgmma_wait(number)
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(first + k - 1)]))

            found = [sum_ref[...] for sum_ref in sums_ref]
            plgpu.barrier_arrive(free.at[slot_of(first + deep - 1)])
            return found

        if shape.interpret and any(turned is not None for *_, turned in products(jnp.int32(0))):  # which the interpreter cannot
            zeros = [jnp.zeros((SHARE, shape.columns), jnp.float32)] * number
            return jax.lax.fori_loop(0, deep, interpreted, zeros)
        return pl.run_scoped(run, *[plgpu.ACC((SHARE, shape.columns), jnp.float32)] * number)


# Operations that the interpreter lacks have a second body for `shape.interpret`: layouts of registers, loads into them, accumulators that
# start from a value.


def laid_out(x: jax.Array, layout: Any, shape: Any) -> jax.Array:
    """x in a layout of registers."""
    return x if shape.interpret else plgpu.layout_cast(x, layout)


def zeros(dims: tuple[int, int], dtype: Any, shape: Any) -> jax.Array:
    """Zeros in registers as wgmma lays a tile out."""
    return laid_out(jnp.zeros(dims, dtype), plgpu.Layout.WGMMA, shape)


def load(ref: Ref, layout: Any, shape: Any) -> jax.Array:
    """Load an array of shared memory into registers of a layout."""
    return ref[...] if shape.interpret else plgpu.load(ref, *_WHOLE, layout=layout)


def store_unswizzled(ref: Ref, value: jax.Array, shape: Any) -> None:
    """Store even if banks of shared memory conflict: jax 0.12 refuses that unless `optimized=False`, which jax 0.10 does not have."""
    if hasattr(plgpu, "store") and not shape.interpret:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def count_rows(size: int, shape: Any) -> jax.Array:
    """0, 1, 2 ..., a number a query."""
    if shape.interpret:
        return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=BY_ROW)


def add_product(total: jax.Array, a: jax.Array | Ref, b_ref: Ref, shape: Any) -> jax.Array:
    """total + a b, a in registers or in shared memory."""
    if shape.interpret:
        return total + dot(operand(a), operand(b_ref))

    def run(total_ref: Ref) -> jax.Array:
        total_ref[...] = total
        plgpu.wgmma(total_ref, a, b_ref)
        return total_ref[...]

    return pl.run_scoped(run, accumulator(total.shape))


def transposed_product(a_ref: Ref, b_ref: Ref, shape: Any, start: jax.Array | None = None) -> jax.Array:
    """a b^T, plus a number a column."""
    return overlapped_transposed_product(a_ref, b_ref, lambda: None, shape, start)[0]


def overlapped_transposed_product(
    a_ref: Ref, b_ref: Ref, meanwhile: Callable[[], T], shape: Any, start: jax.Array | None = None
) -> tuple[jax.Array, T]:
    """(a b^T, plus a number a column; the result of `meanwhile`, which runs while the product is formed)."""
    dims = (a_ref.shape[0], b_ref.shape[0])
    if shape.interpret:
        result = meanwhile()
        return dot(operand(a_ref), operand(b_ref).T) + (0.0 if start is None else start), result

    def run(product_ref: Ref) -> tuple[jax.Array, T]:
        if start is not None:
            product_ref[...] = across(start, dims, 1)
        plgpu.wgmma(product_ref, a_ref, plgpu.transpose_ref(b_ref, (1, 0)))
        result = meanwhile()
        return product_ref[...], result

    return pl.run_scoped(run, accumulator(dims))


def accumulator(dims: Sequence[int]) -> Any:
    """Registers that wgmma add to."""
    rows, columns = dims
    return plgpu.ACC((rows, columns), jnp.float32)


def operand(x: jax.Array | Ref) -> jax.Array:
    """Operand of a wgmma in the interpreter: there it is read as by the copy engine, so it must be committed before it is overwritten."""
    value = x[...]
    plgpu.commit_smem()
    return value


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matmul with float32 sums, for the interpreter."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def opaque(i: Index) -> jax.Array:
    """The same number, opaque to LLVM: what is computed from it stays in the loop and takes no registers outside."""
    return jax.lax.optimization_barrier(jnp.int32(i))


def across(x: jax.Array, dims: Sequence[int], dim: int) -> jax.Array:
    """A vector along `dim` of a tile, the same along the other."""
    return jax.lax.broadcast_in_dim(x, dims, [dim])


def swizzled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma reads it: rows of 128 bytes, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)))
