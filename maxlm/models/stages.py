"""The layers of a decoder, dealt to the stages of a pipeline.

Parameters at rest know no pipeline: periods of the layer pattern in order, each matrix split along its width over `fsdp` and `stage`. Once
an update they are dealt out, whole layers to a stage, and their gradients come back: an all-to-all each, of what a device holds. So
checkpoints and optimizer state are the same on any layout, and the stages need not divide the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from maxlm.config.schema import ModelConfig
from maxlm.models.decoder import Routings
from maxlm.models.parameters import Parameters, parameter_specs
from maxlm.parallel.pipeline import AXIS


@dataclass(frozen=True)
class StageAssignment:
    """Which period of the layer pattern lies where, when the depth is cut into `stages` x `chunks` parts and part q lies on stage q mod
    stages. Parts differ by one period at most, and the shorter are padded: each stage computes as many. The last period may be cut short.
    """

    config: ModelConfig
    stages: int
    chunks: int = 1

    @property
    def layers(self) -> int:
        """Layers that are dealt: those of the pattern. Dense ones before it are computed with the embedding."""
        return self.config.n_layers - self.config.n_dense

    @property
    def periods(self) -> int:
        """Periods of the pattern, one cut short included."""
        return -(-self.layers // len(self.config.layer_pattern))

    @property
    def places(self) -> int:
        """Periods that a part has room for."""
        return -(-self.periods // (self.stages * self.chunks))

    @property
    def part_config(self) -> ModelConfig:
        """A model as deep as a part."""
        return self.config.model_copy(update={"n_layers": self.config.n_dense + self.places * len(self.config.layer_pattern)})

    @cached_property
    def parts(self) -> Int[np.ndarray, "parts places"]:
        """The period at each place of each part, -1 for padding."""
        parts = self.stages * self.chunks
        sizes = [self.periods // parts + (part < self.periods % parts) for part in range(parts)]
        firsts = np.cumsum([0, *sizes[:-1]])[:, None]
        place = np.arange(self.places)
        return np.where(place < np.array(sizes)[:, None], firsts + place, -1)

    @property
    def order(self) -> Int[np.ndarray, " places"]:
        """The periods as they lie on the stages, one stage after another, of each its chunks."""
        return self.parts.reshape(self.chunks, self.stages, self.places).swapaxes(0, 1).reshape(-1)

    @property
    def place_of(self) -> Int[np.ndarray, " periods"]:
        """Where each period lies in `order`."""
        return np.argsort(np.where(self.order < 0, self.periods, self.order), kind="stable")[: self.periods]

    @property
    def whole(self) -> int:
        """Periods that are not cut short."""
        return self.layers // len(self.config.layer_pattern)

    @property
    def padded(self) -> bool:
        """Whether some places hold padding, or a period cut short."""
        return self.layers != self.parts.size * len(self.config.layer_pattern)

    @property
    def runs(self) -> tuple[int, ...]:
        """Blocks in each run of the pattern, which `Decoder` stacks."""
        return tuple(len(list(run)) for _, run in groupby(self.config.repeated_pattern))

    @property
    def tail(self) -> tuple[int, ...]:
        """Blocks of each run in the period that is cut short, 0 beyond its end or where there is none."""
        rest, firsts = self.layers % len(self.config.layer_pattern), np.cumsum([0, *self.runs[:-1]])
        return tuple(int(np.clip(rest - first, 0, size)) for first, size in zip(firsts, self.runs, strict=True))

    def alive(self, part: Int[Array, ""]) -> tuple[Bool[Array, "..."], ...] | None:
        """Which layers of a part are there, as `Decoder.run` asks; None for all."""
        if not self.padded:
            return None
        length = len(self.config.layer_pattern)
        layer = self.parts[..., None] * length + np.arange(length)
        there = jnp.asarray((layer >= 0) & (layer < self.layers) & (self.parts[..., None] >= 0))[part]
        by_run = jnp.split(there, np.cumsum(self.runs)[:-1], axis=1)
        return tuple(run if size > 1 else run[:, 0] for run, size in zip(by_run, self.runs, strict=True))


def scatter_to_stages(deal: StageAssignment, params: Parameters) -> Parameters:
    """The layers of `params`, tail included, as the stages of the current mesh compute with them: leading dim over `stage`."""
    resting, lying = _specs(deal)

    def one(leaf: Array, tail: Array | None, split: int | None, run: int) -> Array:
        rows = [leaf, *([] if tail is None else [_widened(tail, leaf, run)]), jnp.zeros_like(leaf[:1])]  # the last is padding
        ordered = leaf if _as_they_are(deal) else jnp.concatenate(rows)[deal.order]
        if split is not None:
            return jax.lax.all_to_all(ordered, AXIS, 0, split, tiled=True)
        size = ordered.shape[0] // deal.stages
        return jax.lax.dynamic_slice_in_dim(ordered, jax.lax.axis_index(AXIS) * size, size)

    def all_of_them(layers: Parameters, tail: Parameters) -> Parameters:
        return _each(lambda path, leaf, spec: one(leaf, _at(tail, path), _split(spec), deal.runs[int(path[0])]), layers, resting["layers"])

    given = params["layers"], params.get("tail", {})
    specs = resting["layers"], resting.get("tail", {})
    return jax.shard_map(all_of_them, in_specs=specs, out_specs=lying, check_vma=False)(*given)


def gather_from_stages(deal: StageAssignment, layers: Parameters) -> Parameters:
    """The inverse of `scatter_to_stages`, of gradients: {"layers", "tail"} as parameters are at rest."""
    resting, lying = _specs(deal)
    whole, place_of = deal.whole, deal.place_of

    def one(leaf: Array, split: int | None) -> Array:
        if split is None:
            ordered = jax.lax.all_gather(leaf, AXIS, axis=0, tiled=True)
        else:
            ordered = jax.lax.all_to_all(leaf, AXIS, split, 0, tiled=True)
        return ordered if _as_they_are(deal) else ordered[place_of]

    def all_of_them(layers: Parameters) -> Parameters:
        periods = _each(lambda path, leaf, spec: one(leaf, _split(spec)), layers, resting["layers"])
        found = {"layers": jax.tree.map(lambda leaf: leaf[:whole], periods)}
        if "tail" in resting:
            found["tail"] = {run: jax.tree.map(partial(_narrowed, whole, *sizes), periods[run]) for run, sizes in cut.items()}
        return found

    cut = {str(run): sizes for run, sizes in enumerate(zip(deal.tail, deal.runs, strict=True)) if sizes[0]}
    back = {name: resting[name] for name in ("layers", "tail") if name in resting}
    return jax.shard_map(all_of_them, in_specs=(lying,), out_specs=back, check_vma=False)(layers)


def in_periods(deal: StageAssignment, reports: Routings) -> Routings:
    """What the layers of all stages have reported, as `Decoder.run` would."""
    periods = [jax.tree.map(lambda leaf: leaf[deal.place_of], run) for run in reports["layers"]]
    cut = [(periods[run], sizes) for run, sizes in enumerate(zip(deal.tail, deal.runs, strict=True)) if sizes[0]]
    return {
        "layers": tuple(jax.tree.map(lambda leaf: leaf[: deal.whole], run) for run in periods),
        "tail": tuple(jax.tree.map(partial(_narrowed, deal.whole, *sizes), run) for run, sizes in cut),
    }


def _specs(deal: StageAssignment) -> tuple[Parameters, Parameters]:
    """How parameters are split at rest, and layers on their stages."""
    resting = parameter_specs(deal.config, jax.sharding.get_abstract_mesh())
    lying = jax.tree.map(lambda spec: P(AXIS, *map(_without_stage, spec[1:])), resting["layers"], is_leaf=lambda leaf: isinstance(leaf, P))
    return resting, lying


def _without_stage(entry: Any) -> Any:
    names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != AXIS)
    return names if len(names) > 1 else names[0] if names else None


def _split(spec: P) -> int | None:
    """The dim that `stage` splits at rest."""
    return next((dim for dim, entry in enumerate(spec) if AXIS in (entry if isinstance(entry, tuple) else (entry,))), None)


def _as_they_are(deal: StageAssignment) -> bool:
    return not deal.padded and deal.chunks == 1


def _widened(tail: Array, leaf: Array, run: int) -> Array:
    """A run of the period cut short as one more row of `leaf`, [periods, blocks of the run where several, ...]."""
    if run == 1:
        return tail[None]
    blocks = tail.reshape(-1, *leaf.shape[2:])
    return jnp.pad(blocks, [(0, run - blocks.shape[0])] + [(0, 0)] * (blocks.ndim - 1))[None]


def _narrowed(row: int, there: int, run: int, periods: Array) -> Array:
    """The inverse of `_widened`: the blocks that are there of the period cut short, which is at `row`."""
    period = periods[row]
    return period if run == 1 else period[0] if there == 1 else period[:there]


def _each(function: Callable[[tuple[str, ...], Array, P], Array], layers: Parameters, specs: Parameters) -> Parameters:
    """`function` of the path, the leaf and the spec of every leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, spec: function(tuple(entry.key for entry in path), leaf, spec), layers, specs
    )


def _at(tree: Parameters, path: tuple[str, ...]) -> Any:
    for name in path:
        if name not in tree:
            return None
        tree = tree[name]
    return tree
