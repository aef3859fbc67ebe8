"""Grouped matmul of quantized operands: exact integer sums, float8 against float32, and what a mixture of experts rests on."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.hardware.topologies import parse
from maxlm.kernels import SCALED_ROWS, GradientScales, ProductScales, quantized_grouped_matmul, quantized_weights_gradient
from maxlm.kernels.grouped_matmul import tpu
from tests.kernels.interpreted import interpreted_tpu

# M rows, E experts, K and N what weights map from and to, G = E N, T tiles of rows that share scales

ROWS, DEEP, WIDE, EXPERTS = 1300, 256, 384, 5
SIZES = {"some": (130, 0, 900, 1, 200), "whole": (1024, 0, 0, 88, 0), "few": (1, 0, 1, 1, 1), "none": (0, 0, 0, 0, 0)}
FORMATS = (jnp.int8, jnp.float8_e4m3fn)
IMPLEMENTATIONS = ("xla", "tpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small operands have several: of 256 rows, two of columns."""
    for name, value in {"MOST_ROWS": 256, "MOST_COLUMNS": 256, "SIZES": (256,), "MOST_CYCLES": 384}.items():
        monkeypatch.setattr(tpu, name, value)


def values(random, shape, dtype):
    """Random numbers that the format holds."""
    if dtype == jnp.int8:
        return random.integers(-127, 128, shape).astype(np.int8)
    return np.asarray(jnp.asarray(random.normal(size=shape) * 50, jnp.float32).astype(dtype))


