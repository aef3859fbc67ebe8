"""The wire format of protocol buffers (protobuf.dev/programming-guides/encoding), as far as traces need it: single messages, and the events
of a line of a trace, millions at a time, as arrays.

`jax.profiler.ProfileData` holds a whole file in memory, several times its size, and gives events one by one; a trace of a gigabyte then
needs minutes and many gigabytes.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from maxlm.config.errors import UserError

# N events

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_EVENT = 4 << 3 | BYTES  # tag of XLine.events
_STAT = 4 << 3 | BYTES  # tag of XEvent.stats
_ID, _START, _LENGTH = (1 << 3, 2 << 3, 3 << 3)  # tags of XEvent.metadata_id, offset_ps, duration_ps
_MOST_BYTES = 10  # of a varint
_STEPS = bytes(min(length, 127) + 2 for length in range(256))  # bytes of an event with its tag and length, by its length

Buffer = bytes | memoryview


class DamagedTraceError(UserError):
    """A trace whose bytes are no messages."""

    def __init__(self) -> None:
        super().__init__("this trace is damaged or cut short: record it again.")


def varint(data: Buffer, place: int) -> tuple[int, int]:
    """(number at `place`, place after it)."""
    value = shift = 0
    for _ in range(_MOST_BYTES):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise DamagedTraceError


def fields(data: Buffer, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Every field of a message as (number, wire type, value, place after it). Of BYTES the value is the place where they begin."""
    place, end = start, len(data) if end is None else end
    while place < end:
        tag, place = varint(data, place)
        kind = tag & 7
        if kind == VARINT:
            value, place = varint(data, place)
        elif kind == BYTES:
            length, value = varint(data, place)
            place = value + length
        elif kind in (FIXED64, FIXED32):
            value, place = place, place + (8 if kind == FIXED64 else 4)
        else:
            raise DamagedTraceError
        if place > end:
            raise DamagedTraceError
        yield tag >> 3, kind, value, place


def text(data: Buffer, start: int, end: int) -> str:
    return bytes(data[start:end]).decode("utf-8", "replace")


def signed(value: int) -> int:
    """An int64 of its varint."""
    return value - (1 << 64) if value >> 63 else value


class Events(NamedTuple):
    """Events of a part of a line, in its order. `stats`: of each wanted stat its number (of text the id of its name), -1 if absent."""

    metadata_N: Int64[np.ndarray, " N"]
    start_N: Int64[np.ndarray, " N"]  # picoseconds since the line's timestamp
    length_N: Int64[np.ndarray, " N"]  # picoseconds
    stats: dict[int, Int64[np.ndarray, " N"]]


