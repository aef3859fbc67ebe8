"""The decoder: embedding, blocks scanned by the period of their pattern and the runs in it, final norm, unembedding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import ModelConfig
from maxlm.models.attention import Attention, Cache
from maxlm.models.forward import Forward
from maxlm.models.layers import Angles, Norm, rope_angles, weight
from maxlm.models.linear import BETWEEN, enter
from maxlm.models.mla import LatentAttention
from maxlm.models.mlp import Mlp
from maxlm.models.moe import Moe
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.remat import rematerialise
from maxlm.models.router import Routing
from maxlm.parallel import constrain
from maxlm.parallel.lookup import lookup

# B batch, S sequence, T cached positions, D width, V vocabulary, G key/value heads, K head dim

Caches = dict[str, tuple[Cache, ...]]  # of "head", "layers" and "tail"
Routings = dict[str, tuple[Routing, ...]]  # of "layers", "tail" and "ahead", stacked as they are


class BlockContext(NamedTuple):
    """What blocks read beside hidden states; carries no gradient."""

    angles: dict[bool, Angles | None]  # by whether a layer is local; None with learned positions
    segment_ids_BS: Int[Array, "B S"]  # 0 is padding
    random_BS: UInt32[Array, "B S"] | None = None  # the seed of each token's router jitter, in training
    prefix_BS: Bool[Array, "B S"] | None = None  # True in the prefix of a document, for masks of form "prefix"


class DecoderOutput(NamedTuple):
    """What has gone through all blocks."""

    x_BSD: Float[Array, "B S D"]
    caches: Caches | None
    penalty: Float[Array, ""]  # auxiliary losses, summed over tokens
    routings: Routings | None  # None where no layer has experts


_Report = tuple[Float[Array, ""], Routing] | None  # auxiliary losses and what the router did; None of a dense layer


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `sandwich` also norms what each sublayer adds. With experts, they are the mlp."""

    def __init__(self, config: ModelConfig, *, local: bool, experts: bool = False) -> None:
        sandwich = config.norm_position == "sandwich"
        self.attention_norm = Norm(config.d_model, config)
        self.attention = Attention(config, local=local) if config.latent is None else LatentAttention(config, config.latent, local=local)
        self.attention_post_norm = Norm(config.d_model, config) if sandwich else None
        self.mlp_norm = Norm(config.d_model, config)
        self.mlp: Mlp | Moe = Moe(config) if experts else Mlp(config)
        self.mlp_post_norm = Norm(config.d_model, config) if sandwich else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], given: BlockContext, cache: Cache | None, forward: Forward
    ) -> tuple[Float[Array, "B S D"], Cache | None, _Report]:
        x_BSD = checkpoint_name(constrain(x_BSD, *BETWEEN), "layer_input")
        angles, segment_ids_BS = given.angles[self.attention.local], given.segment_ids_BS
        mixed_BSD, cache = self.attention(self.attention_norm(x_BSD), angles, segment_ids_BS, cache, forward, given.prefix_BS)
        x_BSD += mixed_BSD if self.attention_post_norm is None else self.attention_post_norm(mixed_BSD)
        report: _Report = None
        if isinstance(self.mlp, Moe):
            fed_BSD, penalty, routing = self.mlp(self.mlp_norm(x_BSD), segment_ids_BS != 0, given.random_BS, forward)
            report = penalty, routing
        else:
            fed_BSD = self.mlp(enter(self.mlp_norm(x_BSD)))
        x_BSD += fed_BSD if self.mlp_post_norm is None else self.mlp_post_norm(fed_BSD)
        return constrain(x_BSD, *BETWEEN), cache, report

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
    holds, stacked, the i-th run of every period; `tail` the runs left over, `head` those of the dense layers before the first with experts.
    A run of several blocks has a second stacked dim.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        dense = config.n_dense
        pattern = config.repeated_pattern
        periods, rest = divmod(config.n_layers - dense, len(pattern))
        self.embedding_VD = weight((config.vocab_size, config.d_model), ("vocab", "embed"), config.init_std)
        learned = config.learned_positions is not None
        position_shape = (config.max_seq_len or 0, config.d_model)
        self.position_PD = weight(position_shape, ("position", "embed_act"), config.init_std) if learned else None
        experts = config.moe is not None
        self.head = _runs(config, [config.layer_pattern[i % len(pattern)] for i in range(dense)], experts=False)
        self.layers = _runs(config, pattern, periods, experts=experts)
        self.tail = _runs(config, pattern[:rest], experts=experts)
        self.final_norm = Norm(config.d_model, config)
        tied = config.tie_embeddings
        self.output_VD = None if tied else weight((config.vocab_size, config.d_model), ("vocab", "embed"), config.init_std)
        kinds = [config.layer_pattern[(config.n_layers + i) % len(pattern)] for i in range(config.mtp_depth)]
        self.ahead = nnx.List([FutureTokenModule(config, Block(config, local=kind == "local", experts=experts)) for kind in kinds])

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        segment_ids_BS: Int[Array, "B S"],
        random_BS: UInt32[Array, "B S"] | None = None,
        *,
        forward: Forward | None = None,
        caches: Caches | None = None,
    ) -> DecoderOutput:
        """Hidden states after the final norm, ready for `unembedding_VD`; `caches` extended if given."""
        given = BlockContext(self.angles(positions_BS), segment_ids_BS, random_BS)
        through = self.through(self.embed(tokens_BS, positions_BS), given, forward or Forward(), caches)
        return through._replace(x_BSD=self.final_norm(through.x_BSD))

    def through(self, x_BSD: Float[Array, "B S D"], given: BlockContext, forward: Forward, caches: Caches | None = None) -> DecoderOutput:
        """All blocks, between `embed` and `final_norm`."""
        x_BSD, caches_of_head = self.begin(x_BSD, given, forward, caches)
        through = self.run(x_BSD, given, forward, caches=caches)
        return through if through.caches is None else through._replace(caches={**caches_of_head, **through.caches})

    def look_ahead(
        self, x_BSD: Float[Array, "B S D"], tokens: Sequence[Array], given: BlockContext, forward: Forward
    ) -> tuple[list[Array], DecoderOutput]:
        """(hidden states after a final norm for each token further ahead, what the last of these blocks gives): `tokens[i]`, [B, S], stand
        i + 1 places further than those that x_BSD, before its final norm, was made of.
        """
        normed: list[Array] = []
        reports: list[Routing] = []
        penalty = jnp.float32(0)
        for ahead, tokens_BS in zip(self.ahead, tokens, strict=True):
            joined_BSD = ahead.join(x_BSD, self._looked_up(tokens_BS))
            x_BSD, (_, report) = _layer(forward, given, joined_BSD, (ahead.block, None, None))
            normed.append(ahead.final_norm(x_BSD))
            if report is not None:
                penalty, reports = penalty + report[0], [*reports, report[1]]
        return normed, DecoderOutput(x_BSD, None, penalty, {"ahead": tuple(reports)} if reports else None)

    def begin(
        self, x_BSD: Float[Array, "B S D"], given: BlockContext, forward: Forward, caches: Caches | None = None
    ) -> tuple[Array, Caches]:
        """The blocks before the pattern."""
        x_BSD, new, _ = _period(partial(_layer, forward, given), x_BSD, _owns(self.head, caches, "head"))
        return x_BSD, {"head": new}

    def run(
        self,
        x_BSD: Float[Array, "B S D"],
        given: BlockContext,
        forward: Forward,
        *,
        caches: Caches | None = None,
        alive: tuple[Array, ...] | None = None,
    ) -> DecoderOutput:
        """The blocks of the pattern, between `begin` and `final_norm`. `alive`, stacked as `layers`: which are there; the others are
        padding.
        """
        layer = partial(_layer, forward, given)

        def period(x_BSD: jax.Array, owns: tuple[_Own, ...]) -> tuple[jax.Array, tuple]:
            x_BSD, caches, reports = _period(layer, x_BSD, owns)
            return x_BSD, (caches, reports)

        x_BSD, (new_layers, reports) = jax.lax.scan(period, x_BSD, _owns(self.layers, caches, "layers", alive))
        x_BSD, new_tail, reports_of_tail = _period(layer, x_BSD, _owns(self.tail, caches, "tail"))
        found = {"layers": reports, "tail": reports_of_tail}
        penalty = sum((jnp.sum(report[0]) for part in found.values() for report in part if report is not None), jnp.float32(0))
        routings = {name: tuple(report[1] for report in part) for name, part in found.items()} if self.config.moe is not None else None
        return DecoderOutput(x_BSD, {"layers": new_layers, "tail": new_tail} if caches else None, penalty, routings)

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

        return {name: tuple(map(empty, getattr(self, name))) for name in ("head", "layers", "tail")}

    def embed(self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """What the first block reads."""
        x_BSD = self._looked_up(tokens_BS)
        if self.position_PD is not None:
            x_BSD += self.position_PD[...][positions_BS].astype(x_BSD.dtype)
        return constrain(x_BSD, *BETWEEN)

    def _looked_up(self, tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        x_BSD = lookup(self.embedding_VD[...], tokens_BS)
        return x_BSD * jnp.asarray(self.config.d_model**0.5, x_BSD.dtype) if self.config.scale_embeddings else x_BSD

    def angles(self, positions_BS: Int[Array, "B S"]) -> dict[bool, Angles | None]:
        """Rotary angles, which blocks turn queries and keys by."""
        config = self.config
        if config.learned_positions is not None:
            return {True: None, False: None}
        dim = config.latent.rope_dim if config.latent else config.head_dim
        turned: Callable[..., Angles] = partial(rope_angles, head_dim=dim, positions_BS=positions_BS)
        everywhere = turned(config.rope)
        return {False: everywhere, True: turned(config.rope_local) if config.rope_local else everywhere}

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward: 6 a weight of every matmul, plus attention's pairs."""
        blocks = (*self.head, *self.layers, *self.tail)
        unembedding = 6 * self.config.vocab_size * self.config.d_model
        further = sum(unembedding + ahead.flops_per_token(seq_len, masked=masked) for ahead in self.ahead)
        return further + unembedding + sum(math.prod(block.stacked) * block.flops_per_token(seq_len, masked=masked) for block in blocks)


def _owns(blocks: Sequence[Block], caches: Caches | None, name: str, alive: tuple[Array, ...] | None = None) -> tuple[_Own, ...]:
    nothing = (None,) * len(blocks)
    return tuple(zip(blocks, caches[name] if caches else nothing, alive or nothing, strict=True))


def _period(layer: Callable, x_BSD: jax.Array, owns: tuple[_Own, ...]) -> tuple[jax.Array, tuple, tuple]:
    """(x after these runs, their caches, their reports)."""
    caches, reports = [], []
    for own in owns:
        x_BSD, (cache, report) = jax.lax.scan(layer, x_BSD, own) if own[0].stacked else layer(x_BSD, own)
        caches.append(cache)
        reports.append(report)
    return x_BSD, tuple(caches), tuple(reports)


def _layer(forward: Forward, given: BlockContext, x_BSD: jax.Array, own: _Own) -> tuple[jax.Array, tuple[Cache | None, _Report]]:
    """One block, with what its backward pass needs kept as the remat policy says."""
    block, cache, is_there = own

    def apply(block: Block, x_BSD: jax.Array, given: BlockContext, cache: Cache | None) -> tuple[jax.Array, Cache | None, _Report]:
        return block(x_BSD, given, cache, forward)

    into_BSD = x_BSD if is_there is None else jnp.where(is_there, x_BSD, 0)  # the gradient of padding goes nowhere
    y_BSD, cache, report = rematerialise(apply, forward.memory)(block, into_BSD, given, cache)
    if is_there is None:
        return y_BSD, (cache, report)
    return jnp.where(is_there, y_BSD, x_BSD), (cache, jax.tree.map(lambda a: jnp.where(is_there, a, jnp.zeros_like(a)), report))


def _runs(config: ModelConfig, pattern: Sequence[str], *periods: int, experts: bool) -> nnx.List[Block]:
    """The runs of equal blocks in `pattern`, parameters stacked along `periods`, if given, and along the run, if longer than one."""
    runs = [(kind, len(list(run))) for kind, run in groupby(pattern)]
    return nnx.List([_stacked(config, kind == "local", experts, (*periods, size) if size > 1 else periods) for kind, size in runs])


def _stacked(config: ModelConfig, local: bool, experts: bool, sizes: tuple[int, ...]) -> Block:
    """Blocks in one, their parameters stacked along leading dims of these sizes."""
    blocks = jax.vmap(lambda _: Block(config, local=local, experts=experts))(jnp.arange(math.prod(sizes)))
    return jax.tree.map(lambda stack: stack.reshape(*sizes, *stack.shape[1:]), blocks)
