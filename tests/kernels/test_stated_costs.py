"""Costs that Pallas kernels state: XLA schedules by them, and programs are priced by them."""

import ast
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

import maxlm.kernels
from maxlm.kernels import Quantization, gated_gradient_rows, gated_rows, quantize_columns, quantize_rows
from tests.kernels.test_matmul_precision import OPERATIONS, TPU

FORM = Quantization(jnp.dtype(jnp.int8), 127.0, 2.0**-100)
X, SCALES = jnp.zeros((1, 256, 512), jnp.bfloat16), jnp.ones(512)
QUANTIZED = {
    "rows": lambda: quantize_rows(X[0], FORM),
    "columns": lambda: quantize_columns(X[0], FORM, 256),
    "gated": lambda: gated_rows(X, X, FORM),
    "gated gradient": lambda: gated_gradient_rows(X, X, X, SCALES, SCALES, FORM, FORM),
}


def stated(operation):
    """Costs of the kernels that an operation runs on a TPU."""

    def kernels(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["cost_estimate"]
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from kernels(inner)

    with jax.sharding.use_abstract_mesh(TPU):
        return list(kernels(jax.make_jaxpr(operation)().jaxpr))


def test_every_call_of_pallas_is_given_a_cost():
    """Ours for TPUs by `pallas_call`, ours for GPUs by the one `kernel` in hopper.py."""
    found = [
        (path.name, call.lineno, {keyword.arg for keyword in call.keywords})
        for path in Path(maxlm.kernels.__file__).resolve().parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pl.pallas_call", "pl.kernel")
    ]
    assert len(found) >= 9
    assert not [(name, line) for name, line, keywords in found if "cost_estimate" not in keywords]


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "splash"] + list(QUANTIZED))
def test_our_kernels_state_arithmetic_and_bytes(operation):
    """Not splash, which is the library's."""
    costs = stated({**OPERATIONS, **QUANTIZED}[operation])
    assert costs
    assert all(cost is not None and cost.flops > 0 and cost.bytes_accessed > 0 for cost in costs)


def test_a_gated_activation_in_8_bits_states_its_work():
    """Forward it reads two arrays in 16 bits and writes one in 8; backward it reads three and writes three, with scales."""
    numbers, rows = X.size, X.shape[1]
    (forward,), (backward,) = (stated(QUANTIZED[name]) for name in ("gated", "gated gradient"))
    assert forward.bytes_accessed == numbers * (2 * 2 + 1) + 4 * rows
    assert backward.bytes_accessed == numbers * (3 * 2 + 3) + 4 * (2 * 512 + 2 * rows)
    assert forward.transcendentals == backward.transcendentals == numbers, "one tanh each"
    assert 5 * numbers < forward.flops < backward.flops < 25 * numbers
