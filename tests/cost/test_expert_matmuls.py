"""Prices of our grouped matmuls: what the kernel lab counts, by a formula; and how a compiled program's are known."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.cost.efficiency import HBM_SHARE, GroupedMatmul, read
from maxlm.cost.step_cost import estimate
from maxlm.hardware.chips import CHIPS, COUNTED as COUNTED_SPEED, chip_named
from maxlm.hlo import parser
from maxlm.kernel_lab import counted
from maxlm.kernels.grouped_matmul import tpu
from maxlm.kernels.grouped_matmul.shapes import SHAPES

CHIP = {chip.name: chip for chip in CHIPS}
SHAPE = {shape.name: shape for shape in SHAPES}
PARTS = {"forward": "forward", "dx": "by_transpose", "dw": "transposed_dw"}
# Thousand cycles, waits for HBM included: forward, dx, dw. `maxlm kernels report --operation grouped_matmul --shape SHAPE --chip CHIP`.
COUNTED = {
    ("v5e", "mixtral-up-drawn"): (15533, 15597, 16376),
    ("v5e", "qwen3-up-drawn"): (1992, 2019, 2598),
    ("v5e", "deepseek-v3-up-drawn"): (7625, 7565, 7794),
    ("v5e", "deepseek-v2-lite-up-drawn"): (2538, 2537, 3163),
    ("v5p", "mixtral-up-drawn"): (7773, 8039, 8195),
    ("v5p", "qwen3-up-drawn"): (1006, 983, 1300),
    ("v5p", "deepseek-v3-up-drawn"): (3799, 3787, 3885),
    ("v5p", "deepseek-v2-lite-up-drawn"): (2532, 1267, 1602),
    ("v6e", "mixtral-up-drawn"): (4346, 4562, 4955),
    ("v6e", "qwen3-up-drawn"): (838, 836, 1118),
    ("v6e", "deepseek-v3-up-drawn"): (2089, 2117, 2223),
    ("v6e", "deepseek-v2-lite-up-drawn"): (884, 881, 1183),
    ("tpu7x", "mixtral-up-drawn"): (4025, 5440, 4353),
    ("tpu7x", "qwen3-up-drawn"): (504, 542, 898),
    ("tpu7x", "deepseek-v3-up-drawn"): (1965, 1904, 1956),
    ("tpu7x", "deepseek-v2-lite-up-drawn"): (733, 704, 1039),
}


def stated(function, *arguments):
    """Bytes that a kernel says it moves."""

    def kernels(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["cost_estimate"].bytes_accessed
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from kernels(inner)

    (found,) = kernels(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def said(shape, part, chip):
    """Seconds that the formula gives, of HBM at its full bandwidth, which the lab assumes."""
    kind, bf16 = CHIP[chip].device_kinds[0], jnp.bfloat16
    x, dout = (jax.ShapeDtypeStruct((shape.rows, width), bf16) for width in (shape.d_in, shape.d_out))
    w, sizes = jax.ShapeDtypeStruct((shape.d_in, shape.experts * shape.d_out), bf16), jax.ShapeDtypeStruct((shape.experts,), jnp.int32)
    moved = {
        "forward": lambda: stated(lambda *a: tpu.product(*a, device_kind=kind), x, w, sizes),
        "dx": lambda: stated(lambda *a: tpu.product(*a, transposed=True, device_kind=kind), dout, w, sizes),
        "dw": lambda: stated(lambda *a: tpu.weights_gradient(*a, device_kind=kind), x, dout, sizes),
    }[part]()
    matmul = GroupedMatmul(shape.rows, shape.d_in, shape.d_out, shape.experts, PARTS[part])
    return matmul.seconds(CHIP[chip], moved, CHIP[chip].hbm_bytes_per_s / CHIP[chip].devices_per_chip)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("chip", "shape"), [pytest.param(*case, marks=[pytest.mark.soak] if "qwen3" in case[1] or "v3" in case[1] else []) for case in COUNTED]
)
def test_the_formula_says_what_was_counted(chip, shape, part):
    thousands = COUNTED[chip, shape][list(PARTS).index(part)]
    assert said(SHAPE[shape], part, chip) == pytest.approx(1e3 * thousands / chip_named(chip).clock_hz, rel=0.1)


@pytest.mark.soak
@pytest.mark.parametrize(("chip", "shape"), [case for case in COUNTED if "qwen3" not in case[1] and "v3" not in case[1]])
def test_what_was_counted_is_what_the_lab_counts(chip, shape):
    rows = {row.part: row for row in counted.count("grouped_matmul", "tpu", shape, chip)}
    assert [rows[part].total / 1e3 for part in PARTS] == pytest.approx(COUNTED[chip, shape], rel=0.02)
    deep, wide = (-(-side // CHIP[chip].matrix_unit) * CHIP[chip].matrix_unit for side in (SHAPE[shape].d_in, SHAPE[shape].d_out))
    least = 2 * multiplied_rows(SHAPE[shape]) * deep * wide / CHIP[chip].peak_bf16_flops_per_device * chip_named(chip).clock_hz
    assert rows["dw"].matrix * rows["dw"].cycles == pytest.approx(least, rel=0.01), "every piece once"


def multiplied_rows(shape):
    """Rows that the dots of the weights' gradient hold: tiles of one group, pieces of all others."""
    ends, total = np.cumsum(shape.group_sizes()), 0
    for start, end in zip((0, *ends), ends, strict=False):
        for tile in range(start // tpu.MOST_ROWS * tpu.MOST_ROWS, end, tpu.MOST_ROWS):
            low, high = max(start, tile), min(end, tile + tpu.MOST_ROWS)
            total += -(-high // tpu.DEEP_PIECE) * tpu.DEEP_PIECE - low // tpu.DEEP_PIECE * tpu.DEEP_PIECE
    return total


def test_more_groups_cost_more_and_one_costs_no_edge():
    times = [GroupedMatmul(65536, 4096, 2048, groups, "forward").seconds(CHIP["v5p"], 0, 1) for groups in (1, 8, 128)]
    assert times == sorted(times) and times[0] == 2 * 65536 * 4096 * 2048 / CHIP["v5p"].peak_bf16_flops_per_device


def test_columns_that_cores_cannot_share_take_one_of_them_twice_as_long():
    alone, shared = (GroupedMatmul(8192, 2048, wide, 1, "forward").seconds(CHIP["v5p"], 0, 1) for wide in (1408, 2816))
    assert alone == pytest.approx(shared)


CALLS = """HloModule kernels, is_scheduled=true

ENTRY %main () -> bf16[512,1024] {
  %n = s32[] parameter(0)
  %x = bf16[1024,512]{1,0} parameter(1)
  %w = bf16[512,1024]{1,0} parameter(2)
  %f = bf16[1024,256]{1,0} parameter(3)
  %jvp_grouped_matmul_forward_.1 = bf16[1024,256]{1,0} custom-call(%n, %x, %w), COST
  %grouped_matmul_by_transpose.2 = bf16[1024,512]{1,0} custom-call(%n, %f, %w), COST
  %megablox_gmm.3 = bf16[1024,512]{1,0} custom-call(%n, %f, %w), COST
  %grouped_matmul_forward.5 = bf16[1024,256]{1,0} custom-call(%n, %x, %w), EVEN, COST
  ROOT %grouped_matmul_transposed_dw.4 = bf16[512,1024]{1,0} custom-call(%n, %x, %f), COST
}
""".replace(
    "COST",
    'custom_call_target="tpu_custom_call", '
    'backend_config={"cost_estimate":{"flops":"268435456","transcendentals":"0","bytes_accessed":"2621440"}}',
).replace("EVEN", 'metadata={op_name="jit(step)/transpose(jvp(experts_of_900_rows))/pallas_call"}')


def test_kernels_of_a_program_are_known_by_name_and_arrays():
    module = parser.read(CALLS)
    entry = module.computations[module.entry]
    found = [read(op, entry) for op in entry.ops if op.opcode == "custom-call"]
    parts = ("forward", "by_transpose", None, "forward", "transposed_dw")
    rows = (1024, 1024, 1024, 900, 1024)  # of 1,024 that there is room for, an even load fills 900
    assert found == [part and GroupedMatmul(filled, 512, 256, 4, part) for part, filled in zip(parts, rows, strict=True)]


@pytest.mark.parametrize("rows", ["1024,512", "512,1024"], ids=["as they are", "quantized: transposed"])
def test_a_gradient_of_weights_is_read_whichever_way_its_rows_lie(rows):
    module = parser.read(CALLS.replace("%x = bf16[1024,512]", f"%x = s8[{rows}]"))
    entry = module.computations[module.entry]
    (gradient,) = (op for op in entry.ops if "transposed_dw" in op.name)
    assert read(gradient, entry) == GroupedMatmul(1024, 512, 256, 4, "transposed_dw")


def test_ours_are_charged_by_the_formula():
    chip, module = CHIP["v6e"], parser.read(CALLS)
    charged = {op.name: op.seconds for op in estimate(module, chip, {}, {}).top}
    hbm = HBM_SHARE * chip.hbm_bytes_per_s
    for name, part in (("jvp_grouped_matmul_forward_.1", "forward"), ("grouped_matmul_transposed_dw.4", "transposed_dw")):
        assert charged[name] == GroupedMatmul(1024, 512, 256, 4, part).seconds(chip, 2621440, hbm, COUNTED_SPEED)


LIBRARY = """HloModule library, is_scheduled=true

ENTRY %main () -> bf16[4,512,256] {
  %n = s32[5] parameter(0)
  %x = bf16[1024,512]{1,0} parameter(1)
  %w = bf16[4,512,256]{2,1,0} parameter(2)
  %f = bf16[1024,256]{1,0} parameter(3)
  %xt = bf16[512,1024]{1,0} parameter(4)
  %gmm.1 = bf16[1024,256]{1,0} custom-call(%n, %x, %w), COST
  %gmm.2 = bf16[1024,512]{1,0} custom-call(%n, %f, %w), COST
  %gmm.5 = bf16[1024,512]{1,0} custom-call(%n, %f, %x), COST
  ROOT %tgmm.3 = bf16[4,512,256]{2,1,0} custom-call(%n, %xt, %f), COST
}
""".replace(
    "COST",
    'custom_call_target="tpu_custom_call", '
    'backend_config={"cost_estimate":{"flops":"268435456","transcendentals":"0","bytes_accessed":"2621440"}}',
)


def test_grouped_matmuls_of_a_library_have_the_same_formula():
    """One price for everybody: of others' kernels a boundary between groups costs a tile of rows, of ours a piece of it."""
    chip, module = CHIP["v6e"], parser.read(LIBRARY)
    entry = module.computations[module.entry]
    found = {op.name: read(op, entry) for op in entry.ops if op.opcode == "custom-call"}
    assert found == {
        "gmm.1": GroupedMatmul(1024, 512, 256, 4, "forward", ours=False),
        "gmm.2": GroupedMatmul(1024, 256, 512, 4, "forward", ours=False),
        "gmm.5": None,
        "tgmm.3": GroupedMatmul(1024, 512, 256, 4, "transposed_dw", ours=False),
    }
    charged = {op.name: op.seconds for op in estimate(module, chip, {}, {}).top}
    for name in ("gmm.1", "gmm.2", "tgmm.3"):
        assert charged[name] == found[name].seconds(chip, 2621440, HBM_SHARE * chip.hbm_bytes_per_s, COUNTED_SPEED)
        assert found[name].flops == 2 * 1024 * 512 * 256
    ours, theirs = (GroupedMatmul(16384, 4096, 14336, 8, "forward", ours=ours).seconds(chip, 0, 1) for ours in (True, False))
    assert ours < theirs


@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.soak), "v6e"])
def test_a_compiled_program_has_what_is_read(chip):
    """Names and places of arrays are those that the compiler writes."""
    aot = pytest.importorskip("maxlm.compiler.aot")
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxlm.hardware.topologies import parse
    from maxlm.kernels import grouped_matmul

    mesh = Mesh(aot.devices(parse(f"{chip}:1x1"))[:1], ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    x, w, sizes = (
        jax.ShapeDtypeStruct(dims, dtype, sharding=place)
        for dims, dtype in (((1024, 512), jnp.bfloat16), ((512, 4 * 256), jnp.bfloat16), ((4,), jnp.int32))
    )

    def both(x, w, sizes):
        return jax.grad(lambda x, w: grouped_matmul(x, w, sizes).astype(jnp.float32).sum(), argnums=(0, 1))(x, w)

    def every(x, w, sizes):
        return grouped_matmul(x, w, sizes), both(x, w, sizes)

    with jax.set_mesh(mesh):
        module = parser.read(jax.jit(every).lower(x, w, sizes).compile().as_text())
    found = {read(op, computation) for computation in module.computations.values() for op in computation.ops if op.opcode == "custom-call"}
    assert found - {None} == {GroupedMatmul(1024, 512, 256, 4, part) for part in PARTS.values()}


TOKAMAX = """HloModule tokamax, is_scheduled=true

ENTRY %main () -> bf16[128,4096,1536] {
  %n = s32[5] parameter(0)
  %x = bf16[524288,4096]{1,0} parameter(1)
  %w = bf16[128,4096,1536]{2,1,0} parameter(2)
  %f = bf16[524288,1536]{1,0} parameter(3)
  %of_x = f32[524288,128]{1,0} parameter(4)
  %pallas_tpu_ragged_dot_gmm.1 = bf16[524288,1536]{1,0} custom-call(%n, %x, %of_x, %w), COST
  %pallas_tpu_ragged_dot_gmm_transpose_rhs.2 = bf16[524288,4096]{1,0} custom-call(%n, %f, %w), COST
  ROOT %pallas_tpu_ragged_dot_tgmm.3 = bf16[128,4096,1536]{2,1,0} custom-call(%n, %x, %f), COST
}
""".replace(
    "COST",
    'custom_call_target="tpu_custom_call", '
    'backend_config={"cost_estimate":{"flops":"6597069766656","transcendentals":"0","bytes_accessed":"7500000000"}}',
)
# Medians of the times that tokamax' authors measured at this shape on tpu7x, in milliseconds; tools/lab/tokamax_grouped.py reads them.
MEASURED_MS = {"forward": 8.153, "by_transpose": 9.471, "transposed_dw": 9.667}


def test_grouped_matmuls_of_tokamax_take_the_time_that_its_authors_measured():
    chip, module = CHIP["tpu7x"], parser.read(TOKAMAX)
    entry = module.computations[module.entry]
    found = {grouped.part: op.name for op in entry.ops if op.opcode == "custom-call" and (grouped := read(op, entry))}
    charged = {op.name: op.seconds for op in estimate(module, chip, {}, {}).top}
    for part, milliseconds in MEASURED_MS.items():
        assert 1e3 * charged[found[part]] == pytest.approx(milliseconds, rel=0.16)
        assert read(entry.by_name[found[part]], entry).flops == 2 * 524288 * 4096 * 1536


@pytest.mark.parametrize("part", MEASURED_MS)
def test_grouped_matmuls_of_tokamax_gain_less_from_8_bits_than_the_matrix_unit(part):
    """The tiles that it chooses then have 128 rows: pushing weights into the matrix unit takes the time, not the rows."""
    chip, matmul = CHIP["tpu7x"], GroupedMatmul(524288, 4096, 1536, 128, part, ours=False, tokamax=True)
    gain = matmul.speed(chip, "e4m3") / matmul.speed(chip, "bf16")
    assert 1 < gain < chip.matmul_speed("e4m3")
    assert matmul.speed(CHIP["v5p"], "bf16") == COUNTED_SPEED, "not measured there: the count of machine code"
