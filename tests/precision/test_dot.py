"""Quantized matmuls and their gradients, against float32, by hand, and against qwix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.precision import Parts, dequantize, quantize, quantized_weight

# B batch, S sequence, C inputs, O outputs
ROWS, INPUTS = (4, 64), 256
WIDE, NARROW, HEADS = (512,), (128,), (4, 32)

# Relative errors forward, of dx and of dw. qwix 0.1.8: e4m3 with e5m2 gradients 0.036/0.061/0.058, int8 0.010/0.013/0.013, MXFP8
# 0.038/0.042/0.041.
BOUNDS = {
    "int8": ({"format": "int8"}, (0.011, 0.012, 0.014)),
    "int8, one scale": ({"format": "int8", "scaling": "tensor"}, (0.016, 0.016, 0.016)),
    "int8, tiles": ({"format": "int8", "scaling": "tile", "tile": 32}, (0.013, 0.013, 0.013)),
    "int8, rotated": ({"format": "int8", "hadamard": 32}, (0.011, 0.012, 0.014)),
    "int8, bf16 gradients": ({"format": "int8", "gradients": "bf16"}, (0.011, 0.008, 0.008)),
    "fp8": ({"format": "fp8"}, (0.038, 0.061, 0.066)),
    "fp8, one scale": ({"format": "fp8", "scaling": "tensor"}, (0.039, 0.061, 0.061)),
    "fp8, e4m3 gradients": ({"format": "fp8", "gradients": "e4m3"}, (0.038, 0.039, 0.047)),
    "mxfp8": ({"format": "mxfp8"}, (0.039, 0.039, 0.039)),
    "int8 weights": ({"format": "int8", "weights_only": True}, (0.008, 0.008, 1e-6)),
    "int4 weights": ({"format": "int4", "weights_only": True}, (0.14, 0.14, 1e-6)),
}


def operands(outputs, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*ROWS, INPUTS), (INPUTS, *outputs), (*ROWS, *outputs))
    x, w, g = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return x, w * INPUTS**-0.5, g


@partial(jax.jit, static_argnums=(0, 1))
def products(config, parts, x, w, g):
    """(x w, dx, dw), quantized; in float32 without a config."""
    dot = (lambda x, w: quantized_weight(config, w, 0, 1).times(x, parts)) if config else lambda x, w: jnp.tensordot(x, w, 1)
    y, pull = jax.vjp(dot, x, w)
    return y, *pull(g)


def errors(found, exact):
    return [
        float(np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel()))
        for a, b in zip(*map(jax.device_get, (found, exact)), strict=True)
    ]


@pytest.mark.parametrize(("case", "outputs"), [*((case, WIDE) for case in BOUNDS), *((case, HEADS) for case in ("int8, tiles", "fp8"))])
def test_errors_are_those_of_the_format(case, outputs):
    settings, bounds = BOUNDS[case]
    given = operands(outputs)
    found = errors(products(QuantizedConfig(**settings), Parts(), *given), products(None, None, *given))
    assert all(error < bound for error, bound in zip(found, bounds, strict=True)), found
    assert all(error > bound / 3 for error, bound in zip(found, bounds, strict=True) if bound > 1e-3), f"not quantized: {found}"


@pytest.mark.parametrize(
    ("settings", "outputs"),
    [({"format": "int8"}, WIDE), ({"format": "int8", "scaling": "tensor"}, NARROW), ({"format": "fp8"}, HEADS)],
    ids=str,
)
def test_parts_are_quantized_by_themselves(settings, outputs):
    """As on a mesh that cuts all dims: no worse than whole, and what one part holds does not reach the scales of another."""
    config, given = QuantizedConfig(**settings), operands(outputs)
    exact = products(None, None, *given)
    whole, cut = (errors(products(config, parts, *given), exact) for parts in (Parts(), Parts(2, 2, 2, 2)))
    assert all(b < 1.02 * a for a, b in zip(whole, cut, strict=True)), (whole, cut)


def test_forward_and_dx_by_hand():
    """y = sum(q_x q_w) s_x s_w; dx = sum(q_g q_w) s_g, of g s_w."""
    x, w, g = operands(NARROW)
    y, dx, _ = products(QuantizedConfig(format="int8"), Parts(), x, w, g)
    of_x, of_w = quantize(x, "int8", 2), quantize(w, "int8", 0)
    sums = np.einsum("bsc,co->bso", np.asarray(of_x.values, np.int64), np.asarray(of_w.values, np.int64))
    np.testing.assert_allclose(y, sums * np.asarray(of_x.scale) * np.asarray(of_w.scale), rtol=1e-6)
    of_g = quantize(g * of_w.scale, "int8", 2)
    sums = np.einsum("bso,co->bsc", np.asarray(of_g.values, np.int64), np.asarray(of_w.values, np.int64))
    np.testing.assert_allclose(dx, sums * np.asarray(of_g.scale), rtol=1e-6)


def test_a_tile_has_its_own_scale():
    """The sum over tiles of what each gives with its scales, which are powers of two."""
    x, w, g = operands(NARROW)
    y, _, _ = products(QuantizedConfig(format="fp8", scaling="tile", tile=64), Parts(), x, w, g)
    tiles = [
        dequantize(quantize(x[..., at : at + 64], "e4m3", 2, power_of_two=True))
        @ dequantize(quantize(w[at : at + 64], "e4m3", 0, power_of_two=True))
        for at in range(0, INPUTS, 64)
    ]
    np.testing.assert_allclose(y, sum(tiles), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_column_of_zeros_learns(outputs):
    """Its scale is folded into gradients, which must not vanish."""
    x, w, g = operands(outputs)
    exact = products(None, None, x, w.at[:, 3].set(0.0), g)[2]
    found = products(QuantizedConfig(format="int8"), Parts(), x, w.at[:, 3].set(0.0), g)[2]
    assert errors([found[:, 3]], [exact[:, 3]])[0] < 0.05


@pytest.mark.parametrize("outputs", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("case", ["int8", "fp8", "int8, one scale"])
def test_zeros_cost_the_others_nothing(case, outputs):
    """Tokens without input or without gradient, as the first one's query has none, and columns of weights. Their scale is folded into
    numbers that share one with the others, and once made all of these vanish.
    """
    settings, bounds = BOUNDS[case]
    x, w, g = operands(outputs)
    x, w, g = x.at[:, 5].set(0.0), w.at[:, 3].set(0.0), g.at[:, 0].set(0.0)
    scale = 1e-6  # of gradients in training: far from the scale of zeros
    found = errors(products(QuantizedConfig(**settings), Parts(), x, w, scale * g), products(None, None, x, w, scale * g))
    assert all(error < 1.1 * bound for error, bound in zip(found, bounds, strict=True)), found


def test_rotation_spreads_outliers():
    """A channel of activations a hundred times larger than the others takes all of int8's values for itself, until it is spread."""
    x, w, g = operands(NARROW)
    x = x.at[..., 7].mul(100.0)
    w = w.at[7].mul(0.01)
    exact = products(None, None, x, w, g)
    plain, rotated = (errors(products(QuantizedConfig(format="int8", hadamard=size), Parts(), x, w, g), exact) for size in (None, 256))
    assert rotated[0] < plain[0] / 3, (plain, rotated)


