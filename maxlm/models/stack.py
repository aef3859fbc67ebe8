"""The layers of a decoder and how they are grouped. Nothing else knows the groups.

Equal blocks are compiled once. A layer pattern is a sequence of runs of equal blocks (five local layers, then a global one), and the
parameters of a run are stacked over its repetitions. Groups in depth order, by the entry of the parameter tree that holds them:

- `head`: the dense layers before the first with experts
- `layers`: the pattern; its whole periods run in one scan, and entry i holds the i-th run of every period
- `tail`: the last period, where the pattern does not fit a whole number of times
- `ahead`: multi-token prediction modules, one block each, after the decoder's last layer
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlm.config.schema import ModelConfig
from maxlm.models.attention import Cache
from maxlm.models.block import Block, BlockContext, RouterOutput
from maxlm.models.forward import Forward
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.remat import rematerialise
from maxlm.models.router import Routing

# B batch, S sequence, D width, L layers

STACKED = ("layers", "run")  # logical axes of stacked blocks: periods of the pattern, then the equal blocks of a run
PATTERN = ("layers", "tail")  # the layers that a pipeline divides
Tree = Any  # nested dicts of arrays (or of shapes, specs, axes)
Caches = dict[str, tuple[Cache, ...]]


@dataclass(frozen=True)
class LayerGroup:
    """Equal blocks whose parameters are stacked along leading dims: `periods` (if the group is repeated), then `run` (if above 1)."""

    path: tuple[str, ...]  # of the blocks in the parameter tree
    local: bool
    experts: bool
    first: int  # depth of the first block
    run: int = 1  # blocks that follow each other
    periods: int | None = None
    period: int = 0  # layers from one repetition to the next

    @property
    def stacked(self) -> tuple[int, ...]:
        """Sizes of the stacked dims."""
        return (*(() if self.periods is None else (self.periods,)), *((self.run,) if self.run > 1 else ()))

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical axes of the stacked dims."""
        return STACKED[self.periods is None :][: len(self.stacked)]

    @property
    def depths(self) -> Int[np.ndarray, "*stacked"]:
        """Depth of every block."""
        depths = self.first + np.add.outer(self.period * np.arange(self.periods or 1), np.arange(self.run))
        return depths.reshape(self.stacked)


@functools.lru_cache(maxsize=64)
def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """The groups of a model, in the order in which they run."""
    period, dense, experts = len(config.layer_pattern), config.n_dense, config.moe is not None
    periods = (config.n_layers - dense) // period

    def local(depth: int) -> bool:
        return config.layer_pattern[depth % period] == "local"

    def runs(name: str, depths: range, experts: bool, **repeated: int) -> Iterator[LayerGroup]:
        for i, (is_local, blocks) in enumerate(groupby(depths, local)):
            run = list(blocks)
            yield LayerGroup((name, str(i)), is_local, experts, run[0], len(run), **repeated)

    return (
        *runs("head", range(dense), experts=False),
        *runs("layers", range(dense, dense + period), experts, periods=periods, period=period),
        *runs("tail", range(dense + periods * period, config.n_layers), experts),
        *(
            LayerGroup(("ahead", str(i), "block"), local(config.n_layers + i), experts, config.n_layers + i)
            for i in range(config.mtp_depth)
        ),
    )


class DecoderOutput(NamedTuple):
    """Decoder output: hidden states, caches, auxiliary losses and router statistics."""

    x_BSD: Float[Array, "B S D"]
    caches: Caches | None
    aux_loss: Float[Array, ""]  # of routers, summed over tokens
    routing: Routing | None  # of layers with experts in depth order; None where there are none


_LayerInputs = tuple[Block, Cache | None, Array | None]  # a block, its cache, and False if the block is padding


