"""Arithmetic of time intervals, as arrays of picoseconds: nesting, self time, unions."""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

# N events, M intervals that do not touch, in order

Times = Int64[np.ndarray, " N"]


class Spans(NamedTuple):
    """Intervals from start to end, in order, that neither overlap nor touch."""

    start_M: Int64[np.ndarray, " M"]
    end_M: Int64[np.ndarray, " M"]

    @property
    def total(self) -> int:
        """Sum of the lengths, in picoseconds."""
        return int(np.sum(self.end_M - self.start_M))

    def clipped_total(self, other: "Spans") -> int:
        """Time that lies in both."""
        return self.total + other.total - union(self, other).total

    def gaps(self) -> "Spans":
        """Gaps between the spans."""
        return Spans(self.end_M[:-1], self.start_M[1:])


NONE = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def spans(start_N: Times, end_N: Times) -> Spans:
    """The union of intervals in any order."""
    if not len(start_N):
        return NONE
    if np.any(start_N[1:] < start_N[:-1]):
        order = np.argsort(start_N, kind="stable")
        start_N, end_N = start_N[order], end_N[order]
    reach_N = np.maximum.accumulate(end_N)
    first = np.concatenate(([True], start_N[1:] > reach_N[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start_N[first], reach_N[last])


def union(*several: Spans) -> Spans:
    """The times that are in any of `several`."""
    return spans(np.concatenate([one.start_M for one in several]), np.concatenate([one.end_M for one in several]))


def self_times(start_N: Times, end_N: Times) -> tuple[Times, Bool[np.ndarray, " N"]]:
    """(time of each event that no event nested in it covers, True where none is nested). In order of start, longer first; none is empty.

    An event is in as many others as have begun before it and have not ended.
    """
    depth_N = np.arange(len(start_N)) - np.searchsorted(np.sort(end_N), start_N, side="right")
    own_N, leaf_N = end_N - start_N, np.ones(len(start_N), bool)
    at = [np.flatnonzero(depth_N == depth) for depth in range(int(depth_N.max(initial=-1)) + 1)]
    for outer, inner in itertools.pairwise(at):
        parent = outer[np.maximum(np.searchsorted(outer, inner) - 1, 0)]
        covered = np.minimum(end_N[inner], end_N[parent]) - start_N[inner]
        np.subtract.at(own_N, parent, np.maximum(covered, 0))
        leaf_N[parent] = False
    return np.maximum(own_N, 0), leaf_N


def settled(start_N: Times, end_N: Times) -> int:
    """Number of events, in order of start, that no later event of their line can be nested in: all before the last that begins alone."""
    if not len(start_N):
        return 0
    alone = np.flatnonzero(start_N[1:] >= np.maximum.accumulate(end_N)[:-1])
    return int(alone[-1]) + 1 if alone.size else 0
