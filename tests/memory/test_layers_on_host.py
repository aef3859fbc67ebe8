"""Weights and gradients of the layers in host memory (`memory.offload_state`): the same bits as on the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from memory_cases import HOST, equal, run_both
from tiny import tiny_batch, tiny_program

from maxlm.memory.layer_stream import scan_layers
from maxlm.memory.spaces import is_on_host

GRADIENTS, WEIGHTS = HOST | {"gradients": "host"}, HOST | {"weights": "host"}
BOTH = GRADIENTS | WEIGHTS
EXACT = {"optimizer": {"clip_norm": None}}  # the norm is a sum of those of the layers, and differs in the last bits
BFLOAT16, PARTS = {"precision": {"compute": "bfloat16"}}, {"train": {"microbatches": 2}}
HALVES = {"optimizer": {"clip_norm": None, "state": {"moments": "bfloat16", "masters": "split"}}, **BFLOAT16}
LOCAL = {"model": {"n_layers": 5, "layer_pattern": ["local", "local", "global"], "window": 8}}
MOE = {"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64, "router": {"bias_rate": 1e-3}}}}
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("mesh", "sections", "offload"),
    [
        pytest.param({"fsdp": 2}, PARTS | BFLOAT16, BOTH, id="fsdp, microbatches"),
        pytest.param({"fsdp": 1}, BFLOAT16, BOTH, id="one device", marks=SOAK),
        pytest.param({"fsdp": 2}, PARTS, GRADIENTS, id="gradients alone", marks=SOAK),
        pytest.param({"fsdp": 2}, PARTS, WEIGHTS, id="weights alone", marks=SOAK),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {}, BOTH, id="data, fsdp, tensor", marks=SOAK),
        pytest.param({"fsdp": 1, "expert": 2}, MOE, BOTH, id="experts", marks=SOAK),
        pytest.param({"fsdp": 2}, LOCAL, BOTH, id="a pattern and its tail", marks=SOAK),
        pytest.param({"fsdp": 2}, HALVES, BOTH, id="masters in two", marks=SOAK),
    ],
)
def test_three_steps_are_bitwise_those_on_the_device(mesh, sections, offload, cut):
    (plain, seen), (offloaded, seen_there), program = run_both(mesh, EXACT | sections, offload)
    equal(offloaded, plain)
    np.testing.assert_array_equal([m.loss for m in seen_there], [m.loss for m in seen])
    np.testing.assert_allclose([m.grad_norm for m in seen_there], [m.grad_norm for m in seen], rtol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, offloaded) == program.state_shardings
    batch = jax.device_put(tiny_batch(7), program.batch_sharding)
    beside = tiny_program(program.mesh.size, mesh=mesh, **EXACT | sections)
    losses = [losses_of(one, state, batch) for one, state in ((program, offloaded), (beside, plain))]
    equal(*losses)


def losses_of(program, state, batch):
    """Held-out figures."""
    with jax.set_mesh(program.mesh):
        readable = program.placement.readable(state)
        return program.evaluate(readable.params, readable.model_state, batch)


@pytest.mark.soak
def test_clipping_and_a_batch_that_is_not_finite(cut):
    """Clipped gradients differ in the last bits, which Adam enlarges where moments are tiny; a refused update changes nothing."""
    clip = {"optimizer": {"clip_norm": 0.1}}
    (plain, _), (state, _), program = run_both({"fsdp": 2}, clip, BOTH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *map(jax.device_get, (state, plain)))
    before = jax.device_get(state)
    broken = tiny_batch()._replace(weights_BS=tiny_batch().weights_BS * np.nan)
    with jax.set_mesh(program.mesh):
        after, _ = program.step(state, jax.device_put(broken, program.batch_sharding))
    assert int(after.skipped) == 1
    equal((after.params, after.opt_state), (before.params, before.opt_state))


@pytest.mark.parametrize("on_host", [(True, True), (True, False), (False, True)], ids=["both", "weights", "gradients"])
def test_a_streamed_scan_has_the_value_and_the_gradients_of_a_scan(on_host):
    """With weights, with gradients, or with both in host memory; of reports as well, integers among them."""
    w_LDD, b_LD, x_BD = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((5, 8, 8), (5, 8), (3, 8))))

    def layer(x_BD, layer):
        return x_BD + jnp.tanh(x_BD @ layer["w"] + layer["b"]), (jnp.sum(x_BD), jnp.int32(1))

    def loss(scan, w_LDD, b_LD, x_BD):
        y_BD, (sums, _) = scan(layer, x_BD, {"b": b_LD, "w": w_LDD})
        return jnp.sum(y_BD**2) + jnp.sum(sums**2)

    plain = jax.jit(jax.value_and_grad(lambda *a: loss(jax.lax.scan, *a), (0, 1, 2)))(w_LDD, b_LD, x_BD)
    spaces = [jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host" if host else "device") for host in on_host]
    weights, differentiated = (jax.device_put(w_LDD, space) for space in spaces)

    def streamed(weights, *primals):
        scan = partial(scan_layers, weights=[None, weights], specs=[PartitionSpec()] * 2, inputs_on_host=True)
        return jax.value_and_grad(lambda *a: loss(scan, *a), (0, 1, 2))(*primals)

    found = jax.jit(streamed)(weights, differentiated, b_LD, x_BD)
    equal(found, plain)
    assert is_on_host(found[1][0]) == on_host[1]
