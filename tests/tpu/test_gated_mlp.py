"""The kernels of a gated feed-forward layer, compiled for every chip: they are what runs, and as often as a remat policy says."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.kernels.matmul import gated_mlp, gated_mlp_problem, tpu

TOPOLOGIES = ("v6e:2x2", "v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")  # on v6e alone they are chosen


@pytest.mark.parametrize("topology", [TOPOLOGIES[0], *(pytest.param(name, marks=pytest.mark.soak) for name in TOPOLOGIES[1:])])
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


@pytest.mark.soak
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize(("d_model", "d_ff"), [(4096, 14336), (8192, 28672), (5376, 21504), (5120, 25600)])
def test_what_is_chosen_fits(d_model, d_ff, tensor):
    """At the widths of the models that we ship, of every number of rows that makes other blocks."""
    device, dtype, kind = devices("v6e:2x2")[0], jnp.dtype(jnp.bfloat16), "TPU v6 lite"
    mesh, wide = jax.sharding.Mesh([device], ("x",)), d_ff // tensor
    for rows in (1024, 1536, 16384):
        if tpu.why_not(rows, d_model, wide, dtype, kind) or tpu.why_slow(rows, d_model, wide, dtype, kind):
            continue
        narrow, entering, inside = ((rows, d_model), (d_model, wide), (rows, wide))
        for run, shapes in (
            (tpu.gated_forward, [narrow, entering, entering]),
            (tpu.gated_backward, [narrow, entering[::-1], inside, inside]),
        ):
            given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape in shapes]
            with jax.set_mesh(mesh):
                jax.jit(functools.partial(run, activation="silu", device_kind=kind)).lower(*given).compile()
