"""A program in the newer syntax of tuples is read as the same program in the older one."""

from maxlm.hlo import parser

OLDER = """HloModule jit_train_step, is_scheduled=true

%body (state: (s32[], (f32[8,4], s8[4]), f32[8])) -> (s32[], (f32[8,4], s8[4]), f32[8]) {
  %one = s32[]{:T(128)} constant(1)
  %state = (s32[]{:T(128)}, (f32[8,4]{1,0:S(1)}, s8[4]{0}), /*index=2*/f32[8]{0:T(128)}) parameter(0)
  %state.element.0 = s32[]{:T(128)} get-tuple-element(%state), index=0
  %next = s32[]{:T(128)} add(%state.element.0, %one)
  %state.element.1 = (f32[8,4]{1,0:S(1)}, s8[4]{0}) get-tuple-element(%state), index=1
  %state.element.2 = /*index=2*/f32[8]{0:T(128)} get-tuple-element(%state), index=2
  ROOT %now = (s32[]{:T(128)}, (f32[8,4]{1,0:S(1)}, s8[4]{0}), f32[8]{0:T(128)}) tuple(%next, %state.element.1, %state.element.2)
}

%condition (state.1: (s32[], (f32[8,4], s8[4]), f32[8])) -> pred[] {
  %end = s32[]{:T(128)} constant(7)
  %state.1 = (s32[]{:T(128)}, (f32[8,4]{1,0:S(1)}, s8[4]{0}), f32[8]{0:T(128)}) parameter(0)
  %state.1.element.0 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%state.1.element.0, %end), direction=LT, metadata={op_name="a#0/b"}
}

ENTRY %main (from: f32[8,4], to: f32[8]) -> f32[8] {
  %zero = s32[]{:T(128)} constant(0)
  %from = f32[8,4]{1,0:T(8,128)} parameter(0)
  %to = f32[8]{0:T(128)} parameter(1)
  %pair = (f32[8,4]{1,0:T(8,128)}, f32[8]{0:T(128)}) tuple(%from, %to)
  %before = (s32[]{:T(128)}, (f32[8,4]{1,0:T(8,128)}, f32[8]{0:T(128)}), f32[8]{0:T(128)}) tuple(%zero, %pair, %to)
  %loop = (s32[]{:T(128)}, (f32[8,4]{1,0:T(8,128)}, f32[8]{0:T(128)}), f32[8]{0:T(128)}) while(%before), condition=%condition, body=%body
  %loop.element.2 = f32[8]{0:T(128)} get-tuple-element(%loop), index=2
  ROOT %done = f32[8]{0:T(128)} copy(%loop.element.2)
}
"""


def test_an_element_by_its_number_is_a_get_tuple_element():
    lines = [line for line in OLDER.splitlines(keepends=True) if "get-tuple-element" not in line]
    newer = "".join(lines).replace(".element.", "#")
    assert "#" in newer and "get-tuple-element" not in newer
    read = parser.read(newer)
    assert read == parser.read(OLDER)
    loop = next(op for op in read.computations["main"].ops if op.opcode == "while")
    assert loop.trips == 7
    assert next(op.where for op in read.computations["condition"].ops if op.opcode == "compare") == "a#0/b"


def test_cycles_of_single_numbers_are_not_those_of_a_program():
    """The newer compiler states those of sums of two numbers before it has any machine code."""
    stated = OLDER.replace("add(%state.element.0, %one)", 'add(%state.element.0, %one), backend_config={"estimated_cycles":"1290"}')
    module = parser.read(stated)
    assert module.computations["body"].by_name["next"].cycles == 1290 and not module.has_cycles
