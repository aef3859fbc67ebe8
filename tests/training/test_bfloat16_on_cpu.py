"""The default precision on a CPU: no matmul is left to XLA that XLA:CPU may refuse when it runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import first_state, run_steps, tiny_batch, tiny_program

from maxlm.kernels.platform import multiplied

REFUSED = re.compile(r"dot_general.*\(tensor<[\dx]*bf16>, tensor<[\dx]*bf16>\) -> tensor<[\dx]*f32>")
MODELS = {
    "dense": {},
    "experts": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32}},
    "latent": {"n_kv_heads": 8, "latent": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_matmul_of_the_step_reads_bfloat16_and_gives_float32(name):
    """XLA:CPU refuses some of them, by shape and machine: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"."""
    lowered = tiny_program(1, model=MODELS[name], precision={"compute": "bfloat16"}).lower().as_text()
    assert "bf16" in lowered and "dot_general" in lowered
    assert [line for line in lowered.splitlines() if REFUSED.search(line)] == []


def test_a_product_that_xla_refuses_in_bfloat16_runs():
    """Its batch dim comes second in one operand; without the conversion jax 0.10.2 refuses it on every CPU that was tried."""
    left, right = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate([(8, 4, 16), (4, 16, 32)]))
    product = jax.jit(lambda *operands: jnp.einsum("nej,ejl->nel", *multiplied(*operands), preferred_element_type=jnp.float32))(left, right)
    exact = np.einsum("nej,ejl->nel", np.asarray(left, np.float64), np.asarray(right, np.float64))
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def exact():
    """Losses of three steps in float32 on one device."""
    return [float(metrics.loss) for metrics in run_steps(tiny_program(1), 3)[1]]


def test_losses_in_bfloat16_are_those_in_float32_within_its_rounding(exact):
    """Gradients are scattered and reduced once an update, in bfloat16: a pass of XLA:CPU that aborts the process on such sums inside a
    `shard_map` is left out, see `hardware/xla_flags.py`.
    """
    program = tiny_program(4, mesh={"data": 2, "fsdp": 2, "zero": 1}, precision={"compute": "bfloat16"}, train={"microbatches": 2})
    np.testing.assert_allclose([float(metrics.loss) for metrics in run_steps(program, 3)[1]], exact, rtol=5e-3)


def test_hidden_states_are_summed_over_devices_in_bfloat16():
    """In evaluation, which is compiled by itself."""
    program = tiny_program(8, mesh={"data": 2, "fsdp": 2, "tensor": 2}, precision={"compute": "bfloat16"})
    state = first_state(program)
    with jax.set_mesh(program.mesh):
        sums = program.evaluate(state.params, state.model_state, jax.device_put(tiny_batch(), program.batch_sharding))
    assert float(sums.added["loss"] / sums.denominator) == pytest.approx(np.log(128), rel=0.05)