class LayerStack(nnx.Module):
    """All blocks of a decoder, and its multi-token prediction modules."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.head = self._blocks("head")
        self.layers = self._blocks("layers")
        self.tail = self._blocks("tail")
        self.ahead = nnx.List([FutureTokenModule(config, block) for block in self._blocks("ahead")])

    def _blocks(self, name: str) -> nnx.List[Block]:
        return nnx.List([_stacked(self.config, group) for group in self._groups(name)])

    def _groups(self, *names: str) -> list[LayerGroup]:
        return [group for group in layer_groups(self.config) if group.path[0] in names]

    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, forward: Forward, caches: Caches | None = None
    ) -> DecoderOutput:
        """Run all blocks but those of multi-token prediction."""
        x_BSD, head = self.run_head(x_BSD, context, forward, caches)
        output = self.run_pattern(x_BSD, context, forward, caches=caches)
        return output if output.caches is None else output._replace(caches={**head, **output.caches})

    def run_head(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, forward: Forward, caches: Caches | None = None
    ) -> tuple[Array, Caches]:
        """The dense layers before the pattern, and their caches. A pipeline computes them with the embedding."""
        x_BSD, new, _ = self._run("head", self._inputs("head", caches), x_BSD, context, forward)
        return x_BSD, {"head": new}

    def run_pattern(
        self,
        x_BSD: Float[Array, "B S D"],
        context: BlockContext,
        forward: Forward,
        *,
        caches: Caches | None = None,
        active_L: Bool[Array, " L"] | None = None,
    ) -> DecoderOutput:
        """The layers of the pattern. `active_L`: False for those that are padding and pass hidden states through."""
        active = {} if active_L is None else self._by_entry(active_L)

        def period(x_BSD: Array, layers: tuple[_LayerInputs, ...]) -> tuple[Array, tuple]:
            x_BSD, new, routers = self._run("layers", layers, x_BSD, context, forward)
            return x_BSD, (new, routers)

        x_BSD, (new, routers) = jax.lax.scan(period, x_BSD, self._inputs("layers", caches, active.get("layers")))
        x_BSD, new_tail, tail_routers = self._run("tail", self._inputs("tail", caches, active.get("tail")), x_BSD, context, forward)
        aux_loss, routing = self._join_routers(PATTERN, [*routers, *tail_routers])
        return DecoderOutput(x_BSD, {"layers": new, "tail": new_tail} if caches else None, aux_loss, routing)

    def _inputs(self, name: str, caches: Caches | None, active: Sequence[Array] | None = None) -> tuple[_LayerInputs, ...]:
        """For each group of an entry its blocks, caches and padding flags, stacked alike, so that a scan takes one layer after another."""
        blocks: nnx.List[Block] = getattr(self, name)
        empty = (None,) * len(blocks)
        return tuple(zip(blocks, caches[name] if caches else empty, active or empty, strict=True))

    def _run(
        self, name: str, layers: tuple[_LayerInputs, ...], x_BSD: Array, context: BlockContext, forward: Forward
    ) -> tuple[Array, tuple, tuple]:
        """One period of the groups of an entry: (hidden states, caches, what routers report)."""
        layer = functools.partial(_layer, forward, context)
        caches, routers = [], []
        for group, inputs in zip(self._groups(name), layers, strict=True):
            x_BSD, (cache, router) = jax.lax.scan(layer, x_BSD, inputs) if group.run > 1 else layer(x_BSD, inputs)
            caches.append(cache)
            routers.append(router)
        return x_BSD, tuple(caches), tuple(routers)

    # Pipelines, experts, multi-token prediction, caches, FLOPs.

    def _by_entry(self, values_L: Array) -> dict[str, list[Array]]:
        """Values of the layers of the pattern, for each entry one array a group, stacked as its blocks are."""
        parts = iter(by_group(self._groups(*PATTERN), values_L))
        return {name: [next(parts) for _ in self._groups(name)] for name in PATTERN}

    def _join_routers(self, names: Sequence[str], routers: Sequence[RouterOutput]) -> tuple[Float[Array, ""], Routing | None]:
        """(sum of the auxiliary losses, statistics in depth order) of the groups of these entries."""
        present = [router for router in routers if router is not None]
        aux_loss = sum((jnp.sum(aux_loss) for aux_loss, _ in present), jnp.float32(0))
        return aux_loss, in_depth_order(self._groups(*names), [routing for _, routing in present]) if present else None

    def predict_further(
        self, x_BSD: Float[Array, "B S D"], embedded: Sequence[Float[Array, "B S D"]], context: BlockContext, forward: Forward
    ) -> tuple[list[Array], DecoderOutput]:
        """Multi-token prediction: (hidden states after the final norm of each module, output of the last). `x_BSD`: the decoder's hidden
        states before its final norm; `embedded[i]`: embeddings of the tokens i + 1 places further.
        """
        hidden: list[Array] = []
        routers: list[RouterOutput] = []
        for module, token_BSD in zip(self.ahead, embedded, strict=True):
            joined_BSD = module.join(x_BSD, token_BSD)
            x_BSD, (_, router) = _layer(forward, context, joined_BSD, (module.block, None, None))
            hidden.append(module.final_norm(x_BSD))
            routers.append(router)
        aux_loss, routing = self._join_routers(("ahead",), routers)
        return hidden, DecoderOutput(x_BSD, None, aux_loss, routing)

    def empty_caches(self, batch: int, length: int, dtype: jnp.dtype) -> Caches:
        """Caches for `length` positions of generation."""
        config = self.config
        value_dim = config.latent.value_dim if config.latent else config.head_dim
        shapes = [(batch, length, config.n_kv_heads, dim) for dim in (config.head_dim, value_dim)]

        def empty(group: LayerGroup) -> Cache:
            k_BTGK, v_BTGV = (jnp.zeros((*group.stacked, *shape), dtype) for shape in shapes)
            return Cache(k_BTGK, v_BTGV, jnp.zeros(group.stacked, jnp.int32))

        return {name: tuple(map(empty, self._groups(name))) for name in ("head", *PATTERN)}

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward, embedding and unembedding not counted."""
        blocks = (*self.head, *self.layers, *self.tail)
        total = sum(module.flops_per_token(seq_len, masked=masked) for module in self.ahead)
        for group, block in zip(self._groups("head", *PATTERN), blocks, strict=True):
            total += math.prod(group.stacked) * block.flops_per_token(seq_len, masked=masked)
        return total


