"""Step time on a CPU by speeds that were measured there: each counts what it is of, and a calibration without them predicts as before."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_prediction import BYTES, FLOPS, measured

from maxlm.base.errors import UserError
from maxlm.cost.calibration import read as read_calibration
from maxlm.cost.prediction import MAPPED_BYTES, _first_touch_s, cpu_chip
from maxlm.cost.step_cost import estimate
from maxlm.hardware.chips import CpuSpeeds, MatmulSpeed, matmul_flops_per_s
from maxlm.hlo.parser import read, with_bounds

OP_S = 1e-6
SPEEDS = CpuSpeeds(
    matmuls=(MatmulSpeed(side=16, flops=1e9), MatmulSpeed(side=64, flops=4e9)),
    transposed_matmuls=(MatmulSpeed(side=16, flops=1e8),),
    transposed_bytes_per_s=1e8,
    fresh_bytes_per_s=5e8,
    function_s=1e-7,
    op_s=OP_S,
)
CHIP = replace(cpu_chip(measured()), cpu=SPEEDS)


def seconds(*lines, chip=CHIP, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule m, is_scheduled=true\n\n{before}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return estimate(read(text), chip, {"data": 1}, {}).total_s


def dot(m, k, n, left=1):
    dims = f"{m},{k}" if left else f"{k},{m}"
    return (
        f"%a = f32[{dims}]{{1,0}} parameter(0)",
        f"%b = f32[{k},{n}]{{1,0}} parameter(1)",
        f"ROOT %d = f32[{m},{n}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{{left}}}, rhs_contracting_dims={{0}}",
    )


def copies(count, elements):
    parameter = f"%c0 = f32[{elements}]{{0}} parameter(0)"
    return parameter, *(f"{'ROOT ' * (i == count)}%c{i} = f32[{elements}]{{0}} copy(%c{i - 1})" for i in range(1, count + 1))


def fusion(body, elements, dims):
    """(a fusion of one parameter of so many numbers, the computation that it calls)"""
    inner = f"%f (p: f32[{dims}]) -> f32[{elements}] {{\n  %p = f32[{dims}]{{1,0}} parameter(0)\n  {body}\n}}\n"
    return (
        f"%a = f32[{dims}]{{1,0}} parameter(0)",
        f"ROOT %r = f32[{elements}]{{0}} fusion(%a), kind=kLoop, calls=%f",
    ), inner


def test_the_fixed_time_counts_for_each_operation_and_bytes_for_each_number():
    assert seconds(*copies(3, 8)) == pytest.approx(3 * (OP_S + 64 / BYTES))
    assert seconds(*copies(1, 2**20)) == pytest.approx(OP_S + 2**23 / BYTES)
    assert seconds(*copies(1, 2**20)) > seconds(*copies(1, 2**19)) > seconds(*copies(1, 2**10))


def test_a_matmul_takes_the_speed_of_its_shortest_side_and_of_how_it_reads():
    flops = 2 * 16 * 512**2
    assert seconds(*dot(512, 16, 512)) == pytest.approx(OP_S + flops / 1e9)
    assert seconds(*dot(16, 512, 512)) == pytest.approx(OP_S + flops / 1e9)
    assert seconds(*dot(512, 16, 512, left=0)) == pytest.approx(OP_S + flops / 1e8)
    assert seconds(*dot(512, 256, 512)) == pytest.approx(OP_S + 2 * 256 * 512**2 / 4e9)


def test_the_speed_between_two_sides_lies_between_theirs():
    assert matmul_flops_per_s(SPEEDS.matmuls, 32) == pytest.approx(2e9)
    assert matmul_flops_per_s(SPEEDS.matmuls, 8) == pytest.approx(5e8)
    assert matmul_flops_per_s(SPEEDS.matmuls, 16) == pytest.approx(1e9)
    assert matmul_flops_per_s(SPEEDS.matmuls, 10**6) == 4e9


def test_functions_and_transposing_copies_take_longer_than_bytes():
    rows, columns = 256, 128
    count = rows * columns
    plain, inner = fusion(f"ROOT %e = f32[{rows},{columns}]{{1,0}} exponential(%p)", count, f"{rows},{columns}")
    assert seconds(*plain, before=inner) == pytest.approx(OP_S + count * SPEEDS.function_s)
    turned = f"ROOT %t = f32[{columns},{rows}]{{1,0}} transpose(%p), dimensions={{1,0}}"
    moving, inner = fusion(turned, count, f"{rows},{columns}")
    assert seconds(*moving, before=inner) == pytest.approx(OP_S + 8 * count / SPEEDS.transposed_bytes_per_s)
    streams = f"ROOT %t = f32[{count // 2},2]{{1,0}} transpose(%p), dimensions={{1,0}}"
    few, inner = fusion(streams, count, f"2,{count // 2}")
    assert seconds(*few, before=inner) == pytest.approx(OP_S + 8 * count / BYTES)


def test_memory_that_the_system_hands_out_anew_counts_once_a_step():
    def step(size):
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=size))

    assert _first_touch_s(step(MAPPED_BYTES), CHIP) == pytest.approx(MAPPED_BYTES / 5e8)
    assert _first_touch_s(step(MAPPED_BYTES - 1), CHIP) == 0.0  # kept by the process
    assert _first_touch_s(step(MAPPED_BYTES), cpu_chip(measured())) == 0.0


def test_without_the_speeds_a_step_is_flops_or_bytes_as_before():
    old = cpu_chip(measured())
    assert old.cpu is None
    assert seconds(*copies(3, 8), chip=old) == pytest.approx(3 * 64 / BYTES)
    assert seconds(*dot(512, 256, 512, left=0), chip=old) == pytest.approx(2 * 256 * 512**2 / FLOPS)


def test_a_loop_that_depends_on_data_turns_as_often_as_its_scope_says():
    loop = """%body (t: (f32[8])) -> (f32[8]) {
  %t = (f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=0
  %y = f32[8]{0} copy(%x)
  ROOT %o = (f32[8]{0}) tuple(%y)
}

%condition (u: (f32[8])) -> pred[] {
  %u = (f32[8]{0}) parameter(0)
  ROOT %v = pred[] custom-call(%u), custom_call_target="v"
}

ENTRY %main (a: f32[8]) -> (f32[8]) {
  %a = f32[8]{0} parameter(0)
  %i = (f32[8]{0}) tuple(%a)
  ROOT %w = (f32[8]{0}) while(%i), condition=%condition, body=%body, metadata={op_name="jit(f)/at_most_7_turns/while"}
}
"""
    module = read(f"HloModule m, is_scheduled=true\n\n{loop}")
    once = estimate(module, CHIP, {"data": 1}, {})
    assert once.unknown_loops == ("w",) and once.total_s > 0
    often = estimate(with_bounds(module), CHIP, {"data": 1}, {})
    assert often.unknown_loops == () and often.total_s == pytest.approx(7 * once.total_s)


def test_files_with_and_without_the_speeds_are_read(tmp_path):
    path, old = tmp_path / "c.json", json.loads(measured().model_dump_json())
    del old["measured"]["cpu"]
    path.write_text(json.dumps(old))
    assert read_calibration(path) == measured()
    old["measured"]["cpu"] = SPEEDS.model_dump(mode="json")
    path.write_text(json.dumps(old))
    assert read_calibration(path).measured.cpu == SPEEDS


@pytest.mark.parametrize(("field", "value"), [("fresh_bytes_per_s", 0), ("op_s", -1), ("matmuls", []), ("function_s", "x"), ("more", 1)])
def test_a_bad_speed_is_refused_in_one_line_that_names_it(tmp_path, field, value):
    path, file = tmp_path / "c.json", json.loads(measured().model_dump_json())
    file["measured"]["cpu"] = {**SPEEDS.model_dump(mode="json"), field: value}
    path.write_text(json.dumps(file))
    with pytest.raises(UserError, match=rf"measured\.cpu\.{field}") as error:
        read_calibration(path)
    assert "\n" not in str(error.value)
