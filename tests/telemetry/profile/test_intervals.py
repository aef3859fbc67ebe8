"""Times of nested and overlapping intervals, against counting picosecond by picosecond."""

import numpy as np

from maxlm.telemetry.profile.intervals import self_times, settled, spans, union

LENGTH = 400


def nested(rng: np.random.Generator, start: int, end: int, depth: int) -> list[tuple[int, int]]:
    """Random intervals, each inside or beside the others, in order of start, the longer first."""
    found, place = [], start
    while place < end - 1 and depth:
        first, last = sorted(int(n) for n in rng.integers(place, end, 2))
        if last > first:
            found += [(first, last), *nested(rng, first, last, depth - 1)]
        place = max(last, place + 1)
    return found


def counted(intervals) -> np.ndarray:
    covered = np.zeros(LENGTH, bool)
    for start, end in intervals:
        covered[start:end] = True
    return covered


def test_own_times_add_up_to_the_time_that_is_covered():
    for seed in range(30):
        intervals = sorted(set(nested(np.random.default_rng(seed), 0, LENGTH, 4)), key=lambda pair: (pair[0], -pair[1]))
        start_N, end_N = (np.array([pair[i] for pair in intervals], np.int64) for i in (0, 1))
        own_N, leaf_N = self_times(start_N, end_N)
        assert own_N.sum() == counted(intervals).sum()
        assert np.all(own_N[leaf_N] == (end_N - start_N)[leaf_N])


def test_unions_and_gaps_cover_what_they_should():
    rng = np.random.default_rng(1)
    for _ in range(30):
        a, b = ([tuple(sorted(rng.integers(0, LENGTH, 2).tolist())) for _ in range(12)] for _ in range(2))
        of = [spans(*(np.array([pair[i] for pair in one], np.int64) for i in (0, 1))) for one in (a, b)]
        assert of[0].total == counted(a).sum()
        assert union(*of).total == (counted(a) | counted(b)).sum()
        assert of[0].clipped_total(of[1]) == (counted(a) & counted(b)).sum()
        assert of[0].total + of[0].gaps().total == of[0].end_M[-1] - of[0].start_M[0]


def test_events_are_held_until_none_can_be_nested_in_them():
    start_N, end_N = np.array([0, 1, 10, 12]), np.array([5, 4, 20, 13])
    assert settled(start_N, end_N) == 2
    assert settled(start_N[2:], end_N[2:]) == 0
