"""The entropy of attention is that of the weights by the definition, whatever the mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.attention.reference import visible
from maxlm.kernels.attention.xla import attention_entropy

B, S, H, G, K = 2, 24, 4, 2, 8
QUERIES = np.array([0, 5, 11, 23])


def by_hand(q, k, seen, scale, softcap, sink):
    """Entropy of every query of one head, in float64."""
    scores = scale * (q @ k.T)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.where(seen, np.exp(scores), 0.0)
    if sink is not None:
        weights = np.concatenate([weights, np.full((len(weights), 1), np.exp(sink))], axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=1)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=4), Mask("bidirectional")], ids=["causal", "window", "bidirectional"])
def test_equals_the_definition(mask, sinks, softcap):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((B, S, H, K)), rng.standard_normal((B, S, G, K))
    segments = np.where(np.arange(S) < 9, 1, 2)[None].repeat(B, 0)
    positions = np.where(np.arange(S) < 9, np.arange(S), np.arange(S) - 9)[None].repeat(B, 0)
    sinks_H = rng.standard_normal(H) if sinks else None
    entropy = attention_entropy(
        jnp.asarray(q[:, QUERIES], jnp.float32),
        jnp.asarray(k, jnp.float32),
        (jnp.asarray(segments[:, QUERIES]), jnp.asarray(positions[:, QUERIES])),
        (jnp.asarray(segments), jnp.asarray(positions)),
        scale=0.5,
        mask=mask,
        softcap=softcap,
        sinks_H=None if sinks_H is None else jnp.asarray(sinks_H),
    )
    for b in range(B):
        seen = visible(segments[b, QUERIES], segments[b], positions[b, QUERIES], positions[b], mask)
        for h in range(H):
            sink = None if sinks_H is None else sinks_H[h]
            expected = by_hand(q[b, QUERIES, h], k[b, :, h * G // H], seen, 0.5, softcap, sink)
            np.testing.assert_allclose(entropy[b, :, h], expected, rtol=1e-5, atol=1e-6)
