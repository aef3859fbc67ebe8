"""Likelihood requests, the windows of tokens in which they fit a model's context, and several windows a row of a batch, each a segment."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlm.base.errors import UserError

Ids = tuple[int, ...]


class Request(NamedTuple):
    """Tokens to score, given the tokens before them."""

    context: Ids  # not empty: where nothing comes before, the token that opens a document
    continuation: Ids


class Score(NamedTuple):
    """Log-likelihood of a request's continuation."""

    logprob: float  # nats, summed in float64
    greedy: bool  # no token of it is less likely than another in its place


class Window(NamedTuple):
    """Tokens that the model reads together. The last `scored` tokens are scored; the last of all is only a target."""

    tokens: Ids
    scored: int
    request: int  # index of its request, of which it scores tokens from `offset` on
    offset: int

    @property
    def inputs(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) - 1


def likelihood_window(request: Request, length: int, index: int = 0) -> tuple[Window, int]:
    """(the window of a request, tokens cut off the left of its context so that it reads at most `length`).

    Raises UserError if the continuation alone is longer.
    """
    tokens, scored = request.context + request.continuation, len(request.continuation)
    if scored > length:
        raise UserError(f"a continuation has {scored:,} tokens, above the context of {length:,}: score it as perplexity, or shorten it.")
    cut = max(len(tokens) - 1 - length, 0)
    return Window(tokens[cut:], scored, index, 0), cut


def rolling_windows(context: Ids, tokens: Ids, length: int, stride: int, index: int = 0) -> list[Window]:
    """Windows that score every one of `tokens` once. The first reads `context` and as many tokens as fit into `length`; each next one ends
    `stride` tokens further, or at the end, reads the `length` tokens before, and scores those that are new. A token after the first window
    so has at least `length - stride + 1` tokens of context.
    """
    if not 1 <= stride <= length:
        raise UserError(f"stride = {stride}: must be 1 to {length}, the tokens of the context; each window moves on by so many.")
    whole, before = context + tokens, len(context)
    windows: list[Window] = []
    done = 0
    while done < len(tokens):
        end = min(done + stride, len(tokens)) if windows else min(max(length + 1 - before, 1), len(tokens))
        stop = before + end
        windows.append(Window(whole[max(stop - length - 1, 0) : stop], end - done, index, done))
        done = end
    return windows


def distinct(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """(requests without repetition, for each of `requests` its index among them)."""
    index: dict[Request, int] = {}
    places = [index.setdefault(request, len(index)) for request in requests]
    return list(index), places


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
