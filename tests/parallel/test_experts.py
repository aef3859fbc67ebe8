"""Experts on any mesh: the loss, every gradient and what routers report equal a plain loop over experts on one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import steps_of, sums_and_gradients, tiny_program

from maxlm.models.feed_forward import experts

MOE = {"n_experts": 8, "top_k": 2, "d_ff": 32, "n_shared": 1, "router": {"balance_loss": 0.02, "z_loss": 1e-3}}
SECTIONS = {"optimizer": {"clip_norm": 1e3, "eps": 0.1}, "train": {"microbatches": 2}}


def experts_in_a_loop(compute, weights, axes, x_BSD, experts_BSK, weights_BSK, n_experts, formats):
    """What `through_experts` computes, as its definition: every expert computes every token, and few of them count."""
    del compute, axes, formats

    def one(y_BSD, expert):
        share_BS = jnp.sum(jnp.where(experts_BSK == expert, weights_BSK, 0), axis=-1)
        gate_DF, up_DF, down_DF = (weights[f"{name}_DEF"][:, expert] for name in ("gate", "up", "down"))
        hidden_BSF = jax.nn.silu(x_BSD @ gate_DF) * (x_BSD @ up_DF)
        return y_BSD + share_BS[..., None] * (hidden_BSF @ down_DF.T), None

    return jax.lax.scan(one, jnp.zeros_like(x_BSD), jnp.arange(n_experts))[0]


def program_on(mesh, sections=SECTIONS, **model):
    devices = math.prod(size for axis, size in mesh.items() if axis != "context_attention")
    return tiny_program(devices, mesh={"fsdp": 1, **mesh}, **sections, model={"n_layers": 4, "moe": MOE, **model})


def steps(mesh, **model):
    return steps_of(program_on(mesh, **model), 2)


def agree(found, wanted):
    (seen, params), (wanted_seen, wanted_params) = found, wanted
    for (metrics, moment), (wanted_metrics, wanted_moment) in zip(seen, wanted_seen, strict=True):
        for name in ("loss", "z", "grad_norm"):
            assert getattr(metrics, name) == pytest.approx(float(getattr(wanted_metrics, name)), rel=1e-5), name
        for name, mine, other in zip(metrics.routing._fields, metrics.routing, wanted_metrics.routing, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5 if mine.dtype == np.float32 else 0, err_msg=name)
        paths = jax.tree_util.tree_flatten_with_path(wanted_moment)[0]
        for (path, other), mine in zip(paths, jax.tree.leaves(moment), strict=True):
            assert np.abs(mine - other).max() <= 1e-5 * np.abs(other).max() + 1e-12, (jax.tree_util.keystr(path), "gradient")
    for mine, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted_params), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def in_a_loop(compute, **model):
    """What is computed on one device by the plain loop."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(experts, "through_experts", experts_in_a_loop)
        return compute({}, **model)


@pytest.fixture(scope="module")
def reference():
    return in_a_loop(steps)


def name_of(mesh):
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"


LAYOUTS = (
    {},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    *({axis: size} for axis, size in {"data": 4, "fsdp": 4, "context": 4, "tensor": 4, "stage": 4, "expert": 8}.items()),
    *({"expert": 4, axis: 2} for axis in ("data", "fsdp", "context", "tensor", "stage")),
    {"expert": 2, "data": 2, "context": 2},
    {"expert": 2, "fsdp": 2, "context": 2},
    {"expert": 2, "data": 2, "stage": 2},
)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", LAYOUTS, ids=name_of)
def test_every_layout_equals_a_loop_over_experts(mesh, reference):
    agree(steps(mesh), reference)


ROUTERS = {
    "capacity and jitter": {"capacity": 1.0, "jitter": 0.1, "balance_loss": 0.02, "balance_over": "sequence"},
    "groups and biases": {"scores": "sigmoid", "groups": 4, "top_groups": 2, "bias_rate": 0.003},
    "experts choose": {"choice": "expert", "z_loss": 1e-3},
}


def test_a_layout_equals_a_loop_over_experts():
    """With a router that drops tokens and draws noise; in zigzag order, too: room is by the place in the sequence."""

    def compute(mesh):
        return sums_and_gradients(program_on(mesh, {"memory": {"remat": "none"}}, moe={**MOE, "router": ROUTERS["capacity and jitter"]}))

    (sums, gradients), (wanted_sums, wanted) = (
        compute({"expert": 2, "context": 2, "tensor": 2, "context_attention": "gather"}),
        in_a_loop(compute),
    )
    assert wanted_sums.routing.dropped.sum() > 0
    for (path, other), mine in zip(jax.tree_util.tree_flatten_with_path(wanted_sums)[0], jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5 if mine.dtype == np.float32 else 0, err_msg=jax.tree_util.keystr(path))
    for (path, other), mine in zip(jax.tree_util.tree_flatten_with_path(wanted)[0], jax.tree.leaves(gradients), strict=True):
        assert np.abs(mine - other).max() <= 1e-5 * np.abs(other).max() + 1e-12, jax.tree_util.keystr(path)


@pytest.mark.soak
@pytest.mark.parametrize("router", ROUTERS)
def test_any_router_is_the_same_on_a_mesh(router):
    """In zigzag order, too: room is by the place in the sequence."""
    model = {"moe": {**MOE, "n_dense": 1, "router": ROUTERS[router]}}
    wanted = steps({}, **model)
    agree(steps({"expert": 2, "context": 2, "data": 2}, **model), wanted)
    if router == "capacity and jitter":
        assert all(metrics.routing.dropped.sum() > 0 for metrics, _ in wanted[0])
    if router == "groups and biases":
        assert np.any(wanted[1][1]["layers"]["0"]["mlp"]["balancing_E"] != 0)
