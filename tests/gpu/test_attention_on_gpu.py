"""Attention on an H100 or H200 against its definition. Run with JAX_PLATFORMS=cuda; skipped where there is no such GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.kernels import attention, attention_and_logsumexp
from maxlm.kernels.attention import Mask
from maxlm.kernels.attention.shapes import SHAPES
from maxlm.kernels.hopper import DEVICES

pytestmark = pytest.mark.skipif(
    not any(kind in jax.devices()[0].device_kind for kind in DEVICES), reason=f"the device is no {' or '.join(DEVICES)}"
)

# B batch, S sequence, H query heads, G key/value heads, K head dim


def operands(seed=0, B=2, S=1024, H=4, G=2, K=128):
    keys, kv = jax.random.split(jax.random.key(seed), 3), (B, S, G, K)
    qkv = [jax.random.normal(key, shape).astype(jnp.bfloat16) for key, shape in zip(keys, [(B, S, H, K), kv, kv], strict=True)]
    segments = np.sort(np.random.default_rng(seed).integers(1, 5, (B, S)), axis=1).astype(np.int32)
    segments[0, -77:] = 0
    return qkv, jnp.asarray(segments)


def values_and_gradients(implementation, qkv, segments, weights, precision="default", **options):
    """(output, logsumexp, gradients of q, k and v) of a loss in which output and logsumexp take part."""

    def loss(*qkv):
        with jax.default_matmul_precision(precision):
            out, lse = attention_and_logsumexp(
                *qkv,
                query_segments_BS=segments,
                key_segments_BT=segments,
                scale=qkv[0].shape[-1] ** -0.5,
                implementation=implementation,
                **options,
            )
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(weights * out.astype(jnp.float32)) + jnp.sum(jnp.cos(seen)), (out, lse)

    (_, (out, lse)), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, lse, *gradients


def distance(x, y):
    return float(np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y, np.float32)) / np.linalg.norm(np.asarray(y, np.float32)))


CASES = [
    ({}, {}),
    ({"K": 64}, {}),
    ({"K": 256}, {}),
    ({"K": 64, "S": 2048}, {"mask": Mask(window=300)}),
    ({"K": 128, "G": 1}, {"mask": Mask(window=128)}),
    ({"K": 256, "G": 4}, {"mask": Mask(window=200), "softcap": 5.0}),
    ({"K": 96, "S": 128}, {"softcap": 3.0}),
    ({"K": 128, "S": 4096, "B": 1}, {"softcap": 5.0}),
]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_is_as_exact_as_plain_operations(shape, options):
    """Off from float32 by at most twice what bfloat16 operations of XLA are."""
    qkv, segments = operands(**shape)
    weights = jax.random.normal(jax.random.key(9), qkv[0].shape)
    ours = values_and_gradients("hopper", qkv, segments, weights, **options)
    plain = values_and_gradients("xla", qkv, segments, weights, **options)
    exact = values_and_gradients("xla", [x.astype(jnp.float32) for x in qkv], segments, weights, "highest", **options)
    for number in (0, 2, 3, 4):
        assert distance(ours[number], exact[number]) < 2 * distance(plain[number], exact[number])
    np.testing.assert_allclose(ours[1], exact[1], atol=1e-3)
    assert not np.any(np.asarray(ours[0], np.float32)[np.asarray(segments) == 0]), "padding gives 0"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_changing_one_document_changes_no_bit_of_another(head_dim):
    (q, k, v), _ = operands(3, K=head_dim)
    segments = jnp.broadcast_to(jnp.where(jnp.arange(1024) < 333, 1, 2), (2, 1024))
    poison = jnp.where(segments == 1, 300.0, 0.0)[..., None, None].astype(jnp.bfloat16)

    def second(q, k, v):
        out = attention(
            q, k, v, query_segments_BS=segments, key_segments_BT=segments, scale=head_dim**-0.5, implementation="hopper"
        )[:, 333:]  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    both = jax.jit(jax.grad(second, argnums=(0, 1, 2), has_aux=True))
    before, out_before = both(q, k, v)
    after, out_after = both(q + poison, k + poison, v + poison)
    np.testing.assert_array_equal(out_before.view(jnp.int16), out_after.view(jnp.int16))
    for mine, poisoned in zip(before, after, strict=True):
        np.testing.assert_array_equal(mine[:, 333:].view(jnp.int16), poisoned[:, 333:].view(jnp.int16))
        assert not np.any(mine[:, :333])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_two_runs_give_the_same_bits(shape):
    """Output and gradients, with more thread blocks than the device runs at once."""
    keys = jax.random.split(jax.random.key(4), 4)
    sizes = [(2, shape.seq_len, heads, shape.head_dim) for heads in (shape.heads, shape.groups, shape.groups, shape.heads)]
    *qkv, weights = (jax.random.normal(key, size).astype(jnp.bfloat16) for key, size in zip(keys, sizes, strict=True))
    segments = jnp.asarray(shape.segments(2))

    @jax.jit
    def run(*qkv):
        def attend(*qkv):
            return attention(
                *qkv,
                query_segments_BS=segments,
                key_segments_BT=segments,
                scale=shape.head_dim**-0.5,
                mask=shape.mask,
                softcap=shape.softcap,
                implementation="hopper",
            )

        out, back = jax.vjp(attend, *qkv)
        return out, *back(weights)

    first = run(*qkv)
    for _ in range(3):
        for mine, again in zip(first, run(*qkv), strict=True):
            np.testing.assert_array_equal(mine.view(jnp.int16), again.view(jnp.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_is_chosen_at_real_shapes(shape):
    """Values of the last block of queries, which sees most keys."""
    keys, batch = jax.random.split(jax.random.key(1), 3), 1
    sizes = [(batch, shape.seq_len, heads, shape.head_dim) for heads in (shape.heads, shape.groups, shape.groups)]
    qkv = [jax.random.normal(key, size).astype(jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    segments = jnp.asarray(shape.segments(batch))
    masks = {"query_segments_BS": segments, "key_segments_BT": segments, "mask": shape.mask}
    options = {**masks, "scale": shape.head_dim**-0.5, "softcap": shape.softcap}
    run = jax.jit(lambda *qkv: attention(*qkv, **options))
    assert "attention_hopper_forward" in run.lower(*qkv).as_text()
    plain = attention(*qkv, **options, implementation="xla")
    assert distance(run(*qkv)[:, -128:], plain[:, -128:]) < 1e-2
