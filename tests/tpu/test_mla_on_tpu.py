"""Attention with values narrower than keys, compiled for every kind of chip: our kernel runs it, and pads to whole lanes only."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.kernels import attention
from maxlm.kernels.attention.tpu import BACKWARD, FORWARD


@pytest.mark.parametrize("topology", ["v5p:2x2x1", pytest.param("v6e:2x2", marks=pytest.mark.soak)])
def test_deepseek_s_heads(topology):
    """192 wide keys in 256 lanes, 128 wide values in 128, and so the output."""
    mesh = jax.sharding.Mesh([devices(topology)[0]], ("x",))
    widths = (192, 192, 128)
    given = [jax.ShapeDtypeStruct((1, 1024, 4, width), jnp.bfloat16, sharding=NamedSharding(mesh, P())) for width in widths]

    def total(q, k, v):
        ones = jnp.ones((1, 1024), jnp.int32)
        return attention(q, k, v, query_segments_BS=ones, key_segments_BT=ones, scale=192**-0.5).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).lower(*given).compile().as_text()
    calls = [line for line in program.splitlines() if "tpu_custom_call" in line]
    (forward,), (backward,) = ([line for line in calls if name in line] for name in (FORWARD, BACKWARD))
    assert forward.count("bf16[1,4,1024,256]") >= 1 and "bf16[1,1024,512]" in forward, "4 heads of 128"
    assert "bf16[1,4,1024,128]" in backward, "the gradient of values"
