"""Quantized rows and columns: the kernels' numbers are those of the definition, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.hardware.topologies import parse
from maxlm.kernels import Quantization, gated_gradient_rows, gated_rows, quantize_columns, quantize_rows
from maxlm.kernels.quantize import exact_sums, largest_magnitude, tpu
from maxlm.precision import FORMATS, quantize
from tests.kernels.interpreted import interpreted_tpu

ROWS, WIDE, TILE = 300, 256, 256


def form(name):
    return Quantization(FORMATS[name].dtype, FORMATS[name].largest, 2.0**-100)


def matrix():
    """Magnitudes differ by row and by column; a row and a column are 0."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, WIDE)) * 10.0 ** random.uniform(-3, 3, (ROWS, 1)) * 2.0 ** random.uniform(-3, 3, WIDE)
    x[7] = x[:, 9] = 0
    return jnp.asarray(x, jnp.bfloat16)


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(mine).astype(np.float32), np.asarray(other).astype(np.float32))


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
def test_the_largest_magnitude_of_numbers_that_are_not_all_finite_is_infinite(odd):
    x = np.float32([[1, -3, 0, 2.5], [-0.0, 0, 0, 0], [1e38, odd, -3e38, 1e-45], [2e-45, -3e-45, 0, 0]])
    found = jax.jit(largest_magnitude, static_argnums=1)(x, 1)
    np.testing.assert_array_equal(found, np.float32([[3], [0], [np.inf], [3e-45]]))
    assert jax.jit(largest_magnitude, static_argnums=1)(x, None) == np.inf


