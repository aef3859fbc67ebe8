"""Planes, lines and events of a trace file (.xplane.pb)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from jaxtyping import Int64

from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import open_regular
from maxlm.telemetry.profile.messages import LineHead, XLine, XSpace

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
