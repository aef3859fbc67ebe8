"""The layers of a decoder on the stages of a pipeline.

Parameters at rest do not depend on the pipeline: periods of the layer pattern in order, each matrix split along its width over `fsdp` and
`stage`. Once an update an all-to-all moves whole layers to their stages, and another one brings their gradients back. So checkpoints and
optimizer state are the same on any layout, and the number of stages need not divide the number of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec as P
from jaxtyping import Array, Bool, Int

from maxlm.config.schema import ModelConfig
from maxlm.models.decoder import Block, run_layer
from maxlm.models.feed_forward.router import Routing
from maxlm.models.layers import BlockContext
from maxlm.models.parameters import Parameters, parameter_specs
from maxlm.models.stack import PATTERN, by_group, cut_periods, layer_groups, pad_periods, split_layers
from maxlm.parallel.pipeline import AXIS

Specs = Callable[[ModelConfig, AbstractMesh], Parameters]


@dataclass(frozen=True)
class StageAssignment:
    """Assignment of the periods of the layer pattern to pipeline stages.

    The depth is cut into `stages` x `chunks` parts, and part q lies on stage q mod stages. Parts differ by one period at most; the shorter
    ones are padded, so that every stage computes equally many. The last period may be incomplete. Dense layers before the pattern belong
    to no stage: they are computed with the embedding. A part has no config: its layers are built from the whole model's, and only their
    arrays are shorter, so nothing can be derived from the depth of a part.
    """

    config: ModelConfig
    stages: int
    chunks: int = 1

    @property
    def period(self) -> int:
        """Layers of a period."""
        return len(self.config.layer_pattern)

    @property
    def layers(self) -> int:
        """Layers of the pattern."""
        return self.config.n_layers - self.config.n_dense

    @property
    def periods(self) -> int:
        """Periods of the pattern, an incomplete one included."""
        return -(-self.layers // self.period)

    @property
    def part_periods(self) -> int:
        """Periods of a part, padding included."""
        return -(-self.periods // (self.stages * self.chunks))

    @cached_property
    def parts(self) -> Int[np.ndarray, "parts part_periods"]:
        """The period at each position of each part, -1 for padding."""
        parts = self.stages * self.chunks
        sizes = [self.periods // parts + (part < self.periods % parts) for part in range(parts)]
        firsts = np.cumsum([0, *sizes[:-1]])[:, None]
        position = np.arange(self.part_periods)
        return np.where(position < np.array(sizes)[:, None], firsts + position, -1)

    @property
    def order(self) -> Int[np.ndarray, " positions"]:
        """The periods in the order of the stages, within a stage in the order of its chunks."""
        return self.parts.reshape(self.chunks, self.stages, self.part_periods).swapaxes(0, 1).reshape(-1)

    @property
    def position_of(self) -> Int[np.ndarray, " periods"]:
        """Position of each period in `order`."""
        return np.argsort(np.where(self.order < 0, self.periods, self.order), kind="stable")[: self.periods]

    @property
    def padded(self) -> bool:
        """True if some positions hold padding or an incomplete period."""
        return self.layers != self.parts.size * self.period

    def active(self, part: Int[Array, ""]) -> list[Bool[Array, "part_periods ..."]] | None:
        """True for the layers of a part that are not padding, by group of the pattern; None if no layer is."""
        if not self.padded:
            return None
        layer = self.parts[..., None] * self.period + np.arange(self.period)
        active_L = jnp.asarray((layer >= 0) & (layer < self.layers)).reshape(len(self.parts), -1)[part]
        groups = layer_groups(self.config, PATTERN[:1])
        return by_group([group._replace(stacked=(self.part_periods, *group.stacked[1:])) for group in groups], active_L)

    def in_depth_order(self, reports: Routing) -> Routing:
        """Router statistics of all layers in depth order, from the stages' statistics one after another."""
        rows = (self.position_of[:, None] * self.period + np.arange(self.period)).reshape(-1)[: self.layers]
        return jax.tree.map(lambda leaf: leaf[rows], reports)


