"""A decoder-only transformer: embedding, blocks, final norm, unembedding."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from maxlm.config.schema import MemoryConfig, ModelConfig
from maxlm.models.layers import Angles, Attention, BlockContext, Cache, Mlp, Norm, cache_dims, parameter, rope_angles
from maxlm.models.linear import BETWEEN, embedding_lookup, enter, over_layers
from maxlm.models.mla import LatentAttention
from maxlm.models.moe import Moe
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.router import Routing
from maxlm.models.stack import ENTRIES, LayerGroup, Names, Tree, by_group, in_depth_order, in_single_layers, layer_groups
from maxlm.parallel import constrain
from maxlm.precision import matmuls_saveable

# B batch, S sequence, P learned positions, D width, V vocabulary, L layers

Beside = Mapping[str, Sequence[Any]]  # by entry, for each group a value of every block, stacked as the blocks are
Caches = tuple[Cache, ...]  # of every block in depth order
RouterOutput = tuple[Float[Array, ""], Routing] | None  # auxiliary losses summed over tokens, and statistics; None for a dense layer


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `sandwich` also norms the output of each sublayer. `experts`: the mlp is a mixture."""

    def __init__(self, config: ModelConfig, *, local: bool, experts: bool = False, ahead: bool = False) -> None:
        sandwich = config.norm_position == "sandwich"
        self.multiplier = config.residual_scale * (1.0 if ahead else config.parametrized.residual)  # of what each sublayer adds
        self.attention_norm = Norm(config.d_model, config)
        self.attention = Attention(config, local=local) if config.latent is None else LatentAttention(config, config.latent, local=local)
        self.attention_post_norm = Norm(config.d_model, config) if sandwich else None
        self.mlp_norm = Norm(config.d_model, config)
        self.mlp: Mlp | Moe = Moe(config) if experts else Mlp(config)
        self.mlp_post_norm = Norm(config.d_model, config) if sandwich else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Cache | None = None
    ) -> tuple[Float[Array, "B S D"], Cache | None, RouterOutput]:
        x_BSD = checkpoint_name(constrain(x_BSD, *BETWEEN), "layer_input")
        y_BSD, cache = self.attention(self.attention_norm(x_BSD), context, cache)
        x_BSD += self.multiplier * (y_BSD if self.attention_post_norm is None else self.attention_post_norm(y_BSD))
        router: RouterOutput = None
        if isinstance(self.mlp, Moe):
            y_BSD, aux_loss, routing = self.mlp(self.mlp_norm(x_BSD), context)
            router = aux_loss, routing
        else:
            y_BSD = self.mlp(enter(self.mlp_norm(x_BSD)))
        x_BSD += self.multiplier * (y_BSD if self.mlp_post_norm is None else self.mlp_post_norm(y_BSD))
        return constrain(x_BSD, *BETWEEN), cache, router

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token in one block, forward and backward."""
        return self.attention.flops_per_token(seq_len, masked=masked) + self.mlp.flops_per_token()


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
        x_BSD = embedding_lookup(self.embedding_VD[...], tokens_BS)
        scale = self.config.embedding_scale
        return x_BSD if scale == 1 else x_BSD * jnp.asarray(scale, x_BSD.dtype)

    def angles(self, positions_BS: Int[Array, "B S"], ids_BS: Int[Array, "B S"] | None = None) -> dict[bool, Angles | None]:
        """Rotary angles of queries and keys in global (False) and local (True) layers. `ids_BS`: of segments; None: each row is one."""
        config = self.config
        if config.learned_positions is not None:
            return {True: None, False: None}
        dim = config.latent.rope_dim if config.latent else config.head_dim
        of_global = rope_angles(config.rope, dim, positions_BS, ids_BS)
        return {False: of_global, True: rope_angles(config.rope_local, dim, positions_BS, ids_BS) if config.rope_local else of_global}

    def run(
        self, x_BSD: Array, context: BlockContext, entries: Names = ENTRIES, beside: Beside | None = None, layer: Callable | None = None
    ) -> DecoderOutput:
        """Run the blocks of these `ENTRIES`, each by `layer` (as `run_layer`), which takes it and the value `beside` it."""
        routers, scan = list[RouterOutput](), partial(jax.lax.scan, unroll=context.memory.unroll)
        for entry in entries:
            period = partial(_run_groups, layer_groups(self.config, (entry,)), scan, partial(layer or run_layer, context))
            blocks = getattr(self, entry)
            layers = tuple(zip(blocks, beside[entry] if beside else (None,) * len(blocks), strict=True))
            x_BSD, reports = over_layers(self.config, scan, entry, period, x_BSD, layers)
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
        new: list[Cache] = []
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
        the final norm; `tokens[i]` are i + 1 places further than those of x_BSD. `config.mtp.reads`: what modules read.
        """
        hidden: list[Array] = []
        routers: list[RouterOutput] = []
        embedded = [self._embed_tokens(tokens_BS) for tokens_BS in tokens]
        normed, norm = self.config.mtp is not None and self.config.mtp.reads == "normed", self.final_norm
        for module, token_BSD in zip(self.ahead, embedded, strict=True):
            read_BSD = norm(x_BSD) if normed else x_BSD
            x_BSD = module.join(read_BSD, token_BSD)
            x_BSD, router = over_layers(self.config, jax.lax.scan, "ahead", partial(run_layer, context), x_BSD, (module.block, None))
            norm = module.final_norm
            hidden.append(norm(x_BSD))
            routers.append(router)
        aux_loss, routing = _join_routers(layer_groups(self.config, ("ahead",)), routers)
        return hidden, DecoderOutput(x_BSD, aux_loss, routing)

    def empty_caches(self, batch: int, length: int) -> Caches:
        """Caches for `length` positions of generation: of every block its keys and values, or its latents."""
        groups, key_dim, value_dim = cache_dims(self.config)

        def empty(dim: int) -> Array:
            return constrain(jnp.zeros((batch, groups, length, dim), self.embedding_VD.dtype), "batch", "kv_heads", None, None)

        return tuple(Cache(empty(key_dim), empty(value_dim) if value_dim else None, jnp.int32(0)) for _ in range(self.config.n_layers))

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward: 6 for each weight of every matmul, plus the pairs of attention."""
        unembeddings = (1 + self.config.mtp_depth) * 6 * self.config.vocab_size * self.config.d_model
        modules: list[Any] = [*self.head, *self.layers, *self.tail, *self.ahead]
        sizes = [math.prod(group.stacked) for group in layer_groups(self.config)]
        return unembeddings + sum(n * m.flops_per_token(seq_len, masked=masked) for n, m in zip(sizes, modules, strict=True))


def _stacked(config: ModelConfig, group: LayerGroup) -> Block:
    """The blocks of a group as one, their parameters stacked."""
    kind = {"local": group.local, "experts": group.experts, "ahead": group.path[0] == "ahead"}
    blocks = jax.vmap(lambda _: Block(config, **kind))(jnp.arange(math.prod(group.stacked)))
    return jax.tree.map(lambda stack: stack.reshape(*group.stacked, *stack.shape[1:]), blocks)


def _run_groups(groups: Sequence[LayerGroup], scan: Callable, layer: Callable, x_BSD: Array, layers: tuple) -> tuple[Array, list[Any]]:
    """One period of groups: (hidden states, what routers report)."""
    routers = []
    for group, inputs in zip(groups, layers, strict=True):
        x_BSD, router = scan(layer, x_BSD, inputs) if "run" in group.axes else layer(x_BSD, inputs)
        routers.append(router)
    return x_BSD, routers


def run_layer(context: BlockContext, x_BSD: Array, inputs: tuple[Block, None]) -> tuple[Array, RouterOutput]:
    """One block under the remat policy: (hidden states, what the router reports)."""
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
            names_which_can_be_offloaded=list(memory.offload),
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
    """Router statistics of consecutive parts of the depth as those of one; None where no layer has experts."""
    present = [part for part in parts if part is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *present) if present else None


def balance_experts(config: ModelConfig, model_state: Tree, routing: Routing) -> Tree:
    """The model state after an update. Loss-free balancing (Wang 2024, arXiv 2408.15664): every bias moves `bias_rate` towards even load,
    up where an expert had less than its share, down where it had more. Loads are integers summed over all devices, so the biases are the
    same everywhere. Of a frozen model they stay.
    """
    rate = config.moe.router.bias_rate if config.moe is not None and config.lora is None else 0.0
    if not rate:
        return model_state
    groups = [group for group in layer_groups(config) if group.experts]
    updated: Tree = {}
    for group, load_E in zip(groups, by_group(groups, routing.load_E), strict=True):
        old, new = model_state, updated
        for part in (*group.path, "mlp"):
            old, new = old[part], new.setdefault(part, {})
        even = jnp.mean(load_E.astype(jnp.float32), axis=-1, keepdims=True)
        new["balancing_E"] = old["balancing_E"] + rate * jnp.sign(even - load_E)
    return updated
