"""Write synthetic traces in the format of `jax.profiler` (xplane.proto), as of TPUs and GPUs: for tests, and to measure the reader.

    python tests/telemetry/profile/synthetic_trace.py --gb 1 --out synthetic.xplane.pb

They are made up: their planes, lines and stats have the names of real ones, and times of no hardware.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_STEPS = 100  # of a line of a large trace
Value = int | str | bytes


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: Value) -> bytes:
    """A field of a message: an integer, text, or bytes that may be a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


class Event(NamedTuple):
    """An event: times in picoseconds; `stats` are numbers, or text that is stored once by reference."""

    name: str
    start: int
    length: int
    stats: Mapping[str, int | str] = {}


class PlaneWriter:
    """A plane, with the names of its events and stats as they come."""

    def __init__(self, name: str) -> None:
        self._name, self._lines = name, b""
        self._kinds: dict[str, int] = {}
        self._details: dict[str, bytes] = {}
        self._names: dict[str, int] = {}

    def describe(self, event: str, display_name: str = "", /, **stats: Value) -> None:
        """Set what all events of this name share."""
        content = (field(4, display_name) if display_name else b"") + b"".join(field(5, self._stat(k, v)) for k, v in stats.items())
        self._kind(event)
        self._details[event] = content

    def line(self, name: str, events: Iterable[Event], timestamp_ns: int = 1000) -> None:
        self._lines += field(3, field(2, name) + field(3, timestamp_ns) + b"".join(field(4, self.event(event)) for event in events))

    def event(self, event: Event) -> bytes:
        stats = b"".join(field(4, self._stat(name, value)) for name, value in event.stats.items())
        return field(1, self._kind(event.name)) + field(2, event.start) + field(3, event.length) + stats

    def parts(self) -> tuple[bytes, bytes]:
        """(what comes before the lines, what comes after the last)."""
        kinds = ((key, field(1, key) + field(2, name) + self._details.get(name, b"")) for name, key in self._kinds.items())
        after = b"".join(field(4, field(1, key) + field(2, content)) for key, content in kinds)
        after += b"".join(field(5, field(1, key) + field(2, field(1, key) + field(2, name))) for name, key in self._names.items())
        return field(2, self._name), after

    def written(self) -> bytes:
        """The plane as a field of an XSpace."""
        before, after = self.parts()
        return field(1, before + self._lines + after)

    def _kind(self, name: str) -> int:
        return self._kinds.setdefault(name, len(self._kinds) + 1)

    def _named(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names) + 1)

    def _stat(self, name: str, value: Value) -> bytes:
        number = field(1, self._named(name))
        if isinstance(value, str):
            return number + field(7, self._named(value))
        return number + field(6 if isinstance(value, bytes) else 4, value)


class Instruction(NamedTuple):
    """An instruction of a program, for `hlo_proto`."""

    name: str
    opcode: str
    op_name: str = ""
    operands: Sequence[int] = ()  # numbers of instructions, from 1
    calls: Sequence[int] = ()  # numbers of computations, from 1


def hlo_proto(name: str, computations: Sequence[Sequence[Instruction]]) -> bytes:
    """An HloProto. Instructions are numbered through from 1, computations as well."""
    number, parts = 0, field(1, name)
    for place, instructions in enumerate(computations, 1):
        body = b""
        for one in instructions:
            number += 1
            links = b"".join(field(36, operand) for operand in one.operands) + b"".join(field(38, called) for called in one.calls)
            metadata = field(7, field(2, one.op_name)) if one.op_name else b""
            body += field(2, field(1, one.name) + field(2, one.opcode) + metadata + field(35, number) + links)
        parts += field(3, body + field(5, place))
    return field(1, parts)


def metadata_plane(programs: Mapping[int, bytes]) -> bytes:
    """The plane that holds compiled programs, by their id."""
    plane = PlaneWriter("/host:metadata")
    for number, program in programs.items():
        stats: dict[str, Value] = {"Hlo Proto": program, "program_id": number}
        plane.describe(f"jit_train_step({number})", **stats)
    return plane.written()


def write_large(path: Path, size: int) -> int:
    """Write a trace of about `size` bytes of four TPUs; returns its number of events. A step: 1,000 operations in a loop, a tenth of them
    collectives. A line of 100 steps is repeated, later each time.
    """
    events = 0
    with path.open("wb") as file:
        for device in range(4):
            plane, names = PlaneWriter(f"/device:TPU:{device}"), ["%while.1 = while"]
            for number in range(1000):
                kind = "all-gather" if number % 10 == 0 else "fusion"
                names.append(f"%{kind}.{number} = bf16[8,128]{{1,0}} {kind}(...)")
                scope = ("attn", "mlp", "norm", "unembed")[number % 4]
                plane.describe(names[-1], f"{kind}.{number}", tf_op=f"jit(train_step)/jvp()/while/body/closed_call/{scope}/dot_general:")
            plane.describe(names[0], "while.1", tf_op="jit(train_step)/jvp()/while:")
            steps = b"".join(field(4, plane.event(event)) for step in range(_STEPS) for event in _step(names, step * 1_200_000_000))
            repeats = max(1, round(size / 4 / len(steps)))
            heads = [field(2, "XLA Ops") + field(3, 1000 + number * _STEPS * 1_200_000) for number in range(repeats)]
            lines = [varint(3 << 3 | 2) + varint(len(head) + len(steps)) + head for head in heads]
            before, after = plane.parts()
            length = len(before) + sum(map(len, lines)) + repeats * len(steps) + len(after)
            file.write(varint(1 << 3 | 2) + varint(length) + before)
            for line in lines:
                file.write(line)
                file.write(steps)
            file.write(after)
            events += repeats * _STEPS * len(names)
    return events


def _step(names: Sequence[str], start: int) -> Iterable[Event]:
    """A step that begins at `start` picoseconds."""
    yield Event(names[0], start, 1_100_000_000, {"device_offset_ps": start, "device_duration_ps": 1_100_000_000})
    for number, name in enumerate(names[1:]):
        begun = start + number * 1_100_000
        yield Event(name, begun, 1_000_000, {"device_offset_ps": begun, "device_duration_ps": 1_000_000})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="Size of the file, in units of 10^9 bytes.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    events = write_large(arguments.out, int(arguments.gb * 1e9))
    sys.stdout.write(f"{arguments.out}: {arguments.out.stat().st_size / 1e9:.2f} GB, {events:,} events\n")


if __name__ == "__main__":
    main()
