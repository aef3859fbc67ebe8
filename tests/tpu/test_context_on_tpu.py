"""Ring attention, compiled: keys travel while kernels run, and are never all in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.config.sections.mesh import AXES
from maxlm.cost.mesh_links import axis_links
from maxlm.cost.step_cost import estimate
from maxlm.hardware.topologies import parse
from maxlm.hardware.xla_flags import compiler_options
from maxlm.hlo.parser import read
from maxlm.parallel.context import context_attention

CHUNK, HEADS, GROUPS, DIM = 2048, 4, 1, 128


@pytest.mark.soak
def test_keys_travel_while_kernels_run_and_are_never_gathered():
    """On four v5p chips, forward and backward; and attention is charged the pairs that each hop computes."""
    topology = parse("v5p:2x2x1")
    mesh = Mesh(
        np.array(devices(topology.name)).reshape([4 if axis == "context" else 1 for axis in AXES]), AXES, (AxisType.Auto,) * len(AXES)
    )
    split = NamedSharding(mesh, P(None, "context"))
    shapes = [((1, 8 * CHUNK, n, DIM), jnp.bfloat16) for n in (HEADS, GROUPS, GROUPS)]
    given = [jax.ShapeDtypeStruct(*shape, sharding=split) for shape in (*shapes, ((1, 8 * CHUNK), jnp.int32))]

    def total(q, k, v, segments):
        return jnp.sum(context_attention(q, k, v, segments, strategy="ring", scale=0.1).astype(jnp.float32))

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*given)
        text = lowered.compile(compiler_options=compiler_options("v5p")).as_text()
    cost = estimate(read(text), topology.chip, dict(mesh.shape), axis_links(mesh, topology))
    assert {row.opcode for row in cost.traffic} == {"collective-permute"}
    hops = [row for row in cost.traffic if "while/body" in row.where]
    assert hops and all(row.how == "async" and row.exposed_s == 0 for row in hops)
    one_way = 2 * 2 * CHUNK * GROUPS * DIM  # numbers of k and v of one device
    keys, gradients = 2 * 3 * one_way * 2, 4 * one_way * 4  # bytes: bfloat16, forward and backward; float32, and home
    assert keys + gradients <= sum(row.bytes for row in cost.traffic) < 1.4 * (keys + gradients)
    pairs = 7 * CHUNK**2 + 2 * CHUNK * (CHUNK + 1) / 2  # of one device: two whole products a hop, one at home, two halved by causality
    np.testing.assert_allclose(cost.attention_flops, (4 + 10) * HEADS * DIM * pairs, rtol=0.02)
