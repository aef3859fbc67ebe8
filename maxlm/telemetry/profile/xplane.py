"""Planes and lines of a trace file (.xplane.pb), read with bounded memory: names first, events in blocks.

Messages and field numbers: xplane.proto of github.com/openxla/xla (xla/tsl/profiler/protobuf). XSpace: planes 1, errors 2,
warnings 3. XPlane: name 2, lines 3, event_metadata 4, stat_metadata 5, stats 6. XLine: name 2, timestamp_ns 3, events 4, display_name 11.
"""

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxlm.config.errors import UserError, error_kind
from maxlm.config.paths import open_regular
from maxlm.telemetry.profile import wire
from maxlm.telemetry.profile.wire import BYTES, DamagedTraceError, Events, signed, text

BLOCK = 8 << 20  # bytes of events that are decoded at a time
MOST_WARNINGS, LONGEST_WARNING = 20, 500  # bytes
_LATEST = 1 << 62  # picoseconds, of a line's begin: sums fit in 64 bits


@dataclass(frozen=True)
class EventKind:
    """Metadata that events of one metadata_id share: their name, and `stats` (name -> number or text; bytes as (start, end) in it)."""

    name: str
    display_name: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Line:
    """One timeline of a plane. `timestamp_ns`: what its events count from."""

    name: str
    timestamp_ns: int
    start: int
    end: int


@dataclass
class Plane:
    """A device, the host, or what is known of programs."""

    name: str
    lines: list[Line] = field(default_factory=list)
    kinds: dict[int, EventKind] = field(default_factory=dict)  # by metadata_id
    stat_names: dict[int, str] = field(default_factory=dict)

    def stat_id(self, name: str) -> int | None:
        return next((key for key, value in self.stat_names.items() if value == name), None)


class Trace:
    """A trace file, open. Raises UserError if it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise error_kind(error)(f"{path}: no trace can be read there ({getattr(error, 'strerror', None) or error}).") from None
        self.planes: list[Plane] = []
        self.warnings: list[str] = []  # of who recorded it, errors included: events that were dropped, devices that were not traced
        try:
            for number, kind, start, end in wire.fields(self._view):
                if (number, kind) == (1, BYTES):
                    self.planes.append(self._plane(start, end))
                elif number in (2, 3) and kind == BYTES and len(self.warnings) < MOST_WARNINGS:
                    self.warnings.append(text(self._view, start, min(end, start + LONGEST_WARNING)))
        except (IndexError, DamagedTraceError):
            raise UserError(f"{path}: this trace is damaged or cut short: record it again.") from None
        self.forget()
        self.base_ns = min((line.timestamp_ns for plane in self.planes for line in plane.lines if line.end > line.start), default=0)

    @property
    def _view(self) -> Any:
        return self._data

    def close(self) -> None:
        self._data.close()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Give the pages read so far back to the system: memory stays bounded."""
        with contextlib.suppress(AttributeError, ValueError, OSError):
            self._data.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, place: tuple[int, int]) -> bytes:
        """The bytes of a stat."""
        return self._data[place[0] : place[1]]

    def blocks(self, line: Line, wanted: tuple[int, ...] = ()) -> Iterator[Events]:
        """The events of a line, in blocks; starts are picoseconds since `base_ns`. Raises UserError."""
        offset = (line.timestamp_ns - self.base_ns) * 1000
        if abs(offset) >= _LATEST:
            raise UserError(
                f"{self.path}: this trace is damaged: a line of it begins {offset / 1e12:.3g} s after the first; record it again."
            )
        place, size = line.start, BLOCK
        while place < line.end:
            data = self._data[place : min(place + size, line.end)]
            try:
                begin_N, end_N, read = wire.event_places(data)
                if read == 0:
                    if place + size >= line.end:
                        raise DamagedTraceError
                    size *= 2  # one event is larger than a block
                    continue
                events = wire.decode_events(data, begin_N, end_N, wanted)
            except (IndexError, DamagedTraceError):
                raise UserError(f"{self.path}: this trace is damaged or cut short: record it again.") from None
            if len(begin_N):
                yield events._replace(start_N=events.start_N + offset)
            place += read
            self.forget()

    def _plane(self, start: int, end: int) -> Plane:
        plane, kinds = Plane(""), []
        for number, kind, value, after in wire.fields(self._view, start, end):
            if kind != BYTES:
                continue
            if number == 2:
                plane.name = text(self._view, value, after)
            elif number == 3:
                plane.lines.append(self._line(value, after))
            elif number == 4:
                kinds.append((value, after))
            elif number == 5:
                self._stat_name(plane, value, after)
        for place in kinds:  # after the names of their stats
            self._kind(plane, *place)
        return plane

    def _line(self, start: int, end: int) -> Line:
        """The head of a line; `start` is moved to its first event. Fields are in their order, so few are passed over."""
        name, display, timestamp, first = "", "", 0, end
        for number, kind, value, after in wire.fields(self._view, start, end):
            if number == 4:
                first = min(first, value)
                break
            if number == 2 and kind == BYTES:
                name = text(self._view, value, after)
            elif number == 3:
                timestamp = signed(value)
            elif number == 11 and kind == BYTES:
                display = text(self._view, value, after)
        return Line(name or display, timestamp, self._field_start(start, end) if first < end else end, end)

    def _field_start(self, start: int, end: int) -> int:
        """The place of the tag of the first event."""
        before = start
        for number, _, _, after in wire.fields(self._view, start, end):
            if number == 4:
                return before
            before = after
        return end

    def _kind(self, plane: Plane, start: int, end: int) -> None:
        key, name, display, stats = 0, "", "", {}
        for number, kind, value, after in self._entry(start, end):
            if number == 1 and kind != BYTES:
                key = value
            elif number == 2:
                name = text(self._view, value, after)
            elif number == 4:
                display = text(self._view, value, after)
            elif number == 5:
                stat, content = self._stat(plane, value, after)
                stats[stat] = content
        plane.kinds[key] = EventKind(name, display, stats)

    def _stat_name(self, plane: Plane, start: int, end: int) -> None:
        key, name = 0, ""
        for number, kind, value, after in self._entry(start, end):
            if number == 1 and kind != BYTES:
                key = value
            elif number == 2:
                name = text(self._view, value, after)
        plane.stat_names[key] = name

    def _entry(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Fields of the value of an entry of a map, and its key as its field 1."""
        key = None
        for number, kind, value, after in wire.fields(self._view, start, end):
            if number == 1:
                key = value
                yield 1, kind, value, after
            elif number == 2 and kind == BYTES:
                yield from (item for item in wire.fields(self._view, value, after) if item[0] != 1 or key is None)

    def _stat(self, plane: Plane, start: int, end: int) -> tuple[str, Any]:
        name = ""
        content: Any = None
        for number, kind, value, after in wire.fields(self._view, start, end):
            if number == 1:
                name = plane.stat_names.get(value, "")
            elif kind == BYTES:
                content = (value, after) if number == 6 else text(self._view, value, after)
            elif number == 7:
                content = plane.stat_names.get(value, "")
            elif number in (3, 4):
                content = signed(value)
        return name, content
