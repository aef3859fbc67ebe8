"""Multi-head latent attention against its equations, written out a head at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.models import BlockContext, bind, init_parameters

HEADS, KV_RANK, NOPE, ROPE, VALUE, EPS = 4, 16, 8, 4, 6, 1e-5
YARN = {"kind": "yarn", "factor": 40, "original_seq_len": 8, "mscale_all_dim": 0.707}


def layer(q_rank=None, **changes):
    """(the attention of a layer, its parameters), nothing at its initial value."""
    latent = {"q_rank": q_rank, "kv_rank": KV_RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
    config = ModelConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=HEADS, d_ff=48, init_std=0.3, latent=latent, **changes)
    params, drawn = jax.jit(init_parameters, static_argnums=(0, 1))(config, 0), np.random.default_rng(0)
    params["layers"] = jax.tree.map(lambda x: np.asarray(x + 0.1 * drawn.normal(size=x.shape).astype(np.float32)), params["layers"])
    model = bind(config, params)
    return (
        model,
        jax.tree.map(lambda x: x[0], model.layers[0]).attention,
        jax.tree.map(lambda x: x[0], params["layers"]["0"]["attention"]),
    )


def normed(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


def turned(x_SK, positions_S, frequencies):
    first, second = np.split(x_SK, 2, axis=-1)
    angle = positions_S[:, None] * frequencies
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1)


def by_the_paper(p, x_SD, frequencies, gain):
    """Eqs. 37 to 47 of arXiv 2405.04434, float64, a sequence of one document."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    places = np.arange(len(x_SD))
    queries = normed(x_SD @ p["query_down_DR"], p["query_norm"]["scale_D"]) if "query_down_DR" in p else x_SD
    squeezed = x_SD @ p["kv_down_DR"]
    latent, shared = normed(squeezed[:, :KV_RANK], p["kv_norm"]["scale_D"]), turned(squeezed[:, KV_RANK:], places, frequencies)
    out = 0
    for head in range(HEADS):
        q, kv = queries @ p["query_RHK"][:, head], latent @ p["kv_RHK"][:, head]
        scores = q[:, :NOPE] @ kv[:, :NOPE].T + turned(q[:, NOPE:], places, frequencies) @ shared.T
        scores = np.where(places[:, None] >= places, scores * gain * (NOPE + ROPE) ** -0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out += weights / weights.sum(axis=1, keepdims=True) @ kv[:, NOPE:] @ p["out_HKD"][head]
    return out


def test_a_layer_is_what_the_paper_writes():
    model, attention, p = layer(q_rank=12)
    x = np.random.default_rng(3).standard_normal((2, 16, 32), np.float32)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    mine, _ = jax.jit(lambda x: attention(x, BlockContext(model.angles(positions), jnp.ones((2, 16), jnp.int32))))(x)
    frequencies = 10000.0 ** -(np.arange(ROPE // 2) / (ROPE // 2))
    for row, wanted in zip(mine, x, strict=True):
        np.testing.assert_allclose(row, by_the_paper(p, np.asarray(wanted, np.float64), frequencies, 1.0), atol=1e-4)


def test_yarn_warms_all_of_a_score_and_only_once():
    """DeepSeek's `mscale_all_dim`: also what is not turned, by (0.1 * 0.707 * ln 40 + 1)^2. Queries have no latent here."""
    model, attention, p = layer(rope={"scaling": YARN})
    x, positions = np.random.default_rng(3).standard_normal((1, 16, 32), np.float32), jnp.arange(16)[None]
    angles = model.angles(positions)["global"]
    mine, _ = jax.jit(lambda x: attention(x, BlockContext(model.angles(positions), jnp.ones((1, 16), jnp.int32))))(x)
    frequencies = np.arctan2(angles[1], angles[0])[0, 1]  # of the second token, which no frequency turns by more than pi
    np.testing.assert_allclose(angles[0] ** 2 + angles[1] ** 2, 1, atol=1e-6)
    wanted = by_the_paper(p, np.asarray(x[0], np.float64), frequencies, (0.1 * 0.707 * np.log(40) + 1) ** 2)
    np.testing.assert_allclose(mine[0], wanted, atol=1e-4)
