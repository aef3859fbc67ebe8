"""Grouped matmul: every implementation against its definition, and what a mixture of experts rests on."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.hardware.topologies import parse
from maxlm.kernels import grouped_matmul
from maxlm.kernels.grouped_matmul import group_metadata, tpu
from maxlm.kernels.grouped_matmul.reference import grouped_matmul_reference
from maxlm.kernels.grouped_matmul.shapes import SHAPES
from maxlm.kernels.platform import VMEM_BYTES

# M rows, E experts, K and N what weights map from and to, G = E N

ROWS, DEEP, WIDE, EXPERTS = 600, 384, 768, 5
SIZES = {
    "some": (130, 0, 254, 1, 215),  # tiles shared by groups, an empty group, a group of one row
    "whole": (256, 0, 256, 88, 0),  # on borders of tiles
    "one": (0, 0, 600, 0, 0),
    "few": (1, 1, 1, 1, 1),  # rows beyond: tiles that are of no group
    "none": (0, 0, 0, 0, 0),
    "short": (200, 100, 77, 0, 13),
}
SIZES |= {f"random-{seed}": tuple(np.random.default_rng(seed).multinomial(ROWS, np.ones(6) / 6)[:5].tolist()) for seed in range(2)}
IMPLEMENTATIONS = ("xla", "tpu")


def by_group(w_KG, groups):
    """Weights as [E, K, N]."""
    return w_KG.reshape(len(w_KG), groups, -1).swapaxes(0, 1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small operands have many: two tiles of columns, each in a chunk of 256 and one of 128."""
    monkeypatch.setattr(tpu, "MOST_ROWS", 256)
    monkeypatch.setattr(tpu, "MOST_COLUMNS", 384)
    monkeypatch.setattr(tpu, "SIZES", (384,))
    monkeypatch.setattr(tpu, "MOST_CYCLES", 384)
    for choices in (tpu.product_tiles, tpu.weights_tiles):
        assert next(choices(ROWS, DEEP, WIDE, 4, "")) == tpu.Tiles(256, 384, 384, 256)


@functools.cache
def operands(seed=0, dtype=jnp.float32, *, wide=WIDE, transposed=False):
    """x, w side by side, and the gradient of the result."""
    shapes = (*((ROWS, size) for size in ((wide, DEEP) if transposed else (DEEP, wide))), (DEEP, EXPERTS * wide))
    rng = np.random.default_rng(seed)
    x, dout, w = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
    return x, w, dout


def defined(x, w, dout, sizes, transposed=False):
    """(out, dx, dw) by numpy, in float32: a matmul for every group, and 0 beyond all groups."""
    x, w, dout = (np.asarray(a, np.float32) for a in (x, w, dout))
    out, dx, dw_EKN = np.zeros_like(dout), np.zeros_like(x), np.zeros_like(by_group(w, len(sizes)))
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        w_KN, mine = by_group(w, len(sizes))[e], slice(start, end)
        out[mine], dx[mine] = (x[mine] @ w_KN.T, dout[mine] @ w_KN) if transposed else (x[mine] @ w_KN, dout[mine] @ w_KN.T)
        dw_EKN[e] = dout[mine].T @ x[mine] if transposed else x[mine].T @ dout[mine]
    return out, dx, dw_EKN.swapaxes(0, 1).reshape(w.shape)


@functools.partial(jax.jit, static_argnums=(0, 5))
def everything(implementation, x, w, dout, sizes, transposed=False):
    """(out, dx, dw) of an implementation; sizes are not known when it is compiled."""
    out, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, transposed=transposed, implementation=implementation), x, w)
    return out, *pullback(dout)


