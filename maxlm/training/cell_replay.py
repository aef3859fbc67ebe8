"""The same work on two devices, compared bit for bit: for a device that computes wrongly, and where nothing is held twice.

The work is the gradient of one microbatch of the real batch by the real model with one period of its scanned layers, all periods in turn.
The mesh is cut into cells: the devices at one place along `data`, `stage` and `fsdp`. No cell adds to another's numbers: weights are
gathered whole within the axes of cells, and gradients are summed to a digest instead of being reduced. A reduction of floats would not do,
since its order depends on where devices lie. So a cell that receives the rows of the cell before runs the same compiled program on the
same bits, and any difference is an error of one of the two. More rotations of the rows then tell which.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.typing import NDArray

from maxlm.checkpoint.digest import leaf_sums
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.objectives import build_objective
from maxlm.parallel import mesh_axes
from maxlm.training.gradients import cast_frozen
from maxlm.training.program import Program
from maxlm.training.replicas import Verdict
from maxlm.training.step import GradFn, TrainState, in_one_pass, split

CELL_AXES = ("data", "stage", "fsdp")  # along them weights can be whole
ROTATIONS = (0, 1)  # cells by which the rows move; without an error two are enough
FURTHER = (2, 3)
SCATTERED = "embedding_VD"  # on GPUs XLA sums its gradient in any order, so it is left out


class CellReplay:
    """The replay of `program`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.axes = tuple(axis for axis in CELL_AXES if program.mesh.shape.get(axis, 1) > 1)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return int(np.prod([self._program.mesh.shape[axis] for axis in self.axes], dtype=int))

    def devices(self, cell: int) -> frozenset[int]:
        """Positions in `mesh.devices.flat` of the devices of a cell."""
        mesh = self._program.mesh
        positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        places = np.unravel_index(cell, [mesh.shape[axis] for axis in self.axes])
        chosen: list[Any] = [slice(None)] * positions.ndim
        for axis, place in zip(self.axes, places, strict=True):
            chosen[mesh.axis_names.index(axis)] = place
        return frozenset(int(position) for position in positions[tuple(chosen)].reshape(-1))

    def run(self, number: int, state: TrainState, batch: Any, rotations: Sequence[int] = ROTATIONS) -> NDArray[np.uint32]:
        """Sums of the gradients that every cell computed [rotations, cells, leaves, 2]; with rotation r it computed the rows of the cell r
        places before it. `number`: of the replay, which chooses the layers. Waits for the devices.
        """
        arguments = np.asarray(number % max(self._periods, 1), np.int32), np.asarray(rotations, np.int32)
        sums = self.program(state.params, state.model_state, state.step, batch, *arguments)
        return jax.device_get(sums.addressable_data(0)).swapaxes(0, 1)

    @cached_property
    def program(self) -> jax.stages.Compiled:
        """The compiled replay: (params, model state, step, batch, period, rotations) -> sums [cells, rotations, leaves, 2], replicated."""
        program, config = self._program, self._program.config
        objective = build_objective(config)
        gradients = cast_frozen(objective.config.model, objective.config.precision.compute, partial(in_one_pass, objective.loss))
        on_cell = partial(self._on_cell, gradients, objective.denominator)

        def sums(params: Parameters, model_state: Parameters, step: Any, batch: Any, period: Any, rotations: Any) -> jax.Array:
            params, model_state = (self._take(tree, period) for tree in (params, model_state))
            batch = objective.with_randomness(batch, step)
            rows = P(tuple(axis for axis in mesh_axes("batch", program.mesh) if axis in self.axes))
            run = jax.shard_map(on_cell, in_specs=(P(), P(), rows, P()), out_specs=P(self.axes), axis_names=set(self.axes), check_vma=False)
            return run(cast_matrices(objective.config.model, objective.config.precision.compute, params), model_state, batch, rotations)

        whole = NamedSharding(program.mesh, P())
        state = program.abstract_state
        scalar, pair = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((), (len(ROTATIONS),)))
        with jax.set_mesh(program.mesh):
            lowered = jax.jit(sums, out_shardings=whole).lower(
                state.params, state.model_state, state.step, program.abstract_batch, scalar, pair
            )
            return lowered.compile(compiler_options=program.compiler_options)

    def _on_cell(
        self,
        gradients: GradFn,
        denominator: Callable[[Any], jax.Array],
        params: Parameters,
        model_state: Parameters,
        batch: Any,
        ks: jax.Array,
    ) -> jax.Array:
        """Sums [1, rotations, leaves, 2] of one cell."""
        own = jax.tree.map(lambda a: a[0], split(batch, self._program.config.train.microbatches))
        onwards = [(cell, (cell + 1) % self.cells) for cell in range(self.cells)]

        def rotated(rotation: jax.Array) -> jax.Array:
            move = partial(jax.tree.map, lambda a: lax.ppermute(a, self.axes, onwards))
            rows = lax.fori_loop(0, rotation, lambda _, rows: move(rows), own)
            _, grads = gradients(params, model_state, rows, jnp.maximum(denominator(rows), 1))
            summed = {name: branch for name, branch in grads.items() if name != SCATTERED}
            return jnp.stack([jnp.stack(leaf_sums(leaf)) for leaf in jax.tree.leaves(summed)])

        return lax.map(rotated, ks)[None]

    @property
    def _periods(self) -> int:
        model = self._program.config.model
        return (model.n_layers - model.n_dense) // len(model.layer_pattern)

    def _take(self, tree: Parameters, period: jax.Array) -> Parameters:
        """Parameters, with scanned layers cut to one period."""
        if not self._periods or "layers" not in tree:
            return tree
        return {**tree, "layers": jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, period, 1), tree["layers"])}


# Which cell is wrong: from sums alone.


def wrong_work(sums: NDArray[np.uint32]) -> list[int]:
    """Cells with rows that gave different sums on different cells. `sums`: as of `CellReplay.run`, with rotations 0, 1, ..."""
    own = np.stack([np.roll(of_rotation, -rotation, 0) for rotation, of_rotation in enumerate(sums)])
    return [int(cell) for cell in np.flatnonzero(np.any(own != own[0], (0, 2, 3)))]


def comparable(sums: NDArray[np.uint32]) -> bool:
    """False if so many cells disagree that it is the platform: its programs are not deterministic, or not the same on all devices."""
    cells = sums.shape[1]
    return len(wrong_work(sums)) <= max(2, cells // 2)


def erratic(sums: NDArray[np.uint32]) -> bool:
    """True if all cells found other sums when they computed the same rows again, as two or three do within four rotations."""
    cells = sums.shape[1]
    again = [np.any(sums[rotation] != sums[rotation + cells], (1, 2)) for rotation in range(len(sums) - cells)]
    return bool(again) and bool(np.all(np.any(again, 0)))


def judge_cells(sums: NDArray[np.uint32]) -> Verdict:
    """Verdict on the cells that computed rows which gave different sums: with the sums that the most cells found, the others are wrong."""
    cells = sums.shape[1]
    odd: set[int] = set()
    suspects: set[int] = set()
    for work in wrong_work(sums):
        votes = [((work + r) % cells, sums[r, (work + r) % cells].tobytes()) for r in range(len(sums))]
        agreeing = Counter(value for _, value in set(votes)).most_common()  # each cell counts once for a value
        if len(agreeing) > 1 and agreeing[0][1] > agreeing[1][1]:
            odd |= {cell for cell, value in votes if value != agreeing[0][0]}
        else:
            suspects |= {cell for cell, _ in votes}
    return Verdict(frozenset(odd), frozenset(suspects - odd) if not odd else frozenset())
