"""The reader of compiled programs: what it says of real programs, and what it refuses."""

from pathlib import Path

import pytest

from maxlm.base.errors import UserError
from maxlm.hlo import parser
from maxlm.hlo.replica_groups import axes_of, axes_of_pairs, device_groups

PROGRAMS = Path(__file__).parent / "programs"
MESH = (("data", 2), ("fsdp", 2), ("tensor", 2))


def program(name: str) -> parser.Module:
    return parser.read((PROGRAMS / f"{name}.hlo").read_text())


def test_a_loop_multiplies_what_it_holds():
    times = {run.op.name: run.times for run in program("kernels").executed()}
    assert times["flash_attention_fwd.3"] == 5
    assert times["convolution_tanh_fusion.2"] == 5 * 3


def test_cycles_are_those_of_every_turn():
    module = program("kernels")
    assert module.cycles(module.entry) == sum(run.times * (run.op.cycles or 0) for run in module.executed())
    (inner,) = {run.computation for run in module.executed() if run.op.name == "convolution_tanh_fusion.2"}
    (outer,) = {run.computation for run in module.executed() if run.op.name == "flash_attention_fwd.3"}
    own = sum(op.cycles or 0 for op in module.computations[outer].ops)
    assert module.cycles(outer) == own + 3 * module.cycles(inner) > own > 0


def test_a_fusion_runs_and_what_it_holds_does_not():
    ran = {run.op.opcode for run in program("kernels").executed()}
    assert "fusion" in ran
    assert "convolution" not in ran


def test_a_kernel_states_its_cost_or_nothing():
    kernels = [run.op for run in program("kernels").executed() if run.op.target == "tpu_custom_call"]
    assert [op.stated for op in kernels] == [parser.CostEstimate(123456789012, 4567), None]
    assert kernels[0].where.endswith("flash_attention_fwd/pallas_call")


def test_shapes_say_type_dims_and_memory():
    (start,) = [run.op for run in program("offload").executed() if run.op.opcode == "dynamic-update-slice-start"]
    assert start.shapes[0] == parser.Shape("bf16", (6, 4096, 2048), parser.HOST)
    assert start.shapes[1].bytes == 4096 * 2048 * 2
    assert parser.Shape("s4", (3,)).bytes == 2
    assert parser.Shape("f8e4m3fn", (3,)).bytes == 3


@pytest.mark.parametrize("name", ["offload", "sparsecore", "exchanges"])
def test_every_done_finds_its_start(name):
    module = program(name)
    dones = [run for run in module.executed() if run.op.opcode.endswith("-done")]
    assert dones
    for run in dones:
        start = module.computations[run.computation].by_name[run.op.start]
        assert start.opcode.removesuffix("-start") == run.op.opcode.removesuffix("-done")


def test_what_another_core_runs_is_known_as_asynchronous():
    module = program("sparsecore")
    started = {callee for run in module.executed() if run.op.opcode.endswith("-start") for callee in module.called(run.op)}
    offloaded = [run for run in module.executed() if run.computation in started]
    assert {run.op.opcode for run in offloaded} >= {"all-gather", "reduce-scatter"}
    assert all(run.times == 4 for run in offloaded)


def test_an_absurd_estimate_is_none():
    text = (PROGRAMS / "kernels.hlo").read_text()
    assert '"estimated_cycles":"' in text
    absurd = parser.read(text.replace('"estimated_cycles":"', f'"estimated_cycles":"{2**60}'))
    assert absurd.cycles(absurd.entry) == 0


def test_a_stated_trip_count_comes_before_the_condition():
    text = (PROGRAMS / "kernels.hlo").read_text()
    lines = [line + ', backend_config={"known_trip_count":{"n":"7"}}' if " while(" in line else line for line in text.splitlines()]
    times = {run.op.name: run.times for run in parser.read("\n".join(lines)).executed()}
    assert times["convolution_tanh_fusion.2"] == 49


LOOP = """HloModule loop, is_scheduled=true

%body (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p = (f32[8]{0}, s32[]) parameter(0)
  %value = f32[8]{0} get-tuple-element(%p), index=0
  %count = s32[] get-tuple-element(%p), index=1
  %turn = f32[8]{0} negate(%value)
  %step = s32[] constant(STEP)
  %next = s32[] add(%count, %step)
  ROOT %result = (f32[8]{0}, s32[]) tuple(%turn, %next)
}

%ends (p: (f32[8], s32[])) -> pred[] {
  %p = (f32[8]{0}, s32[]) parameter(0)
  %count = s32[] get-tuple-element(%p), index=1
  %limit = s32[] constant(32)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

ENTRY %main () -> () {
  %zero = f32[8]{0} parameter(0)
  %first = s32[] START
  %copied = s32[] copy(%first)
  %state = (f32[8]{0}, s32[]) tuple(%zero, %copied)
  ROOT %loop = (f32[8]{0}, s32[]) while(%state), condition=%ends, body=%body
}
"""