def run_unless_padding(context: BlockContext, x_BSD: Array, inputs: tuple[Block, Bool[Array, ""]]) -> tuple[Array, tuple]:
    """As `run_layer`; a block that is padding (second input False) passes hidden states through, and gets no gradient."""
    block, active = inputs
    y_BSD, router = run_layer(context, jnp.where(active, x_BSD, 0), (block, None))
    return jnp.where(active, y_BSD, x_BSD), jax.tree.map(lambda a: jnp.where(active, a, jnp.zeros_like(a)), router)


def scatter_to_stages(assignment: StageAssignment, tree: Parameters, specs: Specs = parameter_specs) -> Parameters:
    """Move the layers of `tree`, at rest as `specs` says, to the stages of the current mesh.

    The result has the stacked layers of the pattern alone, with the periods of all stages along a leading dim over `stage`.
    """
    at_rest, on_stages, dims = _layouts(assignment, specs)

    def scatter(leaf: Array, dim: int) -> Array:
        if not _is_identity(assignment):
            leaf = jnp.concatenate([leaf, jnp.zeros_like(leaf[:1])])[assignment.order]  # -1, the last row, is padding
        if dim:
            return jax.lax.all_to_all(leaf, AXIS, 0, dim, tiled=True)
        size = leaf.shape[0] // assignment.stages
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(AXIS) * size, size)

    def scatter_all(layers: Parameters) -> Parameters:
        return jax.tree.map(scatter, pad_periods(assignment.config, layers), dims)

    layers, _ = split_layers(tree, pattern=True)
    return jax.shard_map(scatter_all, in_specs=(at_rest,), out_specs=on_stages, check_vma=False)(layers)


def gather_from_stages(assignment: StageAssignment, layers: Parameters) -> Parameters:
    """The inverse of `scatter_to_stages`, for gradients: the layers of the pattern as parameters are at rest."""
    at_rest, on_stages, dims = _layouts(assignment, parameter_specs)

    def gather(leaf: Array, dim: int) -> Array:
        leaf = jax.lax.all_to_all(leaf, AXIS, dim, 0, tiled=True) if dim else jax.lax.all_gather(leaf, AXIS, axis=0, tiled=True)
        return leaf if _is_identity(assignment) else leaf[assignment.position_of]

    def gather_all(layers: Parameters) -> Parameters:
        return cut_periods(assignment.config, jax.tree.map(gather, layers, dims))

    return jax.shard_map(gather_all, in_specs=(on_stages,), out_specs=at_rest, check_vma=False)(layers)


def _layouts(assignment: StageAssignment, specs: Specs) -> tuple[Parameters, Parameters, Parameters]:
    """Layers of the pattern: specs at rest, specs on stages, and the dim of each leaf that `stage` splits at rest (0: none)."""
    mesh = jax.sharding.get_abstract_mesh()
    at_rest, _ = split_layers(specs(assignment.config, mesh), pattern=True)

    def map_specs(function: Callable[[P], Any]) -> Parameters:
        return jax.tree.map(function, {"layers": at_rest["layers"]}, is_leaf=lambda leaf: isinstance(leaf, P))

    return at_rest, map_specs(lambda spec: P(AXIS, *map(_without_stage, spec[1:]))), map_specs(_stage_dim)


def _without_stage(entry: Any) -> Any:
    names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != AXIS)
    return names if len(names) > 1 else names[0] if names else None


def _stage_dim(spec: P) -> int:
    """The dim that `stage` splits, 0 if none: the leading dim, of periods, is whole at rest."""
    return next((dim for dim, entry in enumerate(spec) if AXIS in (entry if isinstance(entry, tuple) else (entry,))), 0)


def _is_identity(assignment: StageAssignment) -> bool:
    """True if the layers lie on the stages in the order in which they rest."""
    return not assignment.padded and assignment.chunks == 1