def test_stochastic_rounding_has_no_bias():
    """The mean gradient over many tokens of equal gradients, each rounded by itself, is nearer to the exact one."""
    x, w, g = operands(NARROW)
    g = jnp.broadcast_to(g[:1, :1] + 1e-3 * g, g.shape)
    exact = products(None, None, x, w, g)[1].mean((0, 1))
    nearest, stochastic = (
        errors([products(QuantizedConfig(format="fp8", stochastic_rounding=on), Parts(), x, w, g)[1].mean((0, 1))], [exact])[0]
        for on in (False, True)
    )
    assert stochastic < nearest / 2, (nearest, stochastic)


def test_not_finite_gradients_are_seen():
    x, w, g = operands(NARROW)
    _, dx, dw = products(QuantizedConfig(format="int8"), Parts(), x, w, g.at[0, 0, 0].set(jnp.nan))
    assert not np.isfinite(dx[0, 0]).any() and not np.isfinite(dw[:, 0]).any()


def test_sums_that_int32_may_not_hold_are_refused():
    config, tokens = QuantizedConfig(format="int8"), 2**18
    x, w = jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    gradient = jax.grad(lambda w, x, parts: quantized_weight(config, w, 0, 1).times(x, parts).sum())
    with pytest.raises(AssertionError, match="int32"):
        jax.eval_shape(partial(gradient, parts=Parts()), w, x)
    jax.eval_shape(partial(gradient, parts=Parts(seq=2)), w, x)


@pytest.mark.parametrize("settings", [{"format": "int8"}, {"format": "fp8"}], ids=str)
def test_operands_of_every_matmul_are_of_the_format(settings):
    """Three matmuls, none in another dtype."""
    x, w, g = operands(WIDE)
    text = products.lower(QuantizedConfig(**settings), Parts(), x, w, g).as_text()
    dots = [line.split(":")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    wanted = "xi8>" if settings["format"] == "int8" else "xf8E"
    assert len(dots) == 3 and all(dot.split("->")[0].count(wanted) == 2 for dot in dots), dots


@pytest.mark.parametrize("settings", [{"format": "int8"}, {"format": "fp8"}, {"format": "mxfp8"}], ids=str)
def test_as_near_as_qwix(settings):
    """Its quantized dot is an oracle for the size of errors. Forward it rounds the same numbers. In the gradient it has one rounding less
    than we have for int8's dw, whose inputs are rounded a second time, and for mxfp8, of which it rounds the gradient alone.
    """
    qwix = pytest.importorskip("qwix._src.core.dot_general_qt", reason="qwix is an optional oracle")
    forward = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "mxfp8": "mxfp8"}[settings["format"]]
    backward = {"int8": jnp.int8, "fp8": jnp.float8_e5m2, "mxfp8": "mxfp8"}[settings["format"]]
    types = {"lhs_qtype": forward, "rhs_qtype": forward, "dlhs_grad_qtype": backward, "drhs_grad_qtype": backward}
    tiles = dict.fromkeys(("tile_size", "dlhs_tile_size", "drhs_tile_size"), 32) if settings["format"] == "mxfp8" else {}
    options = qwix.DotGeneralQtConfig(**types, **tiles)
    given = operands(WIDE)
    exact = products(None, None, *given)
    y, pull = jax.vjp(lambda x, w: qwix.dot_general_qt(x, w, (((2,), (0,)), ((), ())), options), *given[:2])
    theirs, ours = errors((y, *pull(given[2])), exact), errors(products(QuantizedConfig(**settings), Parts(), *given), exact)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0.01)
    assert all(a < 1.45 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
