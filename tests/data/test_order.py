"""Sample n is a pure function of (seed, stages, n): stages change from any sample on, and no source repeats or loses one of its own."""

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.data import order
from maxlm.data.order import PADDING, SampleOrder, Stage, counts_at, planned, shares_of

WINDOWS = {0: 7, 1: 23, 2: 40, 3: 5}


def random_stages(rng: np.random.Generator, first: int = 0) -> list[Stage]:
    """A few stages from `first` on, each with some of the sources."""
    starts = sorted({first, *rng.integers(first, first + 300, rng.integers(0, 4)).tolist()})
    return [
        Stage(start, shares_of({int(source): float(rng.random() + 0.01) for source in rng.permutation(4)[: rng.integers(1, 5)]}))
        for start in starts
    ]


def from_0(stages: list[Stage]) -> list[Stage]:
    return [stages[0]._replace(first=0), *stages[1:]]


def places(stages: list[Stage], samples: range, windows: dict[int, int] = WINDOWS) -> list[tuple[int, int]]:
    return list(SampleOrder(windows, stages, seed=0, shuffle=True).places(samples))


@pytest.mark.parametrize("seed", range(20))
def test_each_source_is_consumed_in_its_order_without_gap_or_repeat_whatever_stages_are_edited(seed):
    """Edits at any positions, each with any stages from there on: the n-th sample of a source is always number n of its own order."""
    rng = np.random.default_rng(seed)
    most = {int(source): int(rng.integers(1, 200)) for source in rng.permutation(4)[: rng.integers(0, 3)]}
    stages, position, seen = planned([], from_0(random_stages(rng)), 0, most), 0, []
    for _ in range(6):
        end = position + int(rng.integers(0, 120))
        stop = min(end, stages[-1].first) if not stages[-1].shares else end
        seen += places(stages, range(position, stop))
        position = stop
        wanted = from_0(random_stages(rng, position))
        stages = planned(stages, wanted, position, most)
    for source in WINDOWS:
        own = [number for owner, number in seen if owner == source]
        assert own == list(range(len(own))) and len(own) <= most.get(source, len(own))
        assert counts_at(stages, position).get(source, 0) == len(own)
    if seen:  # and what is past stays as it was
        assert places(stages, range(len(seen))) == seen


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_goes_on_with_the_same_stages_has_the_order_of_one_without_a_break(seed):
    rng = np.random.default_rng(seed)
    most = {0: 14, 3: int(rng.integers(1, 60))} if seed % 2 else {}
    wanted = from_0(random_stages(rng))
    whole = planned([], wanted, 0, most)
    end = 500 if whole[-1].shares else whole[-1].first
    for position in (*range(3), *rng.integers(0, end + 1, 10).tolist()):
        assert planned(whole, wanted, position, most) == whole


@pytest.mark.parametrize("seed", range(10))
def test_shares_are_kept_within_a_sample_for_each_source_from_the_beginning_of_each_stage(seed):
    rng = np.random.default_rng(seed)
    stages = planned([], from_0(random_stages(rng)), 0, {})
    for stage, end in zip(stages, [*(stage.first for stage in stages[1:]), stages[-1].first + 200], strict=True):
        drawn = np.array([source for source, _ in places(stages, range(stage.first, end))])
        for source, share in stage.shares.items():
            expected = share / sum(stage.shares.values()) * np.arange(1, len(drawn) + 1)
            assert np.abs(np.cumsum(drawn == source) - expected).max(initial=0) <= len(stage.shares)
        assert set(drawn) <= set(stage.shares)


def test_a_source_that_had_its_epochs_leaves_and_the_others_share_what_it_had():
    wanted = [Stage(0, shares_of({0: 0.5, 1: 0.25, 2: 0.25}))]
    stages = planned([], wanted, 0, {0: 14})
    assert [set(stage.shares) for stage in stages] == [{0, 1, 2}, {1, 2}]
    assert abs(stages[1].first - 28) <= 3 and counts_at(stages, 10_000)[0] == 14
    later = counts_at(stages, 10_000)
    assert abs(later[1] - later[2]) <= 3


def test_samples_end_where_every_source_had_its_epochs():
    stages = planned([], [Stage(0, shares_of({0: 1, 1: 3}))], 0, {0: 7, 1: 23})
    order_ = SampleOrder(WINDOWS, stages, seed=0, shuffle=True)
    assert order_.end == 30 and sorted(order_.ids(range(30))) == list(range(30))
    with pytest.raises(UserError, match=r"ends after 30 samples.*epochs"):
        order_.ids([30])
    assert planned(stages, [Stage(0, shares_of({0: 1}))], 30, {0: 8})[-2] == Stage(30, shares_of({0: 1}))  # raised later: it goes on


def test_epochs_of_a_source_are_different_permutations_of_its_windows():
    stages = planned([], [Stage(0, shares_of({0: 1, 2: 2}))], 0, {})
    ids = SampleOrder(WINDOWS, stages, seed=3, shuffle=True).ids(range(120))
    own = [ids[ids < 7][start : start + 7].tolist() for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in own) and len({tuple(epoch) for epoch in own}) == 3


def test_a_source_that_is_there_no_more_keeps_its_place_in_the_past():
    stages = planned([], [Stage(0, shares_of({0: 1, 1: 1}))], 0, {})
    stages = planned(stages, [Stage(0, shares_of({1: 1}))], 10, {})
    ids = SampleOrder({1: 23}, stages, seed=0, shuffle=False).ids(range(12))
    assert (ids == PADDING).sum() == 5 and ids[ids != PADDING].tolist() == list(range(7))
    again = planned(stages, [Stage(0, shares_of({0: 1, 1: 1}))], 12, {})  # and comes back where it was
    assert [number for source, number in places(again, range(12, 16)) if source == 0] == [5, 6]


def test_a_hundred_sources_that_leave_one_after_another_are_planned_fast():
    stages = planned([], [Stage(0, shares_of({n: 1 + n for n in range(100)}))], 0, {n: 1000 * (n + 1) ** 2 for n in range(100)})
    assert len(stages) == 101 and sum(counts_at(stages, stages[-1].first).values()) == sum(1000 * (n + 1) ** 2 for n in range(100))


def test_shares_stay_exact_far_into_a_run():
    """Weights 1 : 1.0049 are not 1 : 1, which cutting them to hundredths would make them: 1.2 million samples off after a billion."""
    source, number = order.interleaved(shares_of({0: 1.0, 1: 1.0049}), 10**9)
    assert abs(number - (1.0, 1.0049)[source] / 2.0049 * 10**9) < 2


def test_a_limit_that_is_never_reached_is_none():
    assert planned([], [Stage(0, {0: 1, 1: 3})], 0, {0: 10**30, 1: 2**63}) == [Stage(0, {0: 1, 1: 3})]
