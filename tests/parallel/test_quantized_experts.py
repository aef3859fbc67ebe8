"""Experts with quantized matmuls, and tokens that travel to them in 8 bits: near the exact result, with each expert apart from others."""

from collections import Counter
from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.config.sections.mesh import AXES
from maxlm.config.sections.precision import DispatchConfig
from maxlm.hlo.parser import read
from maxlm.models.feed_forward.dense import gated
from maxlm.models.feed_forward.experts import _compute
from maxlm.parallel.experts import rows_of_round, through_experts
from maxlm.parallel.quantized_rows import RowFormats
from maxlm.precision import expert_weight

B, S, D, E, F, K = 8, 32, 64, 8, 48, 2
AXES_OF = ("embed", "expert", "mlp")
NAMES = ("gate_DEF", "up_DEF", "down_DEF")
SENT, GATHERED = {"expert": 4, "data": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}
INT8, FP8 = QuantizedConfig(format="int8"), QuantizedConfig(format="fp8")


@cache
def operands():
    """Weights; x, router weights and the gradient of the result; the experts of each token."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.2, (D, E, F)).astype(np.float32) for name in NAMES}
    rows = [draw(size=(B, S, wide)).astype(np.float32) for draw, wide in ((rng.normal, D), (rng.uniform, K), (rng.normal, D))]
    return weights, *rows, np.argsort(rng.random((B, S, E)))[..., :K].astype(np.int32)


def outcome(config, formats, weights, x_BSD, weights_BSK, dy_BSD, chosen_BSK):
    """(y, gradients of weights, of x and of router weights)."""

    def run(weights, x_BSD, weights_BSK):
        if config is not None:
            weights = {name: expert_weight(config, w, transposed=name.startswith("down")) for name, w in weights.items()}

        def compute(*given):
            return _compute(partial(gated, "swiglu"), *given)

        return through_experts(compute, weights, dict.fromkeys(NAMES, AXES_OF), x_BSD, chosen_BSK, weights_BSK, E, formats)

    y_BSD, pull = jax.vjp(run, weights, x_BSD, weights_BSK)
    return y_BSD, *pull(dy_BSD)


@cache
def compiled(config, formats, sizes):
    """`outcome` on a mesh of such sizes, compiled."""
    sizes = [dict(sizes).get(axis, 1) for axis in AXES]
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    with jax.set_mesh(mesh):
        return jax.jit(partial(outcome, config, formats)).lower(*operands()).compile()


def found(config=None, mesh=None, formats=RowFormats(), given=None):
    return jax.tree.map(np.asarray, compiled(config, formats, tuple((mesh or {}).items()))(*(given or operands())))


def errors(ours, exact):
    """Norm of the difference of each array, relative to that of the exact one."""
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(*map(jax.tree.leaves, (ours, exact)), strict=True)]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (INT8, 0.03),
        pytest.param(FP8, 0.12, marks=pytest.mark.soak),  # in tiles below
        pytest.param(INT8.model_copy(update={"gradients": "bf16"}), 0.03, marks=pytest.mark.soak),
    ],
    ids=["int8", "fp8", "bf16 back"],
)
def test_results_and_gradients_are_near_the_exact_ones(config, most):
    """Three matmuls in a row: int8 rounds by 0.5% or so each, float8 by 3%."""
    assert all(0.001 < error < most for error in errors(found(config), found()))


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [pytest.param(SENT, id="sent"), pytest.param(GATHERED, id="gathered")])
def test_a_mesh_changes_no_more_than_rounding(mesh):
    """Scales are of whole columns of weights, however these are split; of tiles of rows each device has its own."""
    ours, alone = found(INT8, mesh), found(INT8)
    assert max(errors(ours, alone)) < 0.03
    if "tensor" not in mesh:
        np.testing.assert_allclose(ours[0], alone[0], atol=2e-5 * np.abs(alone[0]).max())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(QuantizedConfig(format="int8", scaling="tensor"), marks=pytest.mark.soak),
        QuantizedConfig(format="fp8", scaling="tile", tile=16),
        pytest.param(QuantizedConfig(format="int8", hadamard=16, stochastic_rounding=True), marks=pytest.mark.soak),
        QuantizedConfig(format="int4", weights_only=True),
    ],
    ids=["tensor", "tile", "hadamard", "weights only"],
)
def test_other_settings_are_near_the_exact_result(config):
    most = 0.25 if config.format == "int4" else 0.12
    assert all(0.001 < error < most for error in errors(found(config), found()))


def test_what_is_not_finite_reaches_no_other_token_and_no_other_expert():
    weights, x_BSD, *rest, chosen_BSK = operands()
    x_BSD = x_BSD.copy()
    x_BSD[2, 3] = np.nan
    poisoned = found(INT8, given=(weights, x_BSD, *rest, chosen_BSK))
    clean = found(INT8)
    others = np.ones((B, S), bool)
    others[2, 3] = False
    np.testing.assert_array_equal(poisoned[0][others], clean[0][others])
    assert np.all(np.isnan(poisoned[0][2, 3])) and np.all(np.isnan(poisoned[2][2, 3]))
    np.testing.assert_array_equal(poisoned[2][others], clean[2][others])
    untouched = ~np.isin(np.arange(E), chosen_BSK[2, 3])
    for name in NAMES:
        after = np.asarray(poisoned[1][name])
        assert np.all(np.isfinite(after[:, untouched])) and np.all(np.isnan(after[:, ~untouched]))


def traffic(program, opcode):
    """Bytes of rows of tokens that a kind of collective moves, by their dtype."""
    ran = [run.op for run in read(program.as_text()).executed() if run.times]
    moved = Counter()
    for op in ran:
        if op.opcode == opcode and op.shapes[0].dims[-1] == D:
            moved[op.shapes[0].dtype] += op.bytes
    return moved


IN_INT8, IN_FP8 = DispatchConfig(format="int8"), DispatchConfig(format="fp8", gradients="e5m2")


@pytest.mark.parametrize(
    ("mesh", "dispatch"),
    [
        pytest.param(SENT, IN_INT8, id="sent-int8"),
        pytest.param(SENT, IN_FP8, id="sent-fp8", marks=pytest.mark.soak),
        pytest.param(GATHERED, IN_INT8, id="gathered-int8", marks=pytest.mark.soak),
        pytest.param(GATHERED, IN_FP8, id="gathered-fp8", marks=pytest.mark.soak),
    ],
)
def test_rows_that_travel_in_8_bits_are_near_the_exact_ones(mesh, dispatch):
    formats = RowFormats(dispatch.element, dispatch.output_element, dispatch.gradient_element)
    most = 0.02 if dispatch.format == "int8" else 0.1
    assert all(error < most for error in errors(found(None, mesh, formats), found()))
    moved = traffic(compiled(None, formats, tuple(mesh.items())), "all-to-all" if mesh is SENT else "all-gather")
    others = 0 if mesh is SENT else 2 * 4 * B * S * D // 4  # x and the gradient of y, gathered over `tensor` in float32
    rows = 4 * rows_of_round(B * S // 8, K, E, 4) if mesh is SENT else 2 * B * S // 2  # there and back, with gradients
    assert (moved["s8"], moved["f32"]) == (rows * D, others)


@pytest.mark.soak
def test_what_stays_in_high_precision_travels_unrounded():
    """Outputs and gradients in the dtype of the rows: only tokens on their way are rounded."""
    formats = RowFormats(rows="int8")
    program = compiled(None, formats, tuple(SENT.items()))
    everything = compiled(None, RowFormats("int8", "int8", "int8"), tuple(SENT.items()))
    assert 4 * traffic(program, "all-to-all")["s8"] == traffic(everything, "all-to-all")["s8"]
    assert traffic(program, "all-to-all")["f32"] == 3 * 4 * traffic(program, "all-to-all")["s8"]
