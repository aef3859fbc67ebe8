"""`memory.unroll`: layers one after another in the program, with the losses and the recomputation of the loop over layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import first_state, gradients_of, run_steps, tiny_batch, tiny_program

from maxlm.config.schema import MemoryConfig
from maxlm.models.decoder import rematerialise

PATTERN = {"n_layers": 6, "layer_pattern": ["local", "local", "global"], "window": 8}
EXPERTS = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64, "n_dense": 1}}
INT8 = {"precision": {"matmul": {"format": "int8", "first_layers": 1}, "compute": "bfloat16"}}


def unrolled(**sections):
    return {**sections, "memory": {**sections.get("memory", {}), "unroll": True}}


@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        pytest.param(
            {"fsdp": 2}, {"model": PATTERN, "memory": {"remat": ["attention"]}}, id="a pattern with runs of layers", marks=pytest.mark.soak
        ),
        pytest.param({"fsdp": 1}, {"model": EXPERTS, **INT8}, id="experts, quantized", marks=pytest.mark.soak),
        pytest.param({"fsdp": 1, "stage": 2}, {"train": {"microbatches": 2}}, id="stages", marks=pytest.mark.soak),
    ],
)
def test_losses_are_those_of_the_loop(mesh, sections):
    devices = int(np.prod([*mesh.values()]))
    programs = [tiny_program(devices, mesh=mesh, **given) for given in (sections, unrolled(**sections))]
    first = jax.device_get(first_state(programs[0]))
    losses, norms = [], []
    for program in programs:
        placed = jax.device_put((first.params, first.model_state), (program.state_shardings.params, program.state_shardings.model_state))
        gradients = jax.jit(lambda *given, program=program: of_loss(program, *given))
        with jax.set_mesh(program.mesh):
            seen = [gradients(*placed, jax.device_put(tiny_batch(n), program.batch_sharding)) for n in range(3)]
        losses.append([float(loss) for loss, _ in seen])
        norms.append([float(norm) for _, norm in seen])
    rtol = 1e-5 if programs[0].config.precision.compute == "float32" else 2e-3
    np.testing.assert_allclose(losses[1], losses[0], rtol=rtol)
    np.testing.assert_allclose(norms[1], norms[0], rtol=10 * rtol)


def of_loss(program, params, model_state, batch):
    """(the loss of a batch, the norm of its gradient)."""
    sums, gradient = gradients_of(program)(params, model_state, batch)
    return sums.added["loss"], optax.tree.norm(gradient)


def test_there_is_no_loop_over_layers_and_the_update_is_the_same():
    found, metrics = {}, []
    for given in ({}, unrolled()):
        program = tiny_program(1, **given)
        names = [name for name in re.findall(r" dot\(.*op_name=\"([^\"]*)", program.step.as_text()) if "/attn/" in name]
        unroll, layers = program.config.memory.unroll, program.config.model.n_layers
        assert all(("while" in name) != unroll for name in names)
        found[unroll] = len(names) if unroll else layers * len(names)
        metrics += run_steps(program, 1)[1]
    assert found[True] == found[False] > 0, "what is recomputed with the loop is recomputed without"
    np.testing.assert_allclose(metrics[1].loss, metrics[0].loss, rtol=1e-5)
    np.testing.assert_allclose(metrics[1].grad_norm, metrics[0].grad_norm, rtol=1e-4)


@pytest.mark.parametrize("unroll", [False, True])
def test_recomputation_cannot_be_merged_with_the_forward_pass(unroll):
    """A loop keeps the compiler from it, else a barrier; merged, what is not to be kept would be."""
    layer = rematerialise(lambda x: jnp.sin(jnp.sin(x)), MemoryConfig(remat="full", unroll=unroll))
    assert ("optimization_barrier" in jax.jit(jax.grad(layer)).lower(1.0).as_text()) == unroll
