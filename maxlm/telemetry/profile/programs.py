"""Instructions of the compiled programs that a trace holds, with the place in the model each comes from.

Messages and field numbers: hlo.proto of github.com/openxla/xla. HloProto: hlo_module 1. HloModuleProto: name 1, computations 3.
HloComputationProto: instructions 2, id 5, root_id 6. HloInstructionProto: name 1, opcode 2, metadata 7, id 35, operand_ids 36,
called_computation_ids 38. OpMetadata: op_name 2.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from maxlm.telemetry.profile import wire
from maxlm.telemetry.profile.wire import BYTES, text
from maxlm.telemetry.profile.xplane import Trace

METADATA_PLANE = "/host:metadata"
_DEPTH = 4  # operands of operands that are asked for a place, at most


class Instruction(NamedTuple):
    """`where`: the op_name of its metadata, or, where XLA gives none, of what it calls, of what it reads or of what reads it."""

    opcode: str
    where: str


@dataclass
class _Raw:
    name: str = ""
    opcode: str = ""
    where: str = ""
    operands: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """A compiled program: its instructions by name."""

    name: str
    instructions: dict[str, Instruction]


def programs_of(trace: Trace) -> dict[int, Program]:
    """Programs by their id in this trace; {} where it holds none."""
    found = {}
    for plane in trace.planes:
        if plane.name != METADATA_PLANE:
            continue
        for key, kind in plane.kinds.items():
            number = kind.stats.get("program_id")
            for content in kind.stats.values():
                if isinstance(content, tuple):
                    found[number if isinstance(number, int) else key] = parse_program(trace.bytes_of(content))
    return found


def parse_program(data: bytes) -> Program:
    """The program of an HloProto."""
    name, raw, inside = "", {}, {}
    for number, kind, value, after in wire.fields(data):
        if (number, kind) != (1, BYTES):
            continue
        for inner, inner_kind, begin, end in wire.fields(data, value, after):
            if inner_kind == BYTES and inner == 1:
                name = text(data, begin, end)
            elif inner_kind == BYTES and inner == 3:
                key, instructions = _computation(data, begin, end)
                raw.update(instructions)
                inside[key] = list(instructions)
    return Program(name, _placed(raw, inside))


def _computation(data: bytes, start: int, end: int) -> tuple[int, dict[int, _Raw]]:
    key, instructions = 0, {}
    for number, kind, value, after in wire.fields(data, start, end):
        if number == 2 and kind == BYTES:
            identity, instruction = _instruction(data, value, after)
            instructions[identity] = instruction
        elif number == 5:
            key = value
    return key, instructions


def _instruction(data: bytes, start: int, end: int) -> tuple[int, _Raw]:
    identity, made = 0, _Raw()
    for number, kind, value, after in wire.fields(data, start, end):
        if number == 1:
            made.name = text(data, value, after)
        elif number == 2:
            made.opcode = text(data, value, after)
        elif number == 7:
            made.where = next((text(data, a, b) for n, k, a, b in wire.fields(data, value, after) if n == 2 and k == BYTES), "")
        elif number == 35:
            identity = value
        elif number in (36, 38):
            numbers = made.operands if number == 36 else made.calls
            if kind == BYTES:  # packed
                while value < after:
                    one, value = wire.varint(data, value)
                    numbers.append(one)
            else:
                numbers.append(value)
    return identity, made


def _placed(raw: dict[int, _Raw], inside: dict[int, list[int]]) -> dict[str, Instruction]:
    readers: dict[int, list[int]] = {}
    for key, one in raw.items():
        for operand in one.operands:
            readers.setdefault(operand, []).append(key)

    def near(start: int, beside: dict[int, list[int]] | None) -> str:
        """The place of the nearest operand, or reader, that has one."""
        here = [start]
        for _ in range(_DEPTH):
            here = [n for key in here for n in (raw[key].operands if beside is None and key in raw else (beside or {}).get(key, []))][:64]
            if found := next((raw[key].where for key in here if key in raw and "/" in raw[key].where), ""):
                return found
        return ""

    placed = {}
    for key, one in raw.items():
        where = one.where
        if "/" not in where:
            called = Counter(raw[n].where for c in one.calls for n in inside.get(c, ()) if "/" in raw[n].where)
            where = called.most_common(1)[0][0] if called else near(key, None) or near(key, readers) or where
        placed[one.name] = Instruction(one.opcode, where)
    return placed
