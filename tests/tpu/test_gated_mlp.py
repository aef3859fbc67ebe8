"""The kernels of a gated feed-forward layer, compiled for every chip: they are what runs, and as often as a remat policy says."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from topologies import devices

from maxlm.kernels.matmul import gated_mlp, gated_mlp_problem, tpu


@pytest.mark.parametrize(("topology", "faster"), [("v5e:2x2", False), ("v5p:2x2x1", False), ("v6e:2x2", True), ("tpu7x:2x2x1", True)])
def test_a_policy_decides_what_is_computed_again(topology, faster):
    mesh = jax.sharding.Mesh([devices(topology)[0]], ("x",))
    x, rows, columns = ((2, 512, 256), (256, 1024), (1024, 256))
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for shape in (x, rows, rows, columns)]

    def kernels(*names):
        run = jax.checkpoint(lambda *args: gated_mlp(*args).sum(), policy=jax.checkpoint_policies.save_only_these_names(*names))
        with jax.set_mesh(mesh):
            assert (gated_mlp_problem(x, 1024, jnp.dtype(jnp.bfloat16)) == "") == faster
            program = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3))).lower(*given).compile().as_text()
        calls = [line for line in program.splitlines() if "tpu_custom_call" in line]
        return [sum(name in line for line in calls) for name in (tpu.FORWARD, tpu.BACKWARD)]

    assert kernels("gate", "up") == [1, 1]
    assert kernels() == [2, 1]