def event_places(data: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """(where events begin, where they end, place of the first field that is cut off) in a part of an XLine that begins with a field."""
    tags: list[int] = []
    add, place, steps = tags.append, 0, data[1:].translate(_STEPS)
    with suppress(IndexError):  # as if every field were an event of less than 128 bytes: each place follows from the one before
        while True:
            add(place)
            place += steps[place]
    tags.pop()
    tag_N, bytes_ = np.asarray(tags, np.int64), np.frombuffer(data, np.uint8)
    length_N = bytes_[tag_N + 1].astype(np.int64)
    if np.any(bytes_[tag_N] != _EVENT) or np.any(length_N > 127):
        return _places_of_others(data)
    whole = len(tag_N) - (place > len(data))
    return tag_N[:whole] + 2, (tag_N + 2 + length_N)[:whole], place if place <= len(data) else int(tag_N[-1])


def _places_of_others(data: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """The same where there are longer events, or other fields."""
    starts, ends, size, place = [], [], len(data), 0
    while place + 2 <= size:
        length, begin = data[place + 1], place + 2
        if data[place] == _EVENT and length < 128:  # nearly all
            after = begin + length
            if after > size:
                break
            starts.append(begin)
            ends.append(after)
            place = after
            continue
        try:
            number, kind, begin, after = next(fields(data, place))
        except DamagedTraceError:
            break  # cut off here: read again with what follows
        if number << 3 | kind == _EVENT:
            starts.append(begin)
            ends.append(after)
        place = after
    return np.asarray(starts, np.int64), np.asarray(ends, np.int64), place


def decode_events(data: bytes, start_N: np.ndarray, end_N: np.ndarray, wanted: tuple[int, ...] = ()) -> Events:
    """The events at these places. `wanted`: ids of stats to read."""
    bytes_ = np.frombuffer(data + bytes(_MOST_BYTES + 2), np.uint8)  # so that a look behind the end of an event is allowed
    cursor_N = start_N.copy()
    found = {tag: np.zeros(len(cursor_N), np.int64) for tag in (_ID, _START, _LENGTH)}
    for tag, array in found.items():  # all events alike, as nearly all blocks of devices are
        if not np.all((bytes_[cursor_N] == tag) & (cursor_N < end_N)):
            break
        array[:], cursor_N = _varints(bytes_, cursor_N + 1)
    rest = np.arange(len(cursor_N))
    while rest.size:  # one field of every event a turn
        rest = rest[cursor_N[rest] < end_N[rest]]
        tag_R = bytes_[cursor_N[rest]]
        rest, tag_R = (kept := rest[tag_R != _STAT]), tag_R[tag_R != _STAT]
        if not kept.size:
            break
        value_R, after_R = _varints(bytes_, cursor_N[kept] + 1)
        if np.any((tag_R & 7) != VARINT):
            raise DamagedTraceError
        for tag, array in found.items():
            array[kept[tag_R == tag]] = value_R[tag_R == tag]
        cursor_N[kept] = after_R
    return Events(found[_ID], found[_START], found[_LENGTH], _stats(bytes_, cursor_N, end_N, wanted) if wanted else {})


def _stats(
    bytes_: UInt8[np.ndarray, " B"], cursor_N: np.ndarray, end_N: np.ndarray, wanted: tuple[int, ...]
) -> dict[int, Int64[np.ndarray, " N"]]:
    """Numbers of the wanted stats of events whose stats begin at `cursor_N`. XStat: the id of its name, then its value."""
    found = {name: np.full(len(cursor_N), -1, np.int64) for name in wanted}
    rest = np.flatnonzero(cursor_N < end_N)
    while rest.size:
        length_R, begin_R = _varints(bytes_, cursor_N[rest] + 1)
        cursor_N[rest] = begin_R + length_R
        if np.any(bytes_[begin_R] != _ID) or np.any(cursor_N[rest] > end_N[rest]) or np.any(length_R <= 0):
            raise DamagedTraceError
        name_R, value_R = _varints(bytes_, begin_R + 1)
        for name, array in found.items():
            mine = np.flatnonzero((name_R == name) & (bytes_[value_R] & 7 == VARINT))
            array[rest[mine]] = _varints(bytes_, value_R[mine] + 1)[0]
        rest = rest[cursor_N[rest] < end_N[rest]]
    return found


def _varints(bytes_: np.ndarray, place_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers at the places, places after them)."""
    byte_R = bytes_[place_R]
    value_R, after_R = (byte_R & 127).astype(np.int64), place_R + 1
    turn, more_R = 1, byte_R >= 128
    while turn < _MOST_BYTES and np.all(more_R):  # all alike: without indices, which take most of the time
        byte_R = bytes_[after_R]
        value_R |= (byte_R & 127).astype(np.int64) << (7 * turn)
        after_R += 1
        turn, more_R = turn + 1, byte_R >= 128
    rest = np.flatnonzero(more_R)
    for later in range(turn, _MOST_BYTES):
        if not rest.size:
            break
        byte_R = bytes_[after_R[rest]]
        value_R[rest] |= (byte_R & 127).astype(np.int64) << (7 * later)
        after_R[rest] += 1
        rest = rest[byte_R >= 128]
    return value_R, after_R