def _layer(forward: Forward, context: BlockContext, x_BSD: Array, inputs: _LayerInputs) -> tuple[Array, tuple[Cache | None, RouterOutput]]:
    """One block under the remat policy: (hidden states, (cache, what the router reports))."""
    block, cache, active = inputs

    def apply(block: Block, x_BSD: Array, context: BlockContext, cache: Cache | None) -> tuple[Array, Cache | None, RouterOutput]:
        return block(x_BSD, context, cache, forward)

    input_BSD = x_BSD if active is None else jnp.where(active, x_BSD, 0)  # no gradient flows into padding
    y_BSD, cache, router = rematerialise(apply, forward.memory)(block, input_BSD, context, cache)
    if active is None:
        return y_BSD, (cache, router)
    return jnp.where(active, y_BSD, x_BSD), (cache, jax.tree.map(lambda a: jnp.where(active, a, jnp.zeros_like(a)), router))


def _stacked(config: ModelConfig, group: LayerGroup) -> Block:
    """The blocks of a group as one, their parameters stacked."""
    sizes = group.stacked
    blocks = jax.vmap(lambda _: Block(config, local=group.local, experts=group.experts))(jnp.arange(math.prod(sizes)))
    return jax.tree.map(lambda stack: stack.reshape(*sizes, *stack.shape[1:]), blocks)


# Parameter trees by group: names, depth order, periods for a pipeline.


def group_of(config: ModelConfig, name: Sequence[str]) -> LayerGroup | None:
    """The group that holds the parameter of this name; None if it belongs to no layer."""
    return next((group for group in layer_groups(config) if tuple(name[: len(group.path)]) == group.path), None)


def split_layers(tree: Tree, *, pattern: bool = False) -> tuple[Tree, Tree]:
    """(entries of a parameter tree that hold layers, the other entries). `pattern`: only those that a pipeline divides among its stages."""
    names = PATTERN if pattern else ("head", *PATTERN, "ahead")
    return {name: tree[name] for name in names if name in tree}, {name: tree[name] for name in tree if name not in names}


def in_depth_order(groups: Sequence[LayerGroup], stacked: Sequence[Tree]) -> Tree:
    """The values of all blocks of `groups` along one leading dim, the first layer first, of one tree a group, stacked as its blocks are."""
    depths = np.concatenate([group.depths.reshape(-1) for group in groups])
    order = np.argsort(depths)

    def join(*leaves: Array) -> Array:
        rows = [leaf.reshape(group.depths.size, *leaf.shape[len(group.stacked) :]) for group, leaf in zip(groups, leaves, strict=True)]
        joined = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        return joined if np.array_equal(order, np.arange(len(order))) else joined[order]

    return jax.tree.map(join, *stacked)


def by_group(groups: Sequence[LayerGroup], values_L: Array) -> list[Array]:
    """The inverse of `in_depth_order`: for each group its values, stacked as its blocks are."""
    depths = np.sort(np.concatenate([group.depths.reshape(-1) for group in groups]))
    return [values_L[np.searchsorted(depths, group.depths)] for group in groups]


def join_routing(*parts: Routing | None) -> Routing | None:
    """Router statistics of consecutive parts of the depth as those of one; None where no layer has experts."""
    present = [part for part in parts if part is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *present) if present else None


def pad_periods(config: ModelConfig, layers: Tree) -> Tree:
    """The layers of the pattern in whole periods: an incomplete last one becomes one more row of every stacked leaf, padded with zeros."""
    whole, tail = _runs_of(config)

    def pad(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, int(bool(tail)))] + [(0, 0)] * (leaf.ndim - 1))

    def append(run: int, rest: int, leaf: Array, last: Array) -> Array:
        if run > 1:
            blocks = last.reshape(rest, *leaf.shape[2:])
            last = jnp.pad(blocks, [(0, run - rest)] + [(0, 0)] * (blocks.ndim - 1))
        return jnp.concatenate([leaf, last[None]])

    def one(i: str, tree: Tree) -> Tree:
        if i not in tail:
            return jax.tree.map(pad, tree)
        return jax.tree.map(functools.partial(append, whole[i], tail[i]), tree, layers["tail"][i])

    return {"layers": {i: one(i, tree) for i, tree in layers["layers"].items()}}


def cut_periods(config: ModelConfig, padded: Tree) -> Tree:
    """The inverse of `pad_periods`."""
    whole, tail = _runs_of(config)
    periods = (config.n_layers - config.n_dense) // len(config.layer_pattern)

    def narrow(run: int, rest: int, leaf: Array) -> Array:
        last = leaf[periods]
        return last if run == 1 else last[0] if rest == 1 else last[:rest]

    cut = {"layers": jax.tree.map(lambda leaf: leaf[:periods], padded["layers"])}
    if tail:
        cut["tail"] = {i: jax.tree.map(functools.partial(narrow, whole[i], rest), padded["layers"][i]) for i, rest in tail.items()}
    return cut


def _runs_of(config: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Blocks in each run of a period, and in each run of the incomplete last one."""
    groups = layer_groups(config)
    whole, tail = ({group.path[1]: group.run for group in groups if group.path[0] == name} for name in PATTERN)
    return whole, tail
