"""Heads that are no whole lanes wide, compiled for TPUs: our kernel reads them as they are, and its output has no zeros between them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.kernels import attention
from maxlm.kernels.attention import tpu


@pytest.mark.parametrize("topology", ["v5p:2x2x1", pytest.param("v6e:2x2", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("keys", "values"), [pytest.param(192, 128, id="deepseek"), pytest.param(64, 64, id="gpt2")])
def test_heads_are_read_as_wide_as_they_are(topology, keys, values, monkeypatch):
    monkeypatch.setattr(tpu, "table", dict)
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(128, 128))  # larger ones take eight times the compilation
    mesh = jax.sharding.Mesh([devices(topology)[0]], ("x",))
    widths = (keys, keys, values)
    given = [jax.ShapeDtypeStruct((1, 1024, 4, width), jnp.bfloat16, sharding=NamedSharding(mesh, P())) for width in widths]

    def total(q, k, v):
        ones = jnp.ones((1, 1024), jnp.int32)
        return attention(q, k, v, query_segments_BS=ones, key_segments_BT=ones, scale=keys**-0.5).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).lower(*given).compile().as_text()
    calls = [line for line in program.splitlines() if "tpu_custom_call" in line]
    (forward,), (backward,) = ([line for line in calls if name in line] for name in (tpu.FORWARD, tpu.BACKWARD))
    assert f"bf16[1,4,1024,{keys}]" in forward and f"bf16[1,1024,{4 * values}]" in forward, "4 heads side by side"
    assert f"bf16[1,1024,{4 * values}]" in backward, "and so their gradients"
    assert all(f"bf16[1,4,1024,{width}]" in backward for width in (keys, values)), "gradients"
    assert not any(f"bf16[1,4,1024,{wide}]" in program for wide in (128, 256) if wide not in widths), "nothing is padded"
