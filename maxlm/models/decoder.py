"""A decoder-only transformer: embedding, blocks, final norm, unembedding."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from maxlm import kernels
from maxlm.config.choices import implementation, part
from maxlm.config.layer_parts import LayerParts, layer_parts, mixer_class, mixers_of
from maxlm.config.schema import MemoryConfig, ModelConfig, PrecisionConfig
from maxlm.kernels.attention.rotary import Angles
from maxlm.kernels.collectives import LookupLayout, embedding_lookup
from maxlm.kernels.linear_cross_entropy import Layout as LossLayout
from maxlm.models.feed_forward.router import RouterOutput, Routing
from maxlm.models.layers import BETWEEN, BlockContext, Norm, parameter
from maxlm.models.mixers.attention import rope_angles
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.quantized import loss_formats, run_quantized
from maxlm.models.stack import ENTRIES, LayerGroup, Names, in_depth_order, in_single_layers, layer_groups
from maxlm.parallel import constrain, split_axes
from maxlm.precision import matmuls_saveable

# B batch, S sequence, P learned positions, D width, V vocabulary, L layers

Values = Mapping[str, Sequence[Any]]  # by entry, for each group a value of every block, stacked as the blocks are
Caches = tuple[Any, ...]  # of every block in depth order, as its mixer has them


class Block(nnx.Module):
    """One layer: a sequence mixer, a memory where its kind has one, and a feed-forward part, joined by a residual rule."""

    def __init__(self, config: ModelConfig, parts: LayerParts, *, ahead: bool = False) -> None:
        self.residual = implementation(part("residual", config.norm_position)).from_config(config, ahead=ahead)
        self.attention = mixer_class(config, parts.mixer)(config, parts.mixer)  # whatever mixer: parameters are named after it
        self.memory = implementation(part("memory", parts.memory))(config) if parts.memory else None
        self.mlp = implementation(part("feed_forward", parts.feed_forward))(config)
        for sublayer in ("attention", *(("memory",) if parts.memory else ()), "mlp"):
            for name, module in self.residual.modules(config, sublayer).items():
                setattr(self, f"{sublayer}_{name}", module)

    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Any = None
    ) -> tuple[Float[Array, "B S D"], Any, RouterOutput]:
        """(hidden states, the mixer's cache with this call added, report of the router)."""
        x_BSD = checkpoint_name(constrain(x_BSD, *BETWEEN), "layer_input")
        inputs = {"attention": (context, cache), **({} if self.memory is None else {"memory": (context,)}), "mlp": (context,)}
        sublayers = {name: partial(self._run, name, more) for name, more in inputs.items()}
        x_BSD, results = self.residual(vars(self), x_BSD, sublayers)
        return constrain(x_BSD, *BETWEEN), results["attention"], results["mlp"]

    def _run(self, name: str, inputs: Sequence[Any], x_BSD: Array) -> tuple[Array, Any]:
        return getattr(self, name)(x_BSD, *inputs)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token in one block, forward and backward."""
        memory = 0.0 if self.memory is None else self.memory.flops_per_token()
        return self.attention.flops_per_token(seq_len, masked=masked) + memory + self.mlp.flops_per_token()


class DecoderOutput(NamedTuple):
    """Output of some blocks: hidden states, auxiliary losses, router statistics and caches."""

    x_BSD: Float[Array, "B S D"]
    aux_loss: Float[Array, ""]  # of routers, summed over tokens
    routing: Routing | None  # of layers with experts in depth order; None where there are none
    caches: Caches = ()  # in generation


class Decoder(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        table = (config.vocab_size, config.d_model)
        self.embedding_VD = parameter(table, ("vocab", "embed"), config.init_std)
        positions = None if config.max_seq_len is None else (config.max_seq_len, config.d_model)
        self.position_PD = parameter(positions, ("position", "embed_act"), config.init_std) if positions else None
        self.head, self.layers, self.tail = (nnx.List(map(partial(_stacked, config), layer_groups(config, (entry,)))) for entry in ENTRIES)
        self.ahead = nnx.List([FutureTokenModule(config, _stacked(config, group)) for group in layer_groups(config, ("ahead",))])
        self.final_norm = Norm(config.d_model, config, multiplier=config.output_scale)
        self.output_VD = None if config.tie_embeddings else parameter(table, ("vocab", "embed"), config.init_std)

    @jax.named_scope("embed")
    def embed(self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Input of the first block."""
        x_BSD = self._embed_tokens(tokens_BS)
        if self.position_PD is not None:
            x_BSD += self.position_PD[...][positions_BS].astype(x_BSD.dtype)
        return constrain(x_BSD, *BETWEEN)

    def _embed_tokens(self, tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        x_BSD = embedding_lookup(self.embedding_VD[...], tokens_BS, lookup_layout(tokens_BS.shape[1]))
        scale = self.config.embedding_scale
        return x_BSD if scale == 1 else x_BSD * jnp.asarray(scale, x_BSD.dtype)

    def angles(self, positions_BS: Int[Array, "B S"], ids_BS: Int[Array, "B S"] | None = None) -> dict[str, Angles | None]:
        """Rotary angles by the mixers' names in the layer pattern. `ids_BS`: of segments; None: each row is one."""
        config = self.config
        rotary = {name: mixer_class(config, name).rotary(config, name) for name in mixers_of(config)}
        made = {key: rope_angles(key[0], key[1], positions_BS, ids_BS) for key in dict.fromkeys(rotary.values()) if key is not None}
        return {name: None if key is None else made[key] for name, key in rotary.items()}

    def run(
        self, x_BSD: Array, context: BlockContext, entries: Names = ENTRIES, values: Values | None = None, layer: Callable | None = None
    ) -> DecoderOutput:
        """Run the blocks of `entries`, each by `layer` (default `run_layer`). `values`: a further input for each block, if any."""
        routers, run_block = list[RouterOutput](), partial(layer or run_layer, replace(context, scan=None))
        for entry in entries:
            groups, blocks = layer_groups(self.config, (entry,)), getattr(self, entry)  # one stacked block for each group
            inputs = tuple(zip(blocks, values[entry] if values else (None,) * len(blocks), strict=True))
            period = partial(_run_period, groups, partial(jax.lax.scan, unroll=context.memory.unroll), run_block)
            x_BSD, reports = over_layers(self.config, context, entry, period, x_BSD, inputs)
            routers += reports
        aux_loss, routing = _join_routers(layer_groups(self.config, entries), routers)
        return DecoderOutput(x_BSD, aux_loss, routing)

    @property
    def unembedding_VD(self) -> Float[Array, "V D"]:
        """Matrix from hidden states to logits."""
        return (self.embedding_VD if self.output_VD is None else self.output_VD)[...]

    # Generation, multi-token prediction, FLOPs.

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        segment_ids_BS: Int[Array, "B S"],
        random_BS: UInt32[Array, "B S"] | None = None,
        *,
        caches: Caches = (),
        blocks: Sequence[Block] = (),
        **options: Any,
    ) -> DecoderOutput:
        """Hidden states after the final norm, ready for `unembedding_VD`; `caches`, if any, with this call's keys and values added.
        `blocks`: `self.blocks()`, if they are there already. `options`: of the `BlockContext`.
        """
        context = BlockContext(self.angles(positions_BS, segment_ids_BS), segment_ids_BS, random_BS, **options)
        x_BSD = self.embed(tokens_BS, positions_BS)
        output = self._run_cached(x_BSD, context, caches, blocks or self.blocks()) if caches else self.run(x_BSD, context)
        return output._replace(x_BSD=self.final_norm(output.x_BSD))

    def _run_cached(self, x_BSD: Array, context: BlockContext, caches: Caches, blocks: Sequence[Block]) -> DecoderOutput:
        """Run all blocks one after another: a scan over them would copy every cache, and on CPUs every matrix, at every token."""
        new: list[Any] = []
        for block, cache in zip(blocks, caches, strict=True):
            x_BSD, added, _ = block(x_BSD, context, cache)
            assert added is not None, "a cache was given"
            new.append(added)
        return DecoderOutput(x_BSD, jnp.float32(0), None, tuple(new))

    def blocks(self) -> tuple[Block, ...]:
        """The blocks in depth order, each with its own parameters."""
        return in_single_layers(layer_groups(self.config, ENTRIES), [*self.head, *self.layers, *self.tail])

    def predict_further(
        self, x_BSD: Float[Array, "B S D"], tokens: Sequence[Int[Array, "B S"]], context: BlockContext
    ) -> tuple[list[Array], DecoderOutput]:
        """Multi-token prediction: (hidden states after the final norm of each module, output of the last). `x_BSD`: hidden states before
        the final norm; `tokens[i]` are i + 1 places further than the tokens of x_BSD. `config.mtp.reads`: hidden states that modules read.
        """
        hidden: list[Array] = []
        routers: list[RouterOutput] = []
        embedded = [self._embed_tokens(tokens_BS) for tokens_BS in tokens]
        normed, norm = self.config.mtp is not None and self.config.mtp.reads == "normed", self.final_norm
        for module, token_BSD in zip(self.ahead, embedded, strict=True):
            read_BSD = norm(x_BSD) if normed else x_BSD
            x_BSD = module.join(read_BSD, token_BSD, context)
            x_BSD, router = over_layers(
                self.config, context, "ahead", partial(run_layer, replace(context, scan=None)), x_BSD, (module.block, None)
            )
            norm = module.final_norm
            hidden.append(norm(x_BSD))
            routers.append(router)
        aux_loss, routing = _join_routers(layer_groups(self.config, ("ahead",)), routers)
        return hidden, DecoderOutput(x_BSD, aux_loss, routing)

    def empty_caches(self, batch: int, length: int) -> Caches:
        """Caches of every block for `length` positions of generation, as its mixer has them."""
        config, dtype = self.config, self.embedding_VD.dtype
        mixers = [mixer_class(config, layer_parts(config, depth).mixer) for depth in range(config.n_layers)]
        return tuple(mixer.empty_cache(config, batch, length, dtype) for mixer in mixers)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward: 6 for each weight of every matmul, plus the pairs of attention."""
        unembeddings = (1 + self.config.mtp_depth) * 6 * self.config.vocab_size * self.config.d_model
        modules: list[Any] = [*self.head, *self.layers, *self.tail, *self.ahead]
        sizes = [math.prod(group.stacked) for group in layer_groups(self.config)]
        return unembeddings + sum(n * m.flops_per_token(seq_len, masked=masked) for n, m in zip(sizes, modules, strict=True))


def _stacked(config: ModelConfig, group: LayerGroup) -> Block:
    """Declare the blocks of a group as one `Block` with stacked parameters."""
    blocks = jax.vmap(lambda _: Block(config, group.parts, ahead=group.path[0] == "ahead"))(jnp.arange(math.prod(group.stacked)))
    return jax.tree.map(lambda stack: stack.reshape(*group.stacked, *stack.shape[1:]), blocks)


def _run_period(groups: Sequence[LayerGroup], scan: Callable, layer: Callable, x_BSD: Array, layers: tuple) -> tuple[Array, list[Any]]:
    """Run one period of the layer pattern, a group of equal blocks after another: (hidden states, reports of routers)."""
    routers = []
    for group, inputs in zip(groups, layers, strict=True):
        x_BSD, router = scan(layer, x_BSD, inputs) if "run" in group.axes else layer(x_BSD, inputs)
        routers.append(router)
    return x_BSD, routers


def over_layers(config: ModelConfig, context: BlockContext, entry: str, period: Callable, x_BSD: Array, layers: Any) -> tuple[Array, Any]:
    """Run the blocks of an entry: for `layers` a scan of `period` over all periods of the layer pattern, for others `period` once."""
    scan = partial(jax.lax.scan, unroll=context.memory.unroll)
    if (quantized := context.precision.matmul) is not None:
        return run_quantized(quantized, config, scan, entry, period, x_BSD, layers)
    return (context.scan or scan)(period, x_BSD, layers) if entry == "layers" else period(x_BSD, layers)


def run_layer(context: BlockContext, x_BSD: Array, inputs: tuple[Block, None]) -> tuple[Array, RouterOutput]:
    """One block under the remat policy: (hidden states, report of the router)."""
    apply = rematerialise(lambda block, *inputs: block(*inputs), context.memory)  # new each time: JAX caches traces by function
    x_BSD, _, router = apply(inputs[0], x_BSD, context)
    return x_BSD, router


def rematerialise(function: Callable, memory: MemoryConfig) -> Callable:
    """Wrap `function` so that its activations are kept, offloaded to the host or recomputed as `memory` says."""
    if memory.remat == "none":
        return function
    if memory.remat == "dots":
        policy = matmuls_saveable
    else:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[] if memory.remat == "full" else list(memory.remat),
            names_which_can_be_offloaded=list(memory.offload_by_policy),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # Inside a loop the compiler cannot merge the recomputation with the forward pass, so no barrier is needed against it.
    return jax.checkpoint(function, policy=policy, prevent_cse=memory.unroll)


def _join_routers(groups: Sequence[LayerGroup], routers: Sequence[RouterOutput]) -> tuple[Float[Array, ""], Routing | None]:
    """(sum of the auxiliary losses, statistics in depth order) of these groups."""
    present = [(group, router) for group, router in zip(groups, routers, strict=True) if router is not None]
    aux_loss = sum((jnp.sum(aux_loss) for _, (aux_loss, _) in present), jnp.float32(0))
    return aux_loss, in_depth_order([group for group, _ in present], [routing for _, (_, routing) in present]) if present else None


def join_routing(*parts: Routing | None) -> Routing | None:
    """Concatenate router statistics of consecutive parts of the depth; None where no layer has experts."""
    present = [part for part in parts if part is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *present) if present else None


# Embedding and unembedding.


def lookup_layout(length: int) -> LookupLayout:
    """Mesh axes that split the operands of `embedding_lookup`, for sequences of `length` tokens. The result is split as activations are
    between tensor-parallel regions, and along the sequence over the other axes that split the vocabulary.
    """
    mesh, seq = jax.sharding.get_abstract_mesh(), ("seq", "seq_vocab") if length > 1 else (None, None)
    return LookupLayout(*split_axes(("vocab", "embed"), mesh), *split_axes(("batch", *seq), mesh))


@jax.named_scope("unembed")
def unembedding_loss(
    precision: PrecisionConfig,
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    **options: Any,
) -> kernels.CrossEntropySums:
    """Cross-entropy of x w^T against the targets, summed over tokens; `options`: of `maxlm.kernels.linear_cross_entropy`."""
    options["formats"] = precision.matmul and loss_formats(precision.matmul)
    return kernels.linear_cross_entropy(x_BSD, w_VD, targets_BS, weights_BS, layout=unembedding_layout(), **options)


def unembedding_layout() -> LossLayout:
    """Mesh axes that split the operands of `unembedding_loss`."""
    mesh = jax.sharding.get_abstract_mesh()
    return LossLayout(*split_axes(("batch", "seq"), mesh), *split_axes(("vocab", "embed"), mesh))


def unembedding_scores(
    precision: PrecisionConfig, x_BSD: Float[Array, "B S D"], w_VD: Float[Array, "V D"], targets_BS: Int[Array, "B S"], **options: Any
) -> kernels.TokenScores:
    """Likelihood of every target, without a gradient; `options`: of `maxlm.kernels.token_scores`."""
    options["formats"] = precision.matmul and loss_formats(precision.matmul)
    return kernels.token_scores(x_BSD, w_VD, targets_BS, layout=unembedding_layout(), **options)
