"""Quantized rows and columns: the kernels' numbers are those of the definition, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.hardware.topologies import parse
from maxlm.kernels import Quantization, quantize_columns, quantize_rows
from maxlm.kernels.quantize import tpu
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
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad, implementation):
    clean, poisoned = matrix(), matrix().at[3, 5].set(bad)
    (values, scale), (values_before, scale_before) = (quantize_rows(x, form("int8"), implementation) for x in (poisoned, clean))
    others = np.arange(ROWS) != 3
    assert np.isnan(scale[3])
    same((values[others], scale[others]), (values_before[others], scale_before[others]))
    found = quantize_columns(poisoned, form("int8"), TILE, implementation=implementation)
    same(found, quantize_columns(clean.at[3, 5].set(0), form("int8"), TILE, implementation=implementation))


def test_kernels_race_nowhere_and_read_nothing_unwritten(capfd):
    x = matrix()
    with interpreted_tpu(capfd):
        found = (*tpu.quantize_rows(x, form("int8")), *tpu.quantize_columns(x, form("int8"), TILE, transposed=True))
        jax.block_until_ready(found)
    same(found, (*quantize_rows(x, form("int8"), "xla"), *quantize_columns(x, form("int8"), TILE, transposed=True, implementation="xla")))


@pytest.mark.parametrize(("chip", "name"), [("v5e:1x1", "int8"), ("v5p:2x2x1", "int8"), ("v6e:1x1", "int8"), ("tpu7x:2x2x1", "e4m3")])
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
