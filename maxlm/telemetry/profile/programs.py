"""Instructions of the compiled programs that a trace holds, with the place in the model each comes from."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from maxlm.base.errors import UserError
from maxlm.telemetry.profile.xplane import HloProto, Trace, text

METADATA_PLANE = "/host:metadata"
_DEPTH = 4  # operands of operands that are asked for a place, at most


class Instruction(NamedTuple):
    """`where`: the op_name of its metadata, or, where XLA gives none, of what it calls, of what it reads or of what reads it."""

    opcode: str
    where: str


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
                if isinstance(content, bytes):
                    try:
                        found[number if isinstance(number, int) else key] = parse_program(content)
                    except DecodeError:
                        raise UserError(f"{trace.path}: a program in this trace is damaged: record it again.") from None
    return found


def parse_program(data: bytes) -> Program:
    """The program of an HloProto. Raises DecodeError."""
    module = HloProto.FromString(data).module
    raw = {one.id: one for computation in module.computations for one in computation.instructions}
    inside = {computation.id: [one.id for one in computation.instructions] for computation in module.computations}
    return Program(text(module.name), _placed(raw, inside))


def _placed(raw: dict[int, Any], inside: dict[int, list[int]]) -> dict[str, Instruction]:
    """Instructions by name, from their messages by id and the ids of those inside each computation."""
    wheres = {key: text(one.metadata.op_name) for key, one in raw.items()}
    readers: dict[int, list[int]] = {}
    for key, one in raw.items():
        for operand in one.operands:
            readers.setdefault(operand, []).append(key)

    def near(start: int, links: dict[int, list[int]] | None) -> str:
        """The place of the nearest operand, or reader, that has one."""
        here = [start]
        for _ in range(_DEPTH):
            here = [n for key in here for n in (raw[key].operands if links is None and key in raw else (links or {}).get(key, []))][:64]
            if found := next((wheres[key] for key in here if "/" in wheres.get(key, "")), ""):
                return found
        return ""

    placed = {}
    for key, one in raw.items():
        where = wheres[key]
        if "/" not in where:
            called = Counter(wheres[n] for c in one.calls for n in inside.get(c, ()) if "/" in wheres[n])
            where = called.most_common(1)[0][0] if called else near(key, None) or near(key, readers) or where
        placed[text(one.name)] = Instruction(text(one.opcode), where)
    return placed