def equals_definition(implementation, sizes, *, transposed=False, wide=WIDE):
    """Asserts it, and what holds of no row and no group."""
    sizes, given = np.asarray(sizes), operands(wide=wide, transposed=transposed)
    out, dx, dw = found = jax.device_get(everything(implementation, *given, sizes, transposed))
    for ours, theirs in zip(found, defined(*given, sizes, transposed), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    assert not np.any(out[sizes.sum() :]) and not np.any(dx[sizes.sum() :]), "rows beyond all groups"
    assert not np.any(by_group(dw, EXPERTS)[sizes == 0]), "an empty group's weights"


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=[pytest.mark.soak] if name.startswith("random") else [], id=name) for name, sizes in SIZES.items()],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_definition(implementation, transposed, sizes):
    equals_definition(implementation, sizes, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_the_definition_is_a_matmul_for_every_group(transposed):
    """By other means than its own."""
    sizes = np.asarray(SIZES["some"])
    x, w, dout = operands(transposed=transposed)
    out = jax.jit(functools.partial(grouped_matmul_reference, transposed=transposed))(x, w, sizes)
    np.testing.assert_allclose(out, defined(x, w, dout, sizes, transposed)[0], rtol=1e-4, atol=1e-3)


def test_all_pieces_of_a_tile_that_groups_share_count(monkeypatch):
    """Also of the first tile that a group has rows in, where sums begin: here it holds two pieces, as the small tiles of others do not."""
    monkeypatch.setattr(tpu, "MOST_ROWS", 2 * tpu.DEEP_PIECE)
    everything.clear_cache()
    for sizes in ((10, 590, 0, 0, 0), (10, 490, 100, 0, 0), (0, 300, 300, 0, 0)):
        equals_definition("tpu", sizes, wide=384)
    everything.clear_cache()  # others' tiles are small


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_columns_that_are_no_whole_lanes_are_for_xla_alone(transposed):
    """Groups would begin within a tile of the memory's layout."""
    equals_definition("xla", SIZES["some"], transposed=transposed, wide=200)
    x, w, _ = operands(wide=200, transposed=transposed)
    refused = "tpu cannot run this: the 200 columns of a group's weights are no multiple of 128, and groups lie side by side"
    with pytest.raises(ValueError, match=refused):
        grouped_matmul(x, w, jnp.asarray(SIZES["some"]), transposed=transposed, implementation="tpu")
    assert "the 200 columns" in tpu.why_not(ROWS, DEEP, 200, 2, "TPU v6 lite")


def test_bfloat16_is_as_exact_as_xla():
    """Against the definition in float32: off by no more than twice what XLA's own operations are."""
    sizes, rounded = jnp.asarray(SIZES["some"]), operands(1, jnp.bfloat16)
    exact = defined(*rounded, sizes)

    def errors(implementation):
        found = everything(implementation, *rounded, sizes)
        assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
        return [jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b) for a, b in zip(found, exact, strict=True)]

    for ours, plain in zip(errors("tpu"), errors("xla"), strict=True):
        assert 0 < ours < 2 * plain


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.soak), jnp.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_one_group_change_no_bit_of_another(implementation, dtype):
    """Poison the rows of group 2 and those beyond all groups."""
    x, w, dout = operands(2, dtype)
    sizes = jnp.asarray(SIZES["short"])
    ends = np.cumsum(SIZES["short"])
    poisoned = np.zeros(ROWS, bool)
    poisoned[ends[1] : ends[2]] = poisoned[ends[-1] :] = True
    bad_x, bad_dout = (jnp.where(poisoned[:, None], jnp.nan, a) for a in (x, dout))
    (out, dx, dw), before = (everything(implementation, *given, sizes) for given in ((bad_x, w, bad_dout), (x, w, dout)))
    for after, was in ((out, before[0]), (dx, before[1])):
        np.testing.assert_array_equal(after[~poisoned], was[~poisoned])
        assert not np.any(after[ends[-1] :]), "rows beyond all groups give 0 whatever they hold"
        assert np.all(np.isnan(after[ends[1] : ends[2]]))
    others = np.asarray([0, 1, 3, 4])
    np.testing.assert_array_equal(*(by_group(a, EXPERTS)[others] for a in (dw, before[2])))


INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def test_tpu_kernels_race_nowhere_and_read_nothing_unwritten(capfd):
    """In the interpreter that knows DMAs and semaphores; memory that was not written holds NaN. The product that reads transposes copies
    more: the other computes by the same kernel.
    """
    sizes, given = jnp.asarray(SIZES["some"]), operands(3, jnp.bfloat16)
    with pltpu.force_tpu_interpret_mode(INTERPRETED):
        dx = tpu.product(given[2], given[1], sizes, transposed=True, device_kind="")
        dw = tpu.weights_gradient(given[0], given[2], sizes, device_kind="")
        jax.block_until_ready((dx, dw))
    assert "RACE DETECTED" not in capfd.readouterr().out
    for ours, plain in zip((dx, dw), everything("tpu", *given, sizes)[1:], strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_the_interpreter_tells_of_races(capfd):
    """The test above can fail: a copy that is read before it is waited for."""

    def kernel(x_hbm, out_ref, x_ref, arrived):
        copy = pltpu.make_async_copy(x_hbm, x_ref, arrived)
        copy.start()
        out_ref[...] = x_ref[...]
        copy.wait()

    x = jnp.ones((8, 128))
    scratch = [pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA]
    with pltpu.force_tpu_interpret_mode(INTERPRETED):
        run = pl.pallas_call(kernel, out_shape=x, in_specs=[pl.BlockSpec(memory_space=pl.ANY)], scratch_shapes=scratch)
        jax.block_until_ready(run(x))
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("tile", [128, 256])
def test_every_row_is_visited_by_its_group_alone(sizes, tile):
    """Also what nobody runs: visits beyond the last stay inside of arrays."""
    ends = np.cumsum(sizes)
    owner = np.searchsorted(ends, np.arange(ROWS), side="right")  # EXPERTS: of no group
    for of, groups in ((group_metadata.row_visits, EXPERTS + 1), (group_metadata.group_visits, EXPERTS)):
        found = jax.tree.map(np.asarray, vars(of(jnp.asarray(sizes), ROWS, tile)))
        assert found["total"] <= len(found["ranks_V"])
        assert found["tiles_V"].min() >= 0 and found["tiles_V"].max() <= (ROWS - 1) // tile
        seen = np.full(ROWS, -1)
        for rank, at in zip(found["ranks_V"][: found["total"]], found["tiles_V"], strict=False):
            rows = np.arange(max(found["starts_R"][rank], at * tile), min(found["starts_R"][rank + 1], (at + 1) * tile))
            assert (seen[rows] == -1).all()
            seen[rows] = found["groups_R"][rank]
        np.testing.assert_array_equal(seen, np.where(owner < groups, owner, -1))
    assert set(found["ranks_V"][: found["total"]]) == set(range(EXPERTS)), "an empty group is visited, to become 0"


CHIPS = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1")


def lowered(chip, rows, experts, deep, wide, implementation="tpu"):
    """The program of forward and both gradients for a chip that is not there."""
    aot = pytest.importorskip("maxlm.compiler.aot")
    mesh = Mesh(np.asarray(aot.devices(parse(chip))[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    given = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=everywhere) for size in ((rows, deep), (deep, experts * wide), (rows, wide))]
    with jax.set_mesh(mesh):
        return everything.lower(implementation, *given, jax.ShapeDtypeStruct((experts,), jnp.int32, sharding=everywhere))


@pytest.mark.parametrize(
    "chip", ["v5e:1x1", *(pytest.param(chip, marks=pytest.mark.soak) for chip in ("v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"))]
)
@pytest.mark.parametrize(("deep", "wide"), [pytest.param(1024, 768, marks=pytest.mark.soak), (360, 256)])
def test_kernels_compile_for_every_chip(deep, wide, chip, monkeypatch):
    """At depths that are whole lanes and at some that are not; no weights and no gradients of theirs are moved on the way."""
    monkeypatch.undo()
    text = lowered(chip, 2000, 16, deep, wide).compile().as_text()
    assert all(name in text for name in (tpu.FORWARD, tpu.ROWS, tpu.WEIGHTS))
    makers = set(re.findall(rf"= bf16\[(?:{deep},{16 * wide}|{16 * wide},{deep}|16,{deep},{wide}|16,{wide},{deep})\]\S* ([\w-]+)\(", text))
    assert makers <= {"parameter", "custom-call", "copy-done"}, "a copy into VMEM keeps every number's place"


def test_what_a_chip_cannot_run_is_left_to_xla(monkeypatch):
    """gpt-oss: 2,880 columns."""
    monkeypatch.undo()
    assert tpu.FORWARD not in (text := lowered("v6e:1x1", 2048, 4, 2880, 2880, None).as_text()) and "stablehlo.while" in text
    assert tpu.FORWARD in lowered("v6e:1x1", 2048, 4, 2880, 2816, None).as_text()


@pytest.mark.soak
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.skew is None], ids=lambda shape: shape.name)
def test_real_shapes_compile(shape, chip, monkeypatch):
    """The compiler finds room for what the kernels say they need."""
    monkeypatch.undo()
    assert tpu.WEIGHTS in lowered(chip, shape.rows, shape.experts, shape.d_in, shape.d_out).compile().as_text()


