"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are projected from one narrow latent a token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.model import LatentConfig
from maxlm.kernels.attention.rotary import rotate
from maxlm.models.layers import BETWEEN, ENTERING, BlockContext, Norm, enter, linear, matrix_size, parameter
from maxlm.models.mixers.attention import HEADS, AttentionBase, Cache
from maxlm.models.saved_tensors import Matmul, matmul_by

# B batch, S sequence, D width, R rank, H heads, K dim of queries and keys: first those without position, then rotary ones; V of values


class LatentAttention(AttentionBase):
    """Eqs. 37 to 47 of the paper, with every head's keys and values formed: in training that is fewer FLOPs than attention over latents.

    The latents enter a tensor-parallel region, not the residual stream; outside, they too are split along the sequence. Rotary dims are
    paired as (i, i + half), as everywhere here; DeepSeek's published weights have pairs next to each other.
    """

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__(config, name)
        self.latent = latent = _latent(config)
        width, heads, std = config.d_model, config.n_heads, config.init_std
        q_rank, query_dim, kv_dim = latent.q_rank, latent.nope_dim + latent.rope_dim, latent.nope_dim + latent.value_dim
        up, down = ("embed", "heads", "head_dim"), ("embed", "head_dim")
        self.query_down_DR = None if q_rank is None else parameter((width, q_rank), down, std)
        self.query_norm = None if q_rank is None else Norm(q_rank, config, "head_dim")
        self.query_RHK = parameter((q_rank or width, heads, query_dim), up, std)  # R is D where queries are not compressed
        self.kv_down_DR = parameter((width, latent.kv_rank + latent.rope_dim), down, std)
        self.kv_norm = Norm(latent.kv_rank, config, "head_dim")
        self.kv_RHK = parameter((latent.kv_rank, heads, kv_dim), up, std)

    @classmethod
    def head_dims(cls, config: ModelConfig) -> tuple[int, int, int]:
        """Dims of a head: of a query and key, of the rotary part of them, of a value."""
        latent = _latent(config)
        return latent.nope_dim + latent.rope_dim, latent.rope_dim, latent.value_dim

    @classmethod
    def cache_dims(cls, config: ModelConfig) -> tuple[int, int, int]:
        """As of attention with one head: keys, of which the first dims are the values as well."""
        latent = _latent(config)
        return 1, latent.kv_rank + latent.rope_dim, 0

    @jax.named_scope("attn")
    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Cache | None = None
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """As `Attention`; the cache holds latents, which take the place of keys and values."""
        angles = context.angles[self.name]
        assert angles is not None, "rules.py requires rotary positions"
        q_BSHK = linear(context, "BSR,RHK->BSHK", enter(self._query_latent(x_BSD, context)), self.query_RHK, reads=ENTERING, writes=HEADS)
        compressed_BSR = linear(context, "BSD,DR->BSR", x_BSD, self.kv_down_DR, reads=BETWEEN, writes=BETWEEN)
        latent_BSR, position_BSK = jnp.split(compressed_BSR, [self.latent.kv_rank], axis=-1)
        latent_BSR = enter(self.kv_norm(latent_BSR))
        queries_BSHK, rotary_BSHK = jnp.split(q_BSHK, [self.latent.nope_dim], axis=-1)
        shared_BS1K = rotate(enter(position_BSK)[:, :, None], angles)
        if cache is not None:
            return self._attend_to_latents(queries_BSHK, rotate(rotary_BSHK, angles), latent_BSR[:, :, None], shared_BS1K, context, cache)
        kv_BSHV = linear(context, "BSR,RHK->BSHK", latent_BSR, self.kv_RHK, reads=ENTERING, writes=HEADS)
        keys_BSHK, v_BSHV = jnp.split(kv_BSHV, [self.latent.nope_dim], axis=-1)
        shared_BSHK = jnp.broadcast_to(shared_BS1K, (*keys_BSHK.shape[:3], self.latent.rope_dim))
        q_BSHK = jnp.concatenate([queries_BSHK, rotate(rotary_BSHK, angles)], axis=-1)
        k_BSHK = jnp.concatenate([keys_BSHK, shared_BSHK], axis=-1)
        return self.attend(q_BSHK, k_BSHK, v_BSHV, context, cache)

    def _attend_to_latents(
        self, q_BSHK: Array, rotary_BSHK: Array, latent_BS1R: Array, shared_BS1K: Array, context: BlockContext, cache: Cache
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """Attention over latents (section 2.1.2 of the paper): queries are taken to their space, and what is attended to is taken to
        values. A position of the cache is one latent and one rotary key, however many heads there are.
        """
        keys_RHK, values_RHV = jnp.split(self.kv_RHK[...], [self.latent.nope_dim], axis=-1)
        q_BSHR = jnp.concatenate([jnp.einsum("BSHK,RHK->BSHR", q_BSHK, keys_RHK), rotary_BSHK], axis=-1)
        return self.attend(q_BSHR, jnp.concatenate([latent_BS1R, shared_BS1K], axis=-1), latent_BS1R, context, cache, values_RHV)

    def _query_latent(self, x_BSD: Float[Array, "B S D"], context: BlockContext) -> Float[Array, "B S R"]:
        if self.query_down_DR is None or self.query_norm is None:
            return x_BSD
        return self.query_norm(linear(context, "BSD,DR->BSR", x_BSD, self.query_down_DR, reads=BETWEEN, writes=BETWEEN))

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward; `masked`: only pairs that the mask leaves."""
        matrices = matrix_size(self.query_down_DR, self.query_RHK, self.kv_down_DR, self.kv_RHK, self.out_HKD)
        return 6 * matrices + self.pair_flops(seq_len, masked=masked)

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        rank, heads, _ = self.kv_RHK.shape[-3:]
        return (
            *(() if self.query_down_DR is None else (matmul_by("query_latent", self.query_down_DR, "rows", matrix="query_down"),)),
            matmul_by("query", self.query_RHK, "out"),
            matmul_by("latent", self.kv_down_DR, "rows", matrix="kv_down"),
            Matmul("key", rank, heads * self.latent.nope_dim, "out", matrix="kv"),
            Matmul("value", rank, heads * self.latent.value_dim, "out", matrix="kv"),
            matmul_by("attention_out", self.out_HKD, "in", 2, matrix="out"),
        )

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep."""
        saved = super().saved_tensors()
        return {**saved, "key": saved["query"]}  # with the rotated part, which heads share


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "the section chooses this mixer"
    return config.latent
