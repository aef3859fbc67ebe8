"""Tiles of matmuls on NVIDIA Hopper, in Pallas's Mosaic GPU: what kernels share that multiply matrices.

A thread block stays on its multiprocessor and computes tile after tile of the results. Of its three warpgroups one moves tiles of the
operands from HBM to shared memory with the tensor memory accelerator, as far ahead as there is room, beyond the end of a result too; two
compute, 64 rows each, and sums stay in their registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels.attention.gpu_parts import COMPUTE, MEMORY, Index, Ref, dot, operand

ROWS = 128  # of a tile of the results
SHARE = ROWS // 2  # of them that a warpgroup computes: what one wgmma takes
DEPTH = 64  # of a step along the contraction: rows of 128 bytes, as the copy engine swizzles them
PIECE = 64  # columns of the results that leave, or enter, at once
STAGES = 4  # steps that shared memory holds
BLOCKS = 132  # thread blocks, one for each multiprocessor
FEWER = {"NVIDIA H100 PCIe": 114}  # of them, by kind of device: those too many would run after the others

Product = tuple[Ref, Ref, int | None]  # what a wgmma multiplies, and which of the two is to be transposed


def blocks_of(kind: str) -> int:
    """Thread blocks that a kind of device runs at once."""
    return FEWER.get(kind, BLOCKS)


def slot_of(step: Index) -> Index:
    """The stage that a step takes."""
    return jax.lax.rem(step, jnp.int32(STAGES))


@dataclass(frozen=True)
class Block:
    """One thread block: what its warpgroups do.

    Barriers of `refs.full` are passed once a stage is loaded, of `refs.free` once it is read. Of `shape` it reads `deep`, the steps along
    the contraction, `columns` of a tile, and `interpret`.
    """

    refs: Any
    shape: Any

    def run(self) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(MEMORY, action="decrease")
            steps = self.walk(self.fetch)

            @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
            def _(step: Index) -> None:  # no barrier is left before all have passed it
                plgpu.barrier_wait(self.refs.free.at[slot_of(step)])

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE, action="increase")
            self.walk(lambda i, j, first: self.compute(warpgroup, i, j, first))
            plgpu.wait_smem_to_gmem(0)

    def walk(self, visit: Callable[[Index, Index, Index], None]) -> Index:
        """visit(tile of rows, tile of columns, its first step) for each tile of this thread block; returns how many steps they take."""
        raise NotImplementedError

    def fetch(self, i: Index, j: Index, first: Index) -> None:
        """What the memory warpgroup does for a tile."""
        raise NotImplementedError

    def compute(self, mine: Index, i: Index, j: Index, first: Index) -> None:
        """What a computing warpgroup does for a tile."""
        raise NotImplementedError

    def take(self, step: Index) -> Index:
        """The stage for a step, once it is free."""
        slot = slot_of(step)

        @pl.when(step >= STAGES)
        def _() -> None:
            plgpu.barrier_wait(self.refs.free.at[slot])

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

                @pl.when(k > 0)
                def _() -> None:
                    plgpu.barrier_arrive(free.at[slot_of(first + k - 1)])

            found = [sum_ref[...] for sum_ref in sums_ref]
            plgpu.barrier_arrive(free.at[slot_of(first + deep - 1)])
            return found

        if shape.interpret and any(turned is not None for *_, turned in products(jnp.int32(0))):  # which the interpreter cannot
            zeros = [jnp.zeros((SHARE, shape.columns), jnp.float32)] * number
            return jax.lax.fori_loop(0, deep, interpreted, zeros)
        return pl.run_scoped(run, *[plgpu.ACC((SHARE, shape.columns), jnp.float32)] * number)