def test_a_gpu_writes_sums_of_fp8_as_what_becomes_of_them(monkeypatch):
    """bfloat16 has the range of float32: no sum of finite numbers becomes infinite. Integers, and float16, stay exact."""

    def written(operands, result):
        x = jnp.ones((16, 16), operands)
        jaxpr = jax.make_jaxpr(lambda x: exact_sums(x, x, ((1,), (0,)), dtype=result))(x)
        (dot,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general")
        assert jaxpr.out_avals[0].dtype == jnp.float32
        return dot.params["preferred_element_type"]

    fp8 = jnp.float8_e4m3fn
    assert written(fp8, jnp.bfloat16) == jnp.float32
    monkeypatch.setattr("maxlm.kernels.quantize.reference.device", lambda: ("cuda", "NVIDIA H200"))
    assert written(fp8, jnp.bfloat16) == jnp.bfloat16
    assert written(fp8, jnp.float16) == written(fp8, jnp.float32) == jnp.float32
    assert written(jnp.int8, jnp.bfloat16) == jnp.int32


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_kernels_equal_the_definition(name):
    x = matrix()
    rows = quantize_rows(x, form(name), "xla")
    expected = quantize(x, name, 1)
    same(rows, (expected.values, expected.scale[:, 0]))
    same(quantize_rows(x, form(name), "tpu"), rows)
    for transposed in (False, True):
        columns = quantize_columns(x, form(name), TILE, transposed=transposed, implementation="xla")
        same(quantize_columns(x, form(name), TILE, transposed=transposed, implementation="tpu"), columns)
        values = np.asarray(columns[0]).astype(np.float32)
        first = quantize(x[:TILE], name, 0)
        same(((values.T if transposed else values)[:TILE], columns[1][0]), (first.values, first.scale[0]))


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_what_is_not_finite_stays_in_its_row(implementation):
    clean, poisoned = matrix(), np.asarray(matrix()).copy()
    bad = [3, 50, 299]
    poisoned[bad, 5] = np.nan, np.inf, -np.inf
    poisoned, silent = jnp.asarray(poisoned), np.isin(np.arange(ROWS), bad)[:, None] & (np.arange(WIDE) == 5)
    (values, scale), (values_before, scale_before) = (quantize_rows(x, form("int8"), implementation) for x in (poisoned, clean))
    others = ~np.isin(np.arange(ROWS), bad)
    assert np.isnan(np.asarray(scale)[bad]).all()
    same((values[others], scale[others]), (values_before[others], scale_before[others]))
    found = quantize_columns(poisoned, form("int8"), TILE, implementation=implementation)
    same(found, quantize_columns(jnp.where(silent, 0, clean), form("int8"), TILE, implementation=implementation))


def test_kernels_race_nowhere_and_read_nothing_unwritten(capfd):
    x = matrix()
    with interpreted_tpu(capfd):
        found = (*tpu.quantize_rows(x, form("int8")), *tpu.quantize_columns(x, form("int8"), TILE, transposed=True))
        jax.block_until_ready(found)
    same(found, (*quantize_rows(x, form("int8"), "xla"), *quantize_columns(x, form("int8"), TILE, transposed=True, implementation="xla")))


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("v5e:1x1", "int8"),
        *(pytest.param(chip, "int8", marks=pytest.mark.soak) for chip in ("v5p:2x2x1", "v6e:1x1")),
        ("tpu7x:2x2x1", "e4m3"),
    ],
)
def test_kernels_compile_where_the_format_is_fast(chip, name):
    aot = pytest.importorskip("maxlm.compiler.aot")
    mesh = Mesh(np.asarray(aot.devices(parse(chip))[:1]), ("x",))
    x = jax.ShapeDtypeStruct((2000, 1408), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def run(x):
        return quantize_rows(x, form(name)), [quantize_columns(x, form(name), 1024, transposed=turned) for turned in (False, True)]

    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(x).compile().as_text()
    assert text.count(f'"{tpu.ROWS}"') or tpu.ROWS in text
    assert tpu.COLUMNS in text


def test_what_the_kernels_cannot_run_is_said():
    with pytest.raises(ValueError, match="quantize: tpu cannot run this: 200 columns are no multiple of 128"):
        quantize_rows(jnp.ones((8, 200)), form("int8"), "tpu")
    assert tpu.why_not((8, 128), jnp.float8_e4m3fn, "TPU v5") == "TPU v5 does not convert to float8_e4m3fn"
    assert "too long" in tpu.why_not((8, 1 << 16), jnp.int8, "TPU v5")


# --- what a gated activation makes

GATED = {"int8": ("int8", "int8"), "fp8": ("e4m3", "e5m2")}


def gated_operands(rows=128, wide=256):
    random = np.random.default_rng(1)
    dhidden, gate, up = (random.normal(size=(1, rows, wide)) * 10.0 ** random.uniform(-1, 1, (rows, 1)) for _ in range(3))
    gate[0, 5] = up[0, 5] = dhidden[0, 5] = 0
    scales = 2.0 ** random.uniform(-9, -5, (2, wide))
    return (*(jnp.asarray(x, jnp.bfloat16) for x in (dhidden, gate, up)), *jnp.asarray(scales, jnp.float32))


def near(ours, theirs):
    """Scales agree to rounding; values, that the two round differently where they are within it, to one step."""
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        mine, other = (np.asarray(x).astype(np.float32) for x in (mine, other))
        np.testing.assert_allclose(mine, other, rtol=0.26 if mine.shape[-1] > 1 else 1e-5, atol=1)
        assert mine.shape[-1] == 1 or np.mean(mine != other) < 0.02  # 0.001 of integers


@pytest.mark.parametrize(("name", "activation"), [("int8", "silu"), ("fp8", "gelu")])
def test_gated_kernels_equal_the_definition(name, activation):
    of_units, of_gradients = map(form, GATED[name])
    dhidden, gate, up, *scales = gated_operands()
    near(*(gated_rows(gate, up, of_units, activation=activation, implementation=one) for one in ("tpu", "xla")))
    operands = dhidden, gate, up, *scales, of_units, of_gradients
    near(*(gated_gradient_rows(*operands, activation=activation, implementation=one) for one in ("tpu", "xla")))


def test_gradients_of_gate_and_up_by_hand():
    """Times the scales of the columns; one scale for both rows."""
    dhidden, gate, up, *scales = gated_operands()
    (values, scale), (dgate, dup, of_rows) = gated_gradient_rows(dhidden, gate, up, *scales, form("int8"), form("int8"))
    d, g, u = (np.asarray(x, np.float64)[0] for x in (dhidden, gate, up))
    sigmoid = 1 / (1 + np.exp(-g))
    exact = d * u * sigmoid * (1 + g * (1 - sigmoid)) * np.asarray(scales[0]), d * g * sigmoid * np.asarray(scales[1])
    largest = np.maximum(*(np.abs(x).max(1) for x in exact))
    np.testing.assert_allclose(np.asarray(of_rows)[0, :, 0], np.where(largest == 0, 2.0**-100, largest / 127), rtol=1e-5)
    for found, x in zip((dgate, dup), exact, strict=True):
        np.testing.assert_allclose(np.asarray(found)[0] * np.asarray(of_rows)[0], x, atol=0.51 * largest.max() / 127, rtol=0)
        assert np.all(np.abs(np.asarray(found)[0] * np.asarray(of_rows)[0] - x) <= 0.51 * np.asarray(of_rows)[0])
    np.testing.assert_allclose(np.asarray(values)[0] * np.asarray(scale)[0], g * sigmoid * u, atol=0.51 * float(scale.max()))


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gated_rows_that_are_not_finite_stay_alone(bad, implementation):
    dhidden, gate, up, *scales = gated_operands()
    at = {"implementation": implementation}
    poisoned = gated_gradient_rows(dhidden.at[0, 3, 7].set(bad), gate, up, *scales, form("int8"), form("int8"), **at)
    clean = gated_gradient_rows(dhidden, gate, up, *scales, form("int8"), form("int8"), **at)
    assert np.isnan(poisoned[1][2][0, 3, 0])
    others = np.arange(128) != 3
    for mine, other in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[0, others], np.asarray(other)[0, others])
    assert np.isnan(gated_rows(gate.at[0, 3, 7].set(bad), up, form("int8"), **at)[1][0, 3, 0])


@pytest.mark.parametrize(("chip", "name"), [("v5e:1x1", "int8"), ("tpu7x:2x2x1", "fp8")])
def test_gated_kernels_compile_where_the_format_is_fast(chip, name):
    aot = pytest.importorskip("maxlm.compiler.aot")
    mesh = Mesh(np.asarray(aot.devices(parse(chip))[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    x, scales = jax.ShapeDtypeStruct((1, 256, 512), jnp.bfloat16, sharding=place), jax.ShapeDtypeStruct((512,), jnp.float32, sharding=place)
    of_units, of_gradients = map(form, GATED[name])

    def run(x, scales):
        return gated_rows(x, x, of_units), gated_gradient_rows(x, x, x, scales, scales, of_units, of_gradients)

    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(x, scales).compile().as_text()
    assert text.count("quantize_gated_gradient") and text.count("tpu_custom_call") == 2