@pytest.mark.parametrize(
    ("start", "step", "turns"),
    [("constant(0)", 1, 32), ("constant(1)", 1, 31), ("constant(0)", 2, 16), ("constant(1)", 2, 16), ("constant(-1)", 2, 17)],
)
def test_a_loop_turns_from_where_its_counter_starts_by_its_steps(start, step, turns):
    times = {run.op.name: run.times for run in parser.read(LOOP.replace("START", start).replace("STEP", str(step))).executed()}
    assert times["turn"] == turns


def test_where_the_counter_starts_is_not_guessed():
    module = parser.read(LOOP.replace("START", "parameter(1)").replace("STEP", "1"))
    assert next(run.op for run in module.executed() if run.op.opcode == "while").trips is None


FUSED = """HloModule fused, is_scheduled=true

%begins () -> s32[] {
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  ROOT %first = s32[] add(%one, %two)
}

%adds (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%p, %one)
}

%compares (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(15)
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %value = f32[8]{0} get-tuple-element(%p), index=1
  %count = s32[] get-tuple-element(%p), index=0
  %copied = s32[] copy(%count)
  %turn = f32[8]{0} negate(%value)
  %next = s32[] fusion(%copied), kind=kLoop, calls=%adds
  ROOT %result = (s32[], f32[8]{0}) tuple(%next, %turn)
}

%ends (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] fusion(%count), kind=kLoop, calls=%compares
}

ENTRY %main () -> () {
  %value = f32[8]{0} parameter(0)
  %first = s32[] fusion(), kind=kLoop, calls=%begins
  %state = (s32[], f32[8]{0}) tuple(%first, %value)
  ROOT %loop = (s32[], f32[8]{0}) while(%state), condition=%ends, body=%body
}
"""


@pytest.mark.parametrize(
    ("written", "instead", "turns"),
    [
        ("", "", 12),
        ("direction=LT", "direction=LE", 13),
        ("compare(%p, %limit), direction=LT", "compare(%limit, %p), direction=GT", 12),
        ("constant(2)", "constant(4)", 10),
    ],
)
def test_a_count_is_found_inside_fusions(written, instead, turns):
    """As XLA for GPUs writes a loop over microbatches, the first of which it takes out; with `known_trip_count` missing."""
    module = parser.read(FUSED.replace(written, instead))
    assert {run.op.name: run.times for run in module.executed()}["turn"] == turns


def test_a_start_that_a_loop_around_it_carries_along_is_known():
    outer = LOOP.partition("ENTRY")[0].replace("STEP", "1").replace("HloModule loop, is_scheduled=true", "")
    outer = outer.replace("%body ", "%outer ").replace("%ends ", "%stops ").replace("(f32[8], s32[])", "(f32[8], s32[], s32[])")
    outer = outer.replace("(f32[8]{0}, s32[])", "(f32[8]{0}, s32[], s32[])").replace("tuple(%turn, %next)", "tuple(%turn, %next, %kept)")
    inner = """  %kept = s32[] get-tuple-element(%p), index=2
  %state = (f32[8]{0}, s32[]) tuple(%value, %kept)
  %loop = (f32[8]{0}, s32[]) while(%state), condition=%ends, body=%body
  %turn ="""
    text, entry = LOOP.replace("STEP", "1").replace("START", "constant(0)").split("ENTRY")
    entry = entry.replace("(f32[8]{0}, s32[])", "(f32[8]{0}, s32[], s32[])").replace("tuple(%zero, %copied)", "tuple(%zero, %copied, %two)")
    entry = entry.replace("%copied =", "%two = s32[] constant(2)\n  %copied =").replace("=%ends, body=%body", "=%stops, body=%outer")
    module = parser.read(text + outer.replace("  %turn =", inner) + "ENTRY" + entry)
    assert {run.computation: run.times for run in module.executed() if run.op.name == "turn"} == {"outer": 32, "body": 32 * 30}


CONDITIONAL = """HloModule choice, is_scheduled=true

%short () -> () {
  ROOT %a = f32[8]{0} negate(%p), backend_config={"estimated_cycles":"10"}
}

%long () -> () {
  ROOT %b = f32[8]{0} negate(%p), backend_config={"estimated_cycles":"30"}
}

ENTRY %main () -> () {
  %which = s32[] parameter(0)
  ROOT %c = f32[8]{0} conditional(%which), branch_computations={%short, %long}
}
"""


def test_of_a_conditional_the_longer_branch_counts():
    module = parser.read(CONDITIONAL)
    assert [run.op.name for run in module.executed()] == ["which", "c", "b"]
    assert module.cycles(module.entry) == 30


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.hlo")))
def test_a_program_cut_anywhere_is_refused_or_whole(name):
    """No prefix of a program is read as a smaller program."""
    text = (PROGRAMS / f"{name}.hlo").read_text().rstrip()
    for cut in range(0, len(text) - 1, 997):
        with pytest.raises(UserError, match=r"cut short|incomplete|damaged|no compiled program|not scheduled"):
            parser.read(text[:cut])


