"""The decoder: embedding, blocks scanned by the period of their pattern and the runs in it, final norm, unembedding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlm.config.schema import ContextAttention, MemoryConfig, ModelConfig
from maxlm.models.attention import Attention, Cache
from maxlm.models.latent import LatentAttention
from maxlm.models.layers import BETWEEN, Angles, Norm, enter, rope_angles, weight
from maxlm.models.mlp import Mlp
from maxlm.models.remat import rematerialise
from maxlm.parallel import constrain
from maxlm.parallel.lookup import lookup

# B batch, S sequence, T cached positions, D width, V vocabulary, G key/value heads, K head dim

Caches = tuple[tuple[Cache, ...], tuple[Cache, ...]]  # as `layers` and `tail`
AnglesByKind = dict[bool, Angles | None]  # by whether a layer is local; None with learned positions


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `sandwich` also norms what each sublayer adds."""

    def __init__(self, config: ModelConfig, *, local: bool) -> None:
        sandwich = config.norm_position == "sandwich"
        self.attention_norm = Norm(config.d_model, config)
        self.attention = Attention(config, local=local) if config.latent is None else LatentAttention(config, config.latent, local=local)
        self.attention_post_norm = Norm(config.d_model, config) if sandwich else None
        self.mlp_norm = Norm(config.d_model, config)
        self.mlp = Mlp(config)
        self.mlp_post_norm = Norm(config.d_model, config) if sandwich else None

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        angles: Angles | None,
        segment_ids_BS: Int[Array, "B S"],
        cache: Cache | None,
        context: ContextAttention = "ring",
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        x_BSD = checkpoint_name(constrain(x_BSD, *BETWEEN), "layer_input")
        mixed_BSD, cache = self.attention(self.attention_norm(x_BSD), angles, segment_ids_BS, cache, context)
        x_BSD += mixed_BSD if self.attention_post_norm is None else self.attention_post_norm(mixed_BSD)
        fed_BSD = self.mlp(enter(self.mlp_norm(x_BSD)))
        x_BSD += fed_BSD if self.mlp_post_norm is None else self.mlp_post_norm(fed_BSD)
        return constrain(x_BSD, *BETWEEN), cache

    @property
    def stacked(self) -> tuple[int, ...]:
        """Sizes of the leading dims along which the parameters of several blocks are stacked; empty for one block."""
        return self.mlp_norm.scale_D.shape[:-1]

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token and one block, forward and backward."""
        return self.attention.flops_per_token(seq_len, masked=masked) + self.mlp.flops_per_token()


_Own = tuple[Block, Cache | None, Array | None]  # a block, its cache, and whether it is there


class Decoder(nnx.Module):
    """A decoder-only transformer.

    A pattern is a sequence of runs of equal blocks (five local layers, then a global one), and each is compiled once. `layers[i]`
    holds, stacked, the i-th run of every period; `tail` the runs left over. A run of several blocks has a second stacked dim.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        periods, rest = divmod(config.n_layers, len(config.layer_pattern))
        self.embedding_VD = weight((config.vocab_size, config.d_model), ("vocab", "table"), config.init_std)
        learned = config.positions == "learned"
        position_shape = (config.max_seq_len or 0, config.d_model)
        self.position_PD = weight(position_shape, ("position", "embed_act"), config.init_std) if learned else None
        self.layers = _runs(config, config.layer_pattern, periods)
        self.tail = _runs(config, config.layer_pattern[:rest])
        self.final_norm = Norm(config.d_model, config)
        tied = config.tie_embeddings
        self.output_VD = None if tied else weight((config.vocab_size, config.d_model), ("vocab", "table"), config.init_std)

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        segment_ids_BS: Int[Array, "B S"],
        *,
        memory: MemoryConfig | None = None,
        context: ContextAttention = "ring",
        caches: Caches | None = None,
    ) -> tuple[Float[Array, "B S D"], Caches | None]:
        """Hidden states after the final norm, ready for `unembedding_VD`; `caches` extended if given. `context`: how attention
        meets a sequence that the mesh splits; see `maxlm.parallel.context` for the order of tokens that it wants.
        """
        x_BSD, caches = self.run(
            self.embed(tokens_BS, positions_BS), self.angles(positions_BS), segment_ids_BS, memory=memory, context=context, caches=caches
        )
        return self.final_norm(x_BSD), caches

    def run(
        self,
        x_BSD: Float[Array, "B S D"],
        angles: AnglesByKind,
        segment_ids_BS: Int[Array, "B S"],
        *,
        memory: MemoryConfig | None = None,
        context: ContextAttention = "ring",
        caches: Caches | None = None,
        alive: tuple[Array, ...] | None = None,
    ) -> tuple[Float[Array, "B S D"], Caches | None]:
        """All blocks, between `embed` and `final_norm`. `alive`, stacked as `layers`: which of those are there; the others are padding."""
        apply = rematerialise(partial(_apply, context), memory or MemoryConfig(remat="none"))
        period_caches, tail_caches = caches or ((None,) * len(self.layers), (None,) * len(self.tail))
        present = alive or (None,) * len(self.layers)

        def layer(x_BSD: jax.Array, own: _Own) -> tuple[jax.Array, Cache | None]:
            block, cache, is_there = own
            given_BSD = x_BSD if is_there is None else jnp.where(is_there, x_BSD, 0)  # the gradient of padding goes nowhere
            y_BSD, cache = apply(block, given_BSD, angles[block.attention.local], segment_ids_BS, cache)
            return y_BSD if is_there is None else jnp.where(is_there, y_BSD, x_BSD), cache

        def period(x_BSD: jax.Array, owns: tuple[_Own, ...]) -> tuple[jax.Array, tuple]:
            new = []
            for own in owns:
                x_BSD, cache = jax.lax.scan(layer, x_BSD, own) if own[0].stacked else layer(x_BSD, own)
                new.append(cache)
            return x_BSD, tuple(new)

        x_BSD, new_periods = jax.lax.scan(period, x_BSD, tuple(zip(self.layers, period_caches, present, strict=True)))
        x_BSD, new_tail = period(x_BSD, tuple((block, cache, None) for block, cache in zip(self.tail, tail_caches, strict=True)))
        return x_BSD, (new_periods, new_tail) if caches else None

    @property
    def unembedding_VD(self) -> jax.Array:
        """What turns hidden states into logits."""
        return (self.embedding_VD if self.output_VD is None else self.output_VD)[...]

    def empty_caches(self, batch: int, length: int) -> Caches:
        """Caches for `length` positions of generation."""
        config = self.config
        value_dim = config.latent.value_dim if config.latent else config.head_dim
        shapes = [(batch, length, config.n_kv_heads, dim) for dim in (config.head_dim, value_dim)]
        dtype = self.embedding_VD.dtype

        def empty(block: Block) -> Cache:
            k_BTGK, v_BTGV = (jnp.zeros((*block.stacked, *shape), dtype) for shape in shapes)
            return Cache(k_BTGK, v_BTGV, jnp.zeros(block.stacked, jnp.int32))

        return tuple(map(empty, self.layers)), tuple(map(empty, self.tail))

    def embed(self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """What the first block reads."""
        x_BSD = lookup(self.embedding_VD[...], tokens_BS)
        if self.config.scale_embeddings:
            x_BSD *= jnp.asarray(self.config.d_model**0.5, x_BSD.dtype)
        if self.position_PD is not None:
            x_BSD += self.position_PD[...][positions_BS].astype(x_BSD.dtype)
        return constrain(x_BSD, *BETWEEN)

    def angles(self, positions_BS: Int[Array, "B S"]) -> AnglesByKind:
        """Rotary angles, which blocks turn queries and keys by."""
        config = self.config
        if config.positions == "learned":
            return {True: None, False: None}
        dim = config.latent.rope_dim if config.latent else config.head_dim
        turned: Callable[..., Angles] = partial(rope_angles, head_dim=dim, positions_BS=positions_BS)
        everywhere = turned(config.rope)
        return {False: everywhere, True: turned(config.rope_local) if config.rope_local else everywhere}

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward: 6 a weight of every matmul, plus attention's pairs."""
        blocks = (*self.layers, *self.tail)
        unembedding = 6 * self.config.vocab_size * self.config.d_model
        return unembedding + sum(math.prod(block.stacked) * block.flops_per_token(seq_len, masked=masked) for block in blocks)


def _runs(config: ModelConfig, pattern: Sequence[str], *periods: int) -> nnx.List[Block]:
    """The runs of equal blocks in `pattern`, parameters stacked along `periods`, if given, and along the run, if longer than one."""
    runs = [(kind, len(list(run))) for kind, run in groupby(pattern)]
    return nnx.List([_stacked(config, kind == "local", (*periods, size) if size > 1 else periods) for kind, size in runs])


def _stacked(config: ModelConfig, local: bool, sizes: tuple[int, ...]) -> Block:
    """Blocks in one, their parameters stacked along leading dims of these sizes."""
    blocks = jax.vmap(lambda _: Block(config, local=local))(jnp.arange(math.prod(sizes)))
    return jax.tree.map(lambda stack: stack.reshape(*sizes, *stack.shape[1:]), blocks)


def _apply(
    context: ContextAttention, block: Block, x_BSD: jax.Array, angles: Angles | None, segment_ids_BS: jax.Array, cache: Cache | None
) -> tuple[jax.Array, Cache | None]:
    return block(x_BSD, angles, segment_ids_BS, cache, context)
