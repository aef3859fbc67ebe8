"""Flipped bits on purpose, for tests and tools that show what the checks for silent corruption find.

A run reads its faults from the file that `MAXLM_FLIP_BITS` names. The file names the run directory that it is for; a run that finds
another there is refused, so a variable that is left over, or inherited by a job that it was not meant for, changes nothing in silence.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.errors import UserError
from maxlm.training.program import Program
from maxlm.training.step import TrainState

VARIABLE = "MAXLM_FLIP_BITS"


@dataclass(frozen=True)
class Flip:
    """A bit of the state that is flipped after update `step`, in the shard of one device, or, as by a wrong gradient before it is reduced,
    in all copies of that shard. `times`: passes of the step at which it happens; training may come there again.
    """

    step: int
    leaf: str  # name of the leaf, as in a checkpoint
    device: int  # id
    element: int  # in the flattened shard
    bit: int
    all_copies: bool = False
    times: int = 1


def flipped(leaf: jax.Array, flip: Flip) -> jax.Array:
    """`leaf` with one bit of this device's shard flipped; its other shards are used as they are, on processes without the device all."""
    wanted = next(shard.index for shard in leaf.global_shards if shard.device.id == flip.device)
    shards = []
    for shard in leaf.addressable_shards:
        data = shard.data
        if shard.device.id == flip.device or (flip.all_copies and shard.index == wanted):
            host = np.array(data)
            words = host.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(host.dtype.itemsize, np.uint32))
            words[flip.element % len(words)] ^= words.dtype.type(1 << flip.bit % (8 * words.dtype.itemsize))
            data = jax.device_put(host, shard.device)
        shards.append(data)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


class BitFlips:
    """Flips of one run, each as often as it says; flips done so far are counted in files next to theirs, across attempts."""

    def __init__(self, file: Path, flips: tuple[Flip, ...]) -> None:
        self._file, self._flips = file, flips

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """The state after update `step`."""
        for number, flip in enumerate(self._flips):
            if flip.step == step and self._left(number, flip):
                leaves = named_leaves(state)
                leaves[flip.leaf] = flipped(leaves[flip.leaf], flip)
                state = jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))
        return state

    def _left(self, number: int, flip: Flip) -> bool:
        """True if this pass is one at which it happens, which counts it."""
        counter = self._file.with_name(f"{self._file.name}.{number}.{jax.process_index()}")
        done = len(counter.read_bytes()) if counter.exists() else 0
        if done < flip.times:
            counter.write_bytes(bytes(done + 1))
        return done < flip.times


def from_environment(run: Path, environment: Mapping[str, str] = os.environ) -> BitFlips | None:
    """The flips for the run in this directory, None if the environment asks for none. Raises UserError if they are for another run."""
    name = environment.get(VARIABLE)
    if name is None:
        return None
    try:
        asked = json.loads(Path(name).read_text(encoding="utf-8"))
        flips, wanted = tuple(Flip(**flip) for flip in asked["flips"]), Path(asked["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{VARIABLE} = {name} is set, and cannot be read ({error}): unset it, since bits are flipped in tests only."
        ) from None
    if wanted.resolve() != run.resolve():
        raise UserError(f"{VARIABLE} = {name} flips bits of the run {wanted}, and this one is {run}: unset it.")
    return BitFlips(Path(name), flips)


def inject(program: Program, flips: BitFlips) -> None:
    """Flip bits after the updates of `program`; its step must be compiled already."""
    step = program.step

    def corrupted(state: TrainState, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return flips(state, int(state.step.addressable_data(0))), metrics

    vars(program)["step"] = corrupted  # where `cached_property` keeps the compiled one
