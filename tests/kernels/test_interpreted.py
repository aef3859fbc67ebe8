"""TPU kernels on a machine that finds races, reads of memory that was never written, and reads beyond an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import interpreted_tpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxlm.kernels import attention_and_logsumexp
from maxlm.kernels.attention import Mask, tpu


def test_a_race_is_found(capfd):
    """Or the tests below would prove nothing: both cores write the one block."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * pl.program_id(0)

    block = pl.BlockSpec((8, 128), lambda i: (0, 0))
    with pytest.raises(AssertionError, match="RACE DETECTED"), interpreted_tpu(capfd):
        run = pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )
        jax.block_until_ready(run(jnp.ones((8, 128))))


@pytest.mark.parametrize(
    ("wide", "options"),
    [pytest.param(False, {}, marks=pytest.mark.soak), (True, {"mask": Mask(window=100), "softcap": 5.0})],
    ids=["narrow", "wide, window"],
)
def test_attention(wide, options, monkeypatch, capfd):
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(128, 128))
    monkeypatch.setattr(tpu, "WIDE", ("",) if wide else ())
    keys, heads = jax.random.split(jax.random.key(0), 3), (2, 1, 1)
    qkv = [jax.random.normal(key, (1, 256, h, 128), jnp.bfloat16) for key, h in zip(keys, heads, strict=True)]
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], [100, 1, 140, 15], axis=1), jnp.int32)

    def everything(implementation):
        def run(q, k, v):
            at = {"query_segments_BS": segments, "key_segments_BT": segments}
            return attention_and_logsumexp(q, k, v, **at, scale=0.1, implementation=implementation, **options)

        (out, lse), transposed = jax.vjp(run, *qkv)
        return out, lse, *transposed((jnp.ones_like(out), jnp.isfinite(lse).astype(jnp.float32)))

    with interpreted_tpu(capfd):
        ours = jax.block_until_ready(jax.jit(everything, static_argnums=0)("flash"))
    for x, y in zip(ours, jax.jit(everything, static_argnums=0)("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=0.06, rtol=0.02)
