"""Pipeline schedules: every unit once, in an order that can be, with the bubbles and the memory that the formulas give."""

import itertools

import pytest

from maxlm.parallel.schedule import Schedule

CASES = [
    Schedule(kind, stages, microbatches, chunks)
    for kind, stages, microbatches, chunks in itertools.product(("1f1b", "gpipe"), (2, 3, 4, 8), (1, 2, 4, 8, 16, 24), (1, 2, 3))
    if chunks == 1 or microbatches % stages == 0
]


def of_every_schedule(check):
    """A test that makes `check` with each of the cases, and names the one that fails."""

    def test():
        for schedule in CASES:
            try:
                check(schedule)
            except AssertionError as error:
                error.add_note(f"of {schedule}")
                raise

    test.__doc__ = check.__doc__
    return test


def work_of(schedule, stage):
    """(tick, "forward" or "backward", microbatch, chunk) of one stage, in order; within a tick, forward comes first."""
    ways = (("forward", schedule.forward_unit, schedule.forward), ("backward", schedule.backward_unit, schedule.backward))
    for tick in range(schedule.ticks):
        for way, unit_of, parts in ways:
            if 0 <= (unit := unit_of(stage, tick)) < schedule.units:
                yield tick, way, *parts(unit)


def when(schedule):
    """(way, microbatch, part of the depth) -> tick; part q is on stage q mod stages."""
    found = {}
    for stage in range(schedule.stages):
        for tick, way, microbatch, chunk in work_of(schedule, stage):
            key = (way, microbatch, chunk * schedule.stages + stage)
            assert key not in found, "a unit runs once"
            found[key] = tick
    return found


@of_every_schedule
def test_every_unit_runs_once_and_gets_its_input_from_the_tick_before(schedule):
    ticks, parts = when(schedule), schedule.stages * schedule.chunks
    assert len(ticks) == 2 * schedule.microbatches * parts
    for microbatch in range(schedule.microbatches):
        for part in range(1, parts):
            assert ticks["forward", microbatch, part] == ticks["forward", microbatch, part - 1] + 1
            assert ticks["backward", microbatch, part - 1] == ticks["backward", microbatch, part] + 1
        assert ticks["backward", microbatch, parts - 1] >= ticks["forward", microbatch, parts - 1]


@of_every_schedule
def test_a_stage_does_one_unit_a_way_and_tick(schedule):
    for stage in range(schedule.stages):
        done = [(tick, way) for tick, way, _, _ in work_of(schedule, stage)]
        assert len(set(done)) == len(done)
        assert max(tick for tick, _ in done) < schedule.ticks


@of_every_schedule
def test_bubbles_are_as_the_formula_says(schedule):
    """(P - 1) / (v M + P - 1), whatever a pass costs, counted from what the stages do: a tick lasts as long as its busiest stage."""
    for forward, backward in ((1.0, 2.0), (1.0, 3.0)):
        cost = {"forward": forward, "backward": backward}
        work = {(stage, tick, way) for stage in range(schedule.stages) for tick, way, _, _ in work_of(schedule, stage)}
        lasting = sum(cost[way] for _, way in {(tick, way) for _, tick, way in work})
        phases = sum(phase.ticks * (forward * phase.forward + backward * phase.backward) for phase in schedule.phases)
        busy = schedule.units * (forward + backward)
        wanted = (schedule.stages - 1) / (schedule.chunks * schedule.microbatches + schedule.stages - 1)
        assert 1 - busy / lasting == pytest.approx(wanted)
        assert 1 - busy / phases == pytest.approx(wanted)


@of_every_schedule
def test_phases_are_the_ticks_in_which_something_is_done(schedule):
    active = {
        way: {tick for stage in range(schedule.stages) for tick, other, _, _ in work_of(schedule, stage) if other == way}
        for way in ("forward", "backward")
    }
    seen = [tick for phase in schedule.phases for tick in range(phase.first, phase.first + phase.ticks)]
    assert seen == list(range(schedule.ticks))
    last = {tick for tick, way, _, chunk in work_of(schedule, schedule.stages - 1) if way == "backward" and chunk == schedule.chunks - 1}
    for phase in schedule.phases:
        ticks = set(range(phase.first, phase.first + phase.ticks))
        for way, does in (("forward", phase.forward), ("backward", phase.backward)):
            assert ticks & active[way] == (ticks if does else set())
        assert phase.loss or not ticks & last
        assert schedule.chunks > 1 or ticks & last == (ticks if phase.loss else set())


@of_every_schedule
def test_a_slot_is_read_before_it_is_written_again(schedule):
    """Unit k is kept in slot k mod `depth` until its backward pass; in a tick, forward passes write first."""
    for stage in range(schedule.stages):
        held = {}
        for _, way, microbatch, chunk in work_of(schedule, stage):
            slot = schedule.forward_of(microbatch, chunk) % schedule.depth
            if way == "forward":
                assert slot not in held
                held[slot] = (microbatch, chunk)
            else:
                assert held.pop(slot) == (microbatch, chunk)
        assert not held


def test_what_1f1b_keeps_does_not_grow_with_the_microbatches():
    for stages, chunks in ((2, 1), (4, 1), (8, 1), (4, 3)):
        depths = {Schedule("1f1b", stages, rounds * stages, chunks).depth for rounds in (3, 8, 32)}
        assert depths == {2 * chunks * stages - 1}
        assert [Schedule("gpipe", stages, rounds * stages, chunks).depth for rounds in (3, 8)] == [3 * stages * chunks, 8 * stages * chunks]


@of_every_schedule
def test_the_units_of_forward_and_backward_are_named_alike(schedule):
    for unit in range(schedule.units):
        assert schedule.forward_of(*schedule.forward(unit)) == unit
    assert {schedule.backward(unit) for unit in range(schedule.units)} == {schedule.forward(unit) for unit in range(schedule.units)}
