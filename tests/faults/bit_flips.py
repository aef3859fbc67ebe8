"""Flip bits of the state of a running training, to show what the checks for silent corruption find.

A run with `environment` loads this module by a sitecustomize.py. Flips that are done are counted in files, across attempts.
"""

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.training.session import Session
from maxlm.training.step import TrainState

HOOK = """
import sys
if "train" in sys.orig_argv and "launch" not in sys.orig_argv:
    sys.path.append({here!r})
    import bit_flips
    bit_flips.install({file!r})
"""


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


def environment(folder: Path, *flips: Flip) -> dict[str, str]:
    """Variables by which `maxlm train` flips these bits. The list of them, and what is done, are kept in `folder`, which is made."""
    folder.mkdir(parents=True)
    file = folder / "flips.json"
    file.write_text(json.dumps([asdict(flip) for flip in flips]))
    (folder / "sitecustomize.py").write_text(HOOK.format(here=str(Path(__file__).resolve().parent), file=str(file.resolve())))
    return {"PYTHONPATH": os.pathsep.join([str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])}


def install(file: str) -> None:
    """Flip bits after the updates of the training of this process."""
    from maxlm.training import loop

    flips, whole = [Flip(**flip) for flip in json.loads(Path(file).read_text(encoding="utf-8"))], loop._run

    def run(session: Session, *rest: Any) -> Any:
        step = session.program.step

        def corrupted(state: TrainState, batch: Any) -> Any:
            state, metrics = step(state, batch)
            return _after_update(Path(file), flips, state), metrics

        vars(session.program)["step"] = corrupted  # where `cached_property` keeps the compiled one
        try:
            return whole(session, *rest)
        finally:
            vars(session.program)["step"] = step

    loop._run = functools.wraps(whole)(run)


def _after_update(file: Path, flips: list[Flip], state: TrainState) -> TrainState:
    done = int(state.step.addressable_data(0))
    for number, flip in enumerate(flips):
        counter = file.with_name(f"{file.name}.{number}.{jax.process_index()}")
        times = len(counter.read_bytes()) if counter.exists() else 0
        if flip.step == done and times < flip.times:
            counter.write_bytes(bytes(times + 1))
            state = with_flip(state, flip)
    return state


def with_flip(state: Any, flip: Flip) -> Any:
    """`state` with one bit flipped; the arrays that are not touched are shared."""
    leaves = named_leaves(state)
    leaves[flip.leaf] = flipped(leaves[flip.leaf], flip)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


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
