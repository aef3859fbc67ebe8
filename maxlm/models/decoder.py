"""A decoder-only transformer: embedding, layers, final norm, unembedding."""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from maxlm.config.schema import ModelConfig
from maxlm.models.block import BlockContext
from maxlm.models.forward import Forward
from maxlm.models.layers import Angles, Norm, rope_angles, weight
from maxlm.models.linear import BETWEEN, embedding_lookup
from maxlm.models.stack import Caches, DecoderOutput, LayerStack
from maxlm.parallel import constrain

# B batch, S sequence, P learned positions, D width, V vocabulary


class Decoder(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        table = (config.vocab_size, config.d_model)
        self.embedding_VD = weight(table, ("vocab", "embed"), config.init_std)
        positions = (config.max_seq_len or 0, config.d_model)
        learned = config.learned_positions is not None
        self.position_PD = weight(positions, ("position", "embed_act"), config.init_std) if learned else None
        self.stack = LayerStack(config)
        self.final_norm = Norm(config.d_model, config)
        self.output_VD = None if config.tie_embeddings else weight(table, ("vocab", "embed"), config.init_std)

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
        """Hidden states after the final norm, ready for `unembedding_VD`; `caches`, if any, with this call's keys and values added."""
        context = BlockContext(self.angles(positions_BS), segment_ids_BS, random_BS)
        output = self.stack(self.embed(tokens_BS, positions_BS), context, forward or Forward(), caches)
        return output._replace(x_BSD=self.final_norm(output.x_BSD))

    def embed(self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Input of the first block."""
        x_BSD = self._embed_tokens(tokens_BS)
        if self.position_PD is not None:
            x_BSD += self.position_PD[...][positions_BS].astype(x_BSD.dtype)
        return constrain(x_BSD, *BETWEEN)

    def _embed_tokens(self, tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        x_BSD = embedding_lookup(self.embedding_VD[...], tokens_BS)
        return x_BSD * jnp.asarray(self.config.d_model**0.5, x_BSD.dtype) if self.config.scale_embeddings else x_BSD

    def angles(self, positions_BS: Int[Array, "B S"]) -> dict[bool, Angles | None]:
        """Rotary angles of queries and keys in global (False) and local (True) layers."""
        config = self.config
        if config.learned_positions is not None:
            return {True: None, False: None}
        dim = config.latent.rope_dim if config.latent else config.head_dim
        angles: Callable[..., Angles] = partial(rope_angles, head_dim=dim, positions_BS=positions_BS)
        of_global = angles(config.rope)
        return {False: of_global, True: angles(config.rope_local) if config.rope_local else of_global}

    @property
    def unembedding_VD(self) -> Float[Array, "V D"]:
        """Matrix from hidden states to logits."""
        return (self.embedding_VD if self.output_VD is None else self.output_VD)[...]

    def predict_further(
        self, x_BSD: Float[Array, "B S D"], tokens: Sequence[Int[Array, "B S"]], context: BlockContext, forward: Forward
    ) -> tuple[list[Array], DecoderOutput]:
        """Multi-token prediction, see `LayerStack.predict_further`. `tokens[i]` are i + 1 places further than those of x_BSD."""
        return self.stack.predict_further(x_BSD, [self._embed_tokens(tokens_BS) for tokens_BS in tokens], context, forward)

    def empty_caches(self, batch: int, length: int) -> Caches:
        """Caches for `length` positions of generation."""
        return self.stack.empty_caches(batch, length, self.embedding_VD.dtype)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward: 6 for each weight of every matmul, plus the pairs of attention."""
        unembeddings = (1 + self.config.mtp_depth) * 6 * self.config.vocab_size * self.config.d_model
        return unembeddings + self.stack.flops_per_token(seq_len, masked=masked)
