"""Generation: the prompt in one pass, then a token at a time from cached keys and values, all on the device."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.config import UserError
from maxlm.config.schema import ModelConfig
from maxlm.kernels.linear_cross_entropy import logits
from maxlm.models import Caches, Decoder, bind
from maxlm.models.parameters import Parameters

# B batch, S new positions, V vocabulary


@dataclass(frozen=True)
class Sampler:
    """Sampling of the next token: the most likely one at temperature 0, else a draw among the `top_k` most likely (0: all)."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def generate(
    config: ModelConfig, params: Parameters, model_state: Parameters, prompt: list[int], sampler: Sampler, end_of_document: int
) -> list[int]:
    """Generate ids that continue `prompt`, up to the end of the document or `max_new_tokens`.

    Raises UserError for an empty prompt, an id beyond the vocabulary, or more positions than a learned table has.
    """
    length = len(prompt) + sampler.max_new_tokens
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue.")
    if max(prompt) >= config.vocab_size:
        raise UserError(
            f"the prompt holds token id {max(prompt)}, and the model's vocabulary has {config.vocab_size}: use its own tokenizer."
        )
    if config.max_seq_len is not None and length > config.max_seq_len:
        raise UserError(
            f"prompt and continuation have {length} tokens, above model.learned_positions.max_seq_len = {config.max_seq_len}: ask for less."
        )
    ids = np.asarray(_run(config, sampler, end_of_document, params, model_state, jnp.asarray([prompt], jnp.int32)))[0].tolist()
    return ids[: ids.index(end_of_document)] if end_of_document in ids else ids


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    config: ModelConfig, sampler: Sampler, end: int, params: Parameters, model_state: Parameters, prompt_BS: Int[Array, "B S"]
) -> Int[Array, "B new"]:
    model = bind(config, params, model_state)
    batch, start = prompt_BS.shape
    caches = model.empty_caches(batch, start + sampler.max_new_tokens)
    last_BV, caches = _advance(model, prompt_BS, jnp.int32(0), caches)
    out_BN = jnp.full((batch, sampler.max_new_tokens), end, jnp.int32)
    done_B = jnp.zeros((batch,), bool)

    def unfinished(carry: tuple) -> jax.Array:
        index, done_B = carry[0], carry[1]
        return (index < sampler.max_new_tokens) & ~jnp.all(done_B)

    def one(carry: tuple) -> tuple:
        index, done_B, key, last_BV, caches, out_BN = carry
        key, draw = jax.random.split(key)
        token_B = jnp.where(done_B, end, _sample(sampler, draw, last_BV))
        out_BN = out_BN.at[:, index].set(token_B)
        last_BV, caches = _advance(model, token_B[:, None], start + index, caches)
        return index + 1, done_B | (token_B == end), key, last_BV, caches, out_BN

    carry = (jnp.int32(0), done_B, jax.random.key(sampler.seed), last_BV, caches, out_BN)
    return jax.lax.while_loop(unfinished, one, carry)[-1]


def _advance(model: Decoder, tokens_BS: Int[Array, "B S"], start: Int[Array, ""], caches: Caches) -> tuple[Float[Array, "B V"], Caches]:
    """Logits after the last of the new tokens; the first is at position `start`."""
    positions_BS = start + jnp.broadcast_to(jnp.arange(tokens_BS.shape[1], dtype=jnp.int32), tokens_BS.shape)
    output = model(tokens_BS, positions_BS, jnp.ones_like(tokens_BS), generates=True, caches=caches)
    return logits(output.x_BSD[:, -1:], model.unembedding_VD, model.config.logits_softcap)[:, 0], output.caches


def _sample(sampler: Sampler, key: jax.Array, logits_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    if sampler.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if 0 < sampler.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, sampler.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / sampler.temperature).astype(jnp.int32)
