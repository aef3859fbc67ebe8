"""Adapters on every layout: the loss and every gradient are those of one device."""

import functools
import math
from functools import partial

import jax
import numpy as np
import pytest
from tiny import gradients_of, tiny_batch, tiny_config, tiny_program

from maxlm.models import abstract_model_state, abstract_parameters

LORA = {"lora": {"rank": 3, "alpha": 6.0}}
DENSE = {**LORA, "bias": "all"}
LATENT = {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
MOE = {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1, "router": {"bias_rate": 0.01}}
EXPERTS = {**LORA, "latent": LATENT, "n_kv_heads": 8, "moe": MOE}
MODELS = {"dense": DENSE, "latent attention and experts": EXPERTS}
TWICE = {"train": {"microbatches": 2}}
LAYOUTS = {  # model, mesh, other sections
    "fsdp x tensor": ("dense", {"fsdp": 2, "tensor": 2}, {}),
    "data x context": ("dense", {"data": 2, "context": 2, "fsdp": 1}, {}),
    "zero 1 x data": ("dense", {"fsdp": 2, "data": 2, "zero": 1}, {}),
    "zero 2": ("dense", {"fsdp": 2, "zero": 2}, {}),
    "zero 3 x data, microbatches": ("dense", {"fsdp": 2, "data": 2}, TWICE),
    "stage x data": ("dense", {"stage": 2, "data": 2, "fsdp": 1}, TWICE),
    "expert x fsdp": ("latent attention and experts", {"expert": 2, "fsdp": 2}, {}),
}


@functools.cache
def first_state(model):
    """Adapters away from zero, since B = 0 would hide what A gets, and the frozen model, as numpy."""
    config, drawn = tiny_config(model=MODELS[model]).model, np.random.default_rng(0)
    draw = partial(jax.tree.map, lambda leaf: drawn.normal(0, 0.1, leaf.shape).astype(np.float32))
    return draw(abstract_parameters(config)), draw(abstract_model_state(config))


def gradients(model, mesh, sections):
    """(loss, gradient of every adapter)."""
    program = tiny_program(math.prod(size for axis, size in mesh.items() if axis != "zero"), model=MODELS[model], mesh=mesh, **sections)
    shardings = program.state_shardings
    params, model_state = map(jax.device_put, first_state(model), (shardings.params, shardings.model_state))
    with jax.set_mesh(program.mesh):
        run = jax.jit(gradients_of(program), out_shardings=(None, shardings.params), compiler_options=program.compiler_options)
        sums, grads = run(params, model_state, jax.device_put(tiny_batch(), program.batch_sharding))
    return float(sums.added["loss"]), jax.device_get(grads)


@functools.cache
def reference(model):
    return gradients(model, {"fsdp": 1}, {})


# Of the whole model: `context` in test_context.py, ZeRO stages in test_zero.py, `stage` in test_stages.py, `expert` in test_experts.py
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "fsdp x tensor" else [pytest.mark.soak]) for name in LAYOUTS])
def test_a_layout_changes_no_gradient(layout):
    model, mesh, sections = LAYOUTS[layout]
    loss, grads = gradients(model, mesh, sections)
    wanted_loss, wanted = reference(model)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for (path, mine), one in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(wanted), strict=True):
        assert np.abs(one).max() > 0, path
        np.testing.assert_allclose(mine, one, atol=2e-5 * np.abs(one).max(), err_msg=jax.tree_util.keystr(path))
