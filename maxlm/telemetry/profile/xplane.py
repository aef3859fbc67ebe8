"""Planes, lines and events of a trace file (.xplane.pb), and the protobuf messages of traces and compiled programs.

Declared are the fields that are read of xplane.proto and hlo.proto (github.com/openxla/xla): text as bytes, since protobuf refuses text
that is no UTF-8, and a map as the messages of its entries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from jaxtyping import Int64

from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import open_regular

_PACKAGE = "maxlm_trace"
_MESSAGES = {  # message -> "number name type" of its fields; []: repeated
    "XSpace": "1 planes []XPlane, 2 errors []bytes, 3 warnings []bytes",
    "XPlane": "2 name bytes, 3 lines []bytes, 4 event_metadata []EventEntry, 5 stat_metadata []StatEntry",
    "LineHead": "2 name bytes, 3 timestamp_ns int64, 4 events []bytes, 11 display_name bytes",
    "XLine": "4 events []XEvent",  # read one at a time, since its events take nine times their bytes
    "XEvent": "1 metadata_id int64, 2 offset_ps int64, 3 duration_ps int64, 4 stats []XStat",
    "XStat": "1 metadata_id int64, 3 uint64 uint64, 4 int64 int64, 5 str bytes, 6 bytes bytes, 7 ref uint64",
    "EventEntry": "1 key int64, 2 value EventMetadata",
    "EventMetadata": "2 name bytes, 4 display_name bytes, 5 stats []XStat",
    "StatEntry": "1 key int64, 2 value StatMetadata",
    "StatMetadata": "2 name bytes",
    "HloProto": "1 module HloModule",
    "HloModule": "1 name bytes, 3 computations []HloComputation",
    "HloComputation": "2 instructions []HloInstruction, 5 id int64",
    "HloInstruction": "1 name bytes, 2 opcode bytes, 7 metadata OpMetadata, 35 id int64, 36 operands []int64, 38 calls []int64",
    "OpMetadata": "2 op_name bytes",
}


def _classes() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, label, kind in (text.split() for text in fields.split(", ")):
            made = message.field.add(name=label, number=int(number))
            made.label = field.LABEL_REPEATED if kind.startswith("[]") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("[]")
            made.type = field.TYPE_MESSAGE if kind in _MESSAGES else field.Type.Value(f"TYPE_{kind.upper()}")
            if kind in _MESSAGES:
                made.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_CLASSES = _classes()
XSpace, XLine, LineHead, HloProto = (_CLASSES[name] for name in ("XSpace", "XLine", "LineHead", "HloProto"))


MOST_BYTES = 2**31 - 1  # that protobuf reads
BLOCK = 1 << 18  # events that are arrays at a time
MOST_WARNINGS, LONGEST_WARNING = 20, 500  # bytes
_LATEST = 1 << 62  # picoseconds, of a line's begin: sums fit in 64 bits


@dataclass(frozen=True)
class EventKind:
    """Metadata that events of one metadata_id share: their name, and `stats` (name -> number, text or bytes)."""

    name: str
    display_name: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)


class Events(NamedTuple):
    """Events of a part of a line, in its order. `stats`: number of each wanted stat (of text the id of its name), -1 if absent."""

    metadata_N: Int64[np.ndarray, " N"]
    start_N: Int64[np.ndarray, " N"]  # picoseconds since the line's timestamp
    length_N: Int64[np.ndarray, " N"]  # picoseconds
    stats: dict[int, Int64[np.ndarray, " N"]]


@dataclass
class Line:
    """One timeline of a plane. `timestamp_ns`: the time from which its events count."""

    name: str
    timestamp_ns: int
    data: bytes  # of the XLine


@dataclass
class Plane:
    """A device, the host, or the programs, with its lines that hold events."""

    name: str
    lines: list[Line]
    kinds: dict[int, EventKind]  # by metadata_id
    stat_names: dict[int, str]

    def stat_id(self, name: str) -> int | None:
        """Number of the stat called `name`; None if the plane has none."""
        return next((key for key, value in self.stat_names.items() if value == name), None)


class Trace:
    """A trace in memory."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that is no trace, or is damaged."""
        self.path = path
        try:
            with open_regular(path) as file:
                data = file.read()
        except (OSError, ValueError) as error:
            raise error_kind(error)(f"{path}: no trace can be read there ({getattr(error, 'strerror', None) or error}).") from None
        if len(data) > MOST_BYTES:
            raise UserError(f"{path} has {len(data):,} bytes, above the {MOST_BYTES:,} of a message: trace fewer steps.")
        try:
            space = XSpace.FromString(data)
            self.planes = [_plane(plane) for plane in space.planes]
        except DecodeError:
            raise self._damaged("or cut short") from None
        if not space.planes:
            raise self._damaged("or empty")
        # Warnings of the profiler, errors included: events that were dropped, devices that were not traced.
        self.warnings = [text(warning[:LONGEST_WARNING]) for warning in (*space.errors, *space.warnings)][:MOST_WARNINGS]
        self.base_ns = min((line.timestamp_ns for plane in self.planes for line in plane.lines), default=0)

    def _damaged(self, how: str) -> UserError:
        return UserError(f"{self.path}: this trace is damaged {how}: record it again.")

    def blocks(self, line: Line, wanted: tuple[int, ...] = ()) -> Iterator[Events]:
        """The events of a line, in blocks; starts are picoseconds since `base_ns`. `wanted`: ids of stats. Raises UserError."""
        offset = (line.timestamp_ns - self.base_ns) * 1000
        if abs(offset) >= _LATEST:
            raise self._damaged(f"(a line of it begins {offset / 1e12:.3g} s after the first)")
        try:
            every = XLine.FromString(line.data).events
        except DecodeError:
            raise self._damaged("or cut short") from None
        for begin in range(0, len(every), BLOCK):
            events = every[begin : begin + BLOCK]
            columns = np.array([(one.metadata_id, one.offset_ps, one.duration_ps) for one in events], np.int64)
            found = {name: np.full(len(events), -1, np.int64) for name in wanted}
            for i, one in enumerate(events) if wanted else ():
                for stat in one.stats:
                    if stat.metadata_id in found and isinstance(value := _value(stat), int):
                        found[stat.metadata_id][i] = value
            yield Events(columns[:, 0], columns[:, 1] + offset, columns[:, 2], found)


def text(data: bytes) -> str:
    """Text that may not be UTF-8."""
    return data.decode("utf-8", "replace")


def _plane(plane: Any) -> Plane:
    names = {one.key: text(one.value.name) for one in plane.stat_metadata}
    heads = ((LineHead.FromString(data), data) for data in plane.lines)
    lines = [Line(text(head.name or head.display_name), head.timestamp_ns, data) for head, data in heads if head.events]
    kinds = {one.key: _kind(one.value, names) for one in plane.event_metadata}
    return Plane(text(plane.name), lines, kinds, names)


def _kind(metadata: Any, names: Mapping[int, str]) -> EventKind:
    stats: dict[str, Any] = {}
    for stat in metadata.stats:
        value = _value(stat)
        stats[names.get(stat.metadata_id, "")] = names.get(stat.ref, "") if stat.HasField("ref") else value
    return EventKind(text(metadata.name), text(metadata.display_name), stats)


def _value(stat: Any) -> int | str | bytes | None:
    """The value of a stat, text by reference as the id of its name; None for a floating-point number."""
    for name in ("int64", "uint64", "ref", "bytes"):
        if stat.HasField(name):
            value: int | bytes = getattr(stat, name)
            return value
    return text(stat.str) if stat.HasField("str") else None
