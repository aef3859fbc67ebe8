"""Several windows a row of a batch, each a segment of its own."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlm.evaluation.requests import Window

# B rows, S positions

SHORTEST = 64  # positions of a row at least


class Packed(NamedTuple):
    """A batch for the model, int32 [B, S], and where each window lies in it."""

    tokens_BS: np.ndarray
    targets_BS: np.ndarray
    segment_ids_BS: np.ndarray  # 1, 2, ... for each window of the row; 0 where padded
    positions_BS: np.ndarray  # from 0 in each window
    places: list[tuple[Window, int, slice]]  # (window, row, positions of the targets that it scores)


def row_length(windows: Sequence[Window], longest: int, unit: int) -> int:
    """Positions of a row: a power of two times `unit` that holds every window, so that few shapes are compiled; at most `longest`."""
    needed, length = max((window.inputs for window in windows), default=1), unit
    while length < min(max(needed, SHORTEST), longest):
        length *= 2
    return min(length, longest)


def rows_of(windows: Sequence[Window], length: int) -> list[list[Window]]:
    """Windows by row, the longest first, each in the fullest row that has room. A pure function of its arguments."""
    rows: list[list[Window]] = []
    room: list[tuple[int, int]] = []  # (free positions, row), increasing
    for window in sorted(windows, key=lambda window: -window.inputs):  # stable
        at = bisect_left(room, (window.inputs, 0))
        free, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(window)
        insort(room, (free - window.inputs, row))
    return rows


def pack(rows: Sequence[Sequence[Window]], height: int, length: int) -> Packed:
    """The batch of these rows, filled up with empty ones to `height`."""
    arrays = [np.zeros((height, length), np.int32) for _ in range(4)]
    tokens_BS, targets_BS, segments_BS, positions_BS = arrays
    places = []
    for row, windows in enumerate(rows):
        start = 0
        for segment, window in enumerate(windows, 1):
            stop = start + window.inputs
            tokens_BS[row, start:stop] = window.tokens[:-1]
            targets_BS[row, start:stop] = window.tokens[1:]
            segments_BS[row, start:stop] = segment
            positions_BS[row, start:stop] = np.arange(window.inputs)
            places.append((window, row, slice(stop - window.scored, stop)))
            start = stop
    return Packed(tokens_BS, targets_BS, segments_BS, positions_BS, places)
