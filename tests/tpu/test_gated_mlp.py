"""The kernels of a gated feed-forward layer, compiled for every chip: they are what runs, and as often as a remat policy says."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from topologies import devices

from maxlm.kernels.matmul import gated_mlp, gated_mlp_problem, tpu

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_policy_decides_what_is_computed_again(topology):
    mesh = jax.sharding.Mesh([devices(topology)[0]], ("x",))
    shapes = ((1, 512, 256), (256, 512), (256, 512), (512, 256))
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for shape in shapes]

    def kernels(*names):
        run = jax.checkpoint(lambda *args: gated_mlp(*args).sum(), policy=jax.checkpoint_policies.save_only_these_names(*names))
        with jax.set_mesh(mesh):
            program = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3))).lower(*given).compile().as_text()
        calls = [line for line in program.splitlines() if "tpu_custom_call" in line]
        return [sum(name in line for line in calls) for name in (tpu.FORWARD, tpu.BACKWARD)]

    assert kernels("gate", "up") == [1, 1]
    if topology == TOPOLOGIES[0]:
        assert kernels() == [2, 1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_they_are_chosen_where_they_are_faster(topology):
    """Of Llama 3.1 8B and 70B on v6e; not of a narrow model, of 405B, nor on other chips."""
    with jax.set_mesh(jax.sharding.Mesh([devices(topology)[0]], ("x",))):
        chosen = [not gated_mlp_problem((2, 8192, width), hidden, jnp.dtype(jnp.bfloat16)) for width, hidden in
                  ((4096, 14336), (8192, 28672), (1024, 3072), (16384, 53248))]  # fmt: skip
    assert chosen == ([True, True, False, False] if topology.startswith("v6e") else [False] * 4)