@functools.cache
def operands(dtype, seed=0):
    """(x, w, dout, scales of products by w and by its transpose, scales of the weights' gradient); gradients of e4m3 are e5m2."""
    random = np.random.default_rng(seed)
    tiles = -(-ROWS // SCALED_ROWS)

    def scales(*shape):
        return (0.01 * random.uniform(0.5, 2, shape)).astype(np.float32)

    arrays = [values(random, size, of) for size, of in (((ROWS, DEEP), dtype), ((DEEP, EXPERTS * WIDE), dtype))]
    arrays.append(values(random, (ROWS, WIDE), jnp.float8_e5m2 if dtype == jnp.float8_e4m3fn else dtype))
    by_w, by_transpose = ProductScales(scales(ROWS), scales(EXPERTS, WIDE)), ProductScales(scales(ROWS), scales(EXPERTS, DEEP))
    return *arrays, by_w, by_transpose, GradientScales(scales(tiles, DEEP), scales(tiles, WIDE), np.ones(EXPERTS, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def everything(implementation, given, sizes):
    """(out, dx, dw) in float32."""
    x, w, dout, by_w, by_transpose, of_gradient = given
    options = {"dtype": jnp.float32, "implementation": implementation}
    return (
        quantized_grouped_matmul(x, w, sizes, by_w, **options),
        quantized_grouped_matmul(dout, w, sizes, by_transpose, transposed=True, **options),
        quantized_weights_gradient(x.T, dout, sizes, of_gradient, **options),
    )


def defined(given, sizes):
    """The same by numpy, group by group: sums exact, each multiplied by its scales in float32. Gradients are summed tile by tile."""
    exact = np.int64 if given[0].dtype == np.int8 else np.float64
    x, w, dout = (np.asarray(a).astype(np.float32).astype(exact) for a in given[:3])
    by_w, by_transpose, of_gradient = given[3:]
    out, dx, dw = (np.zeros(shape, np.float32) for shape in ((ROWS, WIDE), (ROWS, DEEP), (EXPERTS, DEEP, WIDE)))
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        mine, rows = w[:, e * WIDE : (e + 1) * WIDE], slice(start, end)
        out[rows] = (x[rows] @ mine).astype(np.float32) * by_w.rows_M[rows, None] * by_w.columns_ED[e]
        dx[rows] = (dout[rows] @ mine.T).astype(np.float32) * by_transpose.rows_M[rows, None] * by_transpose.columns_ED[e]
        for tile in range(len(of_gradient.x_TK)):
            part = slice(max(start, tile * SCALED_ROWS), max(start, min(end, (tile + 1) * SCALED_ROWS)))
            dw[e] += (x[part].T @ dout[part]).astype(np.float32) * of_gradient.x_TK[tile][:, None] * of_gradient.dout_TN[tile]
    return out, dx, dw.swapaxes(0, 1).reshape(DEEP, -1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", FORMATS, ids=["int8", "e4m3"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_exact_arithmetic(implementation, dtype, sizes):
    """Products of int8 to the last bit; a gradient of another float8 format than the weights. Rows beyond all groups and weights of empty
    groups are 0.
    """
    given, sizes = operands(dtype), np.asarray(sizes)
    found = everything(implementation, given, jnp.asarray(sizes))
    for number, (ours, theirs) in enumerate(zip(found, defined(given, sizes), strict=True)):
        if dtype == jnp.int8 and number < 2:
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs).max() + 1e-30)
    out, dx, dw = found
    assert not np.any(out[sizes.sum() :]) and not np.any(dx[sizes.sum() :]), "rows beyond all groups"
    assert not np.any(np.asarray(dw).reshape(DEEP, EXPERTS, WIDE)[:, sizes == 0]), "an empty group's weights"


def test_sums_of_integers_are_exact_beyond_what_float32_holds():
    """127 * 127 * 4,097 is odd and above 2^24: float32 sums would be off."""
    x, w = jnp.full((8, 4097), 127, jnp.int8), jnp.full((4097, 8), 127, jnp.int8)
    scales = ProductScales(jnp.ones(8), jnp.full((1, 8), 2.0**-30))
    run = jax.jit(functools.partial(quantized_grouped_matmul, dtype=jnp.float32, implementation="xla"))
    out = run(x, w, jnp.asarray([8]), scales)
    assert np.all(np.asarray(out) == np.float32(127 * 127 * 4097) * 2.0**-30)


@pytest.mark.parametrize("dtype", FORMATS, ids=["int8", "e4m3"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_of_one_group_changes_no_bit_of_another(implementation, dtype):
    """Scales of the rows of group 2 and of rows beyond all groups are NaN, and so is the scale of group 2's gradient."""
    given, sizes = operands(dtype), np.asarray(SIZES["some"])
    before = everything(implementation, given, jnp.asarray(sizes))
    ends = np.cumsum(sizes)
    poisoned = np.zeros(ROWS, bool)
    poisoned[ends[1] : ends[2]] = poisoned[ends[-1] :] = True
    x, w, dout, by_w, by_transpose, of_gradient = given
    bad = [scales._replace(rows_M=np.where(poisoned, np.nan, scales.rows_M).astype(np.float32)) for scales in (by_w, by_transpose)]
    groups = np.where(np.arange(EXPERTS) == 2, np.nan, 1).astype(np.float32)
    if dtype != jnp.int8:
        x, dout = (np.where(poisoned[:, None], np.asarray(np.nan, a.dtype), a) for a in (x, dout))
    after = everything(implementation, (x, w, dout, *bad, of_gradient._replace(groups_E=groups)), jnp.asarray(sizes))
    for found, was in zip(after[:2], before[:2], strict=True):
        np.testing.assert_array_equal(found[~poisoned], was[~poisoned])
        assert np.all(np.isnan(found[ends[1] : ends[2]])) and not np.any(found[ends[-1] :])
    dw, dw_before = (np.asarray(a).reshape(DEEP, EXPERTS, WIDE) for a in (after[2], before[2]))
    others = np.arange(EXPERTS) != 2
    np.testing.assert_array_equal(dw[:, others], dw_before[:, others])
    assert np.all(np.isnan(dw[:, 2]))


@pytest.mark.soak
def test_tpu_kernels_race_nowhere_and_read_nothing_unwritten(capfd):
    """On less: a tile of rows that three groups share."""
    x, w, dout, by_w, by_transpose, of_gradient = jax.tree.map(jnp.asarray, operands(jnp.int8, seed=1))
    sizes, rows = jnp.asarray((130, 0, 100, 1, 20)), 256
    x, dout, of_gradient = x[:rows], dout[:rows], of_gradient._replace(x_TK=of_gradient.x_TK[:1], dout_TN=of_gradient.dout_TN[:1])
    by_w, by_transpose = (scales._replace(rows_M=scales.rows_M[:rows]) for scales in (by_w, by_transpose))
    given = x, w, dout, by_w, by_transpose, of_gradient
    with interpreted_tpu(capfd):
        found = (
            tpu.product(x, w, sizes, scales=by_w, dtype=jnp.float32, device_kind=""),
            tpu.product(dout, w, sizes, transposed=True, scales=by_transpose, dtype=jnp.float32, device_kind=""),
            tpu.weights_gradient(x.T, dout, sizes, scales=of_gradient, dtype=jnp.float32, device_kind=""),
        )
        jax.block_until_ready(found)
    for ours, plain in zip(found, everything("tpu", given, sizes), strict=True):
        np.testing.assert_array_equal(ours, plain)


CHIPS = [("tpu7x:2x2x1", jnp.float8_e4m3fn)]
SOAK = [
    *(pytest.param(chip, jnp.int8, marks=pytest.mark.soak) for chip in ("v5e:1x1", "v5p:2x2x1", "v6e:1x1")),
    pytest.param("tpu7x:2x2x1", jnp.int8, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("chip", "dtype"), [*CHIPS, *SOAK])
def test_kernels_compile_where_the_format_is_fast(chip, dtype, monkeypatch):
    """All three dots are the kernels', whose operands are of the format."""
    monkeypatch.undo()
    aot = pytest.importorskip("maxlm.compiler.aot")
    rows, experts, deep, wide = 1100, 4, 512, 256
    mesh = Mesh(np.asarray(aot.devices(parse(chip))[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shaped(shape, of=jnp.float32):
        return jax.ShapeDtypeStruct(shape, of, sharding=everywhere)

    tiles = -(-rows // SCALED_ROWS)
    by_w, by_transpose = (ProductScales(shaped((rows,)), shaped((experts, size))) for size in (wide, deep))
    of_gradient = GradientScales(shaped((tiles, deep)), shaped((tiles, wide)), shaped((experts,)))
    arrays = (shaped(size, dtype) for size in ((rows, deep), (deep, experts * wide), (rows, wide)))
    with jax.set_mesh(mesh):
        program = everything.lower(None, (*arrays, by_w, by_transpose, of_gradient), shaped((experts,), jnp.int32)).compile().as_text()
    short = "s8" if dtype == jnp.int8 else "f8e4m3fn"
    calls = [line for line in program.splitlines() if "tpu_custom_call" in line and " custom-call(" in line]
    for name in (tpu.FORWARD, tpu.ROWS, tpu.WEIGHTS):
        (call,) = (line for line in calls if line.strip().startswith((f"%{name}", f"ROOT %{name}")))
        taken = re.findall(r"\b(\w+)\[[\d,]+\]\{", call.split("operand_layout_constraints=")[1])
        assert taken.count(short) == 2, "rows and weights, or rows of both"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": jnp.zeros((8, 4))}, "x float32 and w int8 must both be int8 or both float8"),
        ({"w": jnp.zeros((4, 12), jnp.float8_e4m3fn)}, "x int8 and w float8_e4m3fn must both be"),
        ({"rows": jnp.ones(7)}, "scales rows_M are float32 (7,), not float32 (8,)"),
        ({"columns": jnp.ones((2, 4))}, "scales columns_ED are float32 (2, 4), not float32 (2, 6)"),
        ({"implementation": "hopper"}, "hopper cannot run this: the device is no GPU"),
    ],
)
def test_what_does_not_fit_is_named(change, named):
    given = {
        "x": jnp.zeros((8, 4), jnp.int8),
        "w": jnp.zeros((4, 12), jnp.int8),
        "rows": jnp.ones(8),
        "columns": jnp.ones((2, 6)),
        **change,
    }
    scales = ProductScales(given.pop("rows"), given.pop("columns"))
    with pytest.raises(ValueError, match="grouped_matmul: ") as error:
        quantized_grouped_matmul(
            given.pop("x"), given.pop("w"), jnp.asarray([3, 5]), scales, dtype=jnp.float32, implementation=given.get("implementation")
        )
    assert named in str(error.value)