@pytest.mark.parametrize("kind", VMEM_BYTES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_real_shapes_fit(shape, kind, monkeypatch):
    monkeypatch.undo()
    assert tpu.why_not(shape.rows, shape.d_in, shape.d_out, 2, kind) == ""
    assert shape.group_sizes().sum() == shape.rows


@pytest.mark.parametrize("kind", VMEM_BYTES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.skew is None], ids=lambda shape: shape.name)
def test_tiles_of_the_weights_gradient_leave_nothing_over(shape, kind, monkeypatch):
    """At real shapes; and a group's columns that few widths divide get narrow tiles, not none."""
    monkeypatch.undo()
    tiles = next(tpu.weights_tiles(shape.rows, shape.d_in, shape.d_out, 2, kind))
    assert shape.d_in % tiles.deep == shape.d_out % tiles.wide == 0
    assert tiles.deep * tiles.wide >= 1024 * min(1024, shape.d_out), "rows are not read often"
    assert next(tpu.weights_tiles(shape.rows, 4096, 128 * 37, 2, kind)).wide == 128
    assert tpu.why_not(shape.rows, 4096, 128 * 37, 2, kind) == ""


def test_what_does_not_fit_into_vmem_is_refused():
    assert tpu.why_not(4096, 4096, 14336, 2, "TPU v6 lite") == ""
    assert "rows of 262144 do not fit into the 50 MiB of VMEM" in tpu.why_not(4096, 1024, 262144, 2, "TPU7x")
    assert "nothing is known of the VMEM of TPU v3" in tpu.why_not(4096, 1024, 1024, 2, "TPU v3")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": jnp.zeros((8, 5))}, "shapes do not fit: x (8, 5) by w (4, 12), 2 groups"),
        ({"transposed": True}, "shapes do not fit: x (8, 4) by the transposes of w (4, 12), 2 groups"),
        ({"x": jnp.zeros((0, 4))}, "nothing to multiply: x (0, 4)"),
        ({"w": jnp.zeros((4, 12), jnp.bfloat16)}, "x float32 and w bfloat16 must both be"),
        ({"sizes": jnp.ones(2)}, "group_sizes are float32, no integers"),
        ({"sizes": jnp.ones(5, jnp.int32)}, "w (4, 12) does not lie side by side for group_sizes (5,)"),
        ({"w": jnp.zeros((2, 4, 6))}, "w (2, 4, 6) does not lie side by side for group_sizes (2,)"),
        ({"sizes": jnp.asarray([7, 2])}, "group_sizes of 2 to 7 rows, 9 in all, for 8 rows"),
        ({"sizes": jnp.asarray([-1, 2])}, "group_sizes of -1 to 2 rows"),
        ({"implementation": "triton"}, "no implementation 'triton': there are tpu, hopper, xla"),
    ],
)
def test_what_does_not_fit_is_named(change, named):
    given = {"x": jnp.zeros((8, 4)), "w": jnp.zeros((4, 12)), "sizes": jnp.asarray([3, 5]), **change}
    with pytest.raises(ValueError, match="grouped_matmul: ") as error:
        grouped_matmul(given.pop("x"), given.pop("w"), given.pop("sizes"), **given)
    assert named in str(error.value)