@pytest.mark.parametrize("text", ["", "garbage", "HloModule jit_f\n\nENTRY %main () -> () {\n}\n", '{"a": 1}', "\x00" * 100])
def test_what_is_no_scheduled_program_is_refused_in_one_line(text):
    with pytest.raises(UserError) as refused:
        parser.read(text)
    assert "\n" not in str(refused.value)


def test_a_call_to_nothing_is_refused():
    with pytest.raises(UserError, match="main calls long, which"):
        parser.read(CONDITIONAL.replace("%long ()", "%other ()"))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),  # of 8 = 2 x 2 x 2, the middle
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_groups_of_every_form(written, groups):
    assert {frozenset(group) for group in device_groups(written)} == {frozenset(group) for group in groups}


@pytest.mark.parametrize(
    "written", ["{{0,1},{2,x}}", "[3,4]<=[8]", "mesh['a'=2] {'b'}", "mesh['a'=2,'b'=2], device_ids=([2]) {'a'}", "all"]
)
def test_an_unknown_form_is_refused(written):
    with pytest.raises(UserError, match="does not know"):
        device_groups(written)


@pytest.mark.parametrize("name", ["gathers", "exchanges"])
def test_axes_are_those_the_program_was_written_with(name):
    """Every set of axes of a 2x2x2 mesh, in the groups the real compiler writes for it."""
    found = set()
    for run in program(name).executed():
        if run.op.groups and run.op.opcode in ("all-gather", "all-to-all"):
            axes = axes_of(device_groups(run.op.groups), MESH)
            assert "-".join(axes) == run.op.where.split("/")[-2]
            found.add(axes)
    assert len(found) == 7


def test_the_axis_of_a_permutation_is_the_one_it_moves_along():
    (permute,) = [run.op for run in program("exchanges").executed() if run.op.opcode == "collective-permute-start"]
    assert axes_of_pairs(device_groups(permute.groups), MESH) == ("fsdp",)


@pytest.mark.parametrize("groups", [((0, 3), (1, 2), (4, 7), (5, 6)), ((0, 1), (2, 3)), ((0, 9),), ((0, 1, 2), (3, 4, 5))])
def test_groups_of_no_set_of_axes_are_unknown(groups):
    assert axes_of(groups, MESH) == ("unknown",)


GROUPED = """HloModule grouped, is_scheduled=true

ENTRY %main () -> () {{
  %rows = bf16[8192,4096]{{1,0}} parameter(0)
  %weights = bf16[8,4096,1536]{{2,1,0}} parameter(1)
  ROOT %pallas_tpu_ragged_dot_gmm = bf16[8192,1536]{{1,0}} custom-call(%rows, %weights), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{"xprof_metadata":"{{\\"tile_m\\": 128, \\"tile_k\\": {deep}, \\"tile_n\\": 768}}"}}}}, \
backend_config={{"cost_estimate":{{"flops":103079215104,"bytes_accessed":{stated},"transcendentals":0}}}}
}}
"""


@pytest.mark.parametrize(("deep", "stated", "moved"), [(4096, 10**9, 260_046_848), (2048, 10**9, 10**9), (4096, 10**8, 10**8)])
def test_weights_of_a_group_are_read_once_where_a_tile_holds_all_that_is_summed_over(deep, stated, moved):
    """Rows twice, once for each 768 columns, weights and result once; never more than the kernel states."""
    op = parser.read(GROUPED.format(deep=deep, stated=stated)).computations["main"].by_name["pallas_tpu_ragged_dot_gmm"]
    assert op.stated.bytes_accessed == moved
    assert 260_046_848 == 2 * (2 * 8192 * 4096 + 8 * 4096 * 1536 + 8192 * 1536)


def test_scales_of_a_quantized_grouped_matmul_are_neither_its_rows_nor_its_weights():
    """Each quantized operand is followed by its scales, which are read as often."""
    quantized = (
        GROUPED.replace("bf16[8192,4096]", "f8e4m3fn[8192,4096]").replace("bf16[8,4096", "f8e4m3fn[8,4096").format(deep=4096, stated=10**9)
    )
    scales = "  %of_rows = f32[8192,128]{1,0} parameter(2)\n  %of_weights = f32[1,16,1536]{2,1,0} parameter(3)\n  ROOT"
    quantized = quantized.replace("  ROOT", scales).replace("(%rows, %weights)", "(%rows, %of_rows, %weights, %of_weights)")
    op = parser.read(quantized).computations["main"].by_name["pallas_tpu_ragged_dot_gmm"]
    rows, weights, result = 8192 * (4096 + 4 * 128), 8 * 4096 * 1536 + 4 * 16 * 1536, 2 * 8192 * 1536
    assert op.stated.bytes_accessed == 2 * rows + weights + result
