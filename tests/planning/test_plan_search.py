"""The search of `maxlm plan` against a compiler that answers at once: it finds the best, and keeps what it found."""

import contextlib
import functools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_plan_model import LARGE, analytic

from maxlm.base.errors import UserError
from maxlm.config.loader import load
from maxlm.cost.verify import Verdict
from maxlm.hardware.topologies import parse
from maxlm.planning import choose_topology
from maxlm.planning.analytic import Estimate
from maxlm.planning.explore import (
    MOST_COMPILES,
    MOST_UNROLLED,
    PATIENCE_S,
    STOPPED,
    Estimates,
    Trial,
    begin,
    explore,
    explore_unrolled,
    not_taken,
    pays,
    points,
    predict,
    rows,
)
from maxlm.planning.layouts import LayoutSpace

GIB = 2**30
AVAILABLE = 95 * GIB
CONFIG = load("models/llama3-8b", [*LARGE, "cluster.topology=v5p:4x4x4"]).config
MODEL = analytic(CONFIG, "v5p:4x4x4")
MODEL.estimate = functools.cache(MODEL.estimate)  # every search asks for all of them


@functools.cache
def space():
    """Layouts of one slice without stages and context; made when a test asks for it, not when tests are collected."""
    return [
        replace(frame, loss_chunks=loss_chunks, remat=remat)
        for frame in LayoutSpace(CONFIG, 64).frames()
        if frame.sizes["stage"] == frame.sizes["context"] == 1 and frame.zero == 3
        for loss_chunks, remat, offload in LayoutSpace(CONFIG, 64).savings(frame)
        if loss_chunks in (4, 8) and not offload
    ]


class Compiler:
    """Says what the model says, each part of it wrong by a factor of its own, and by how layouts are alike."""

    def __init__(self, seed: int = 0, available: int = AVAILABLE, seconds: float = 60.0) -> None:
        draw = random.Random(seed)
        self.wrong = [draw.uniform(0.8, 1.4) for _ in range(5)]
        self.sharding, self.parts, self.memory = draw.uniform(-0.01, 0.01), draw.uniform(-0.02, 0.02), draw.uniform(0.8, 1.2)
        self.available, self.seconds = available, seconds
        self.asked = []

    def __call__(self, layout) -> Verdict:
        self.asked.append(layout)
        return self.of(layout)

    def of(self, layout) -> Verdict:
        said = MODEL.estimate(layout)
        factor = 1 + self.sharding * math.log2(layout.sizes["fsdp"]) + self.parts * math.log2(layout.microbatches)
        step = tuple(factor * wrong * part for wrong, part in zip(self.wrong, said.parts, strict=True))
        slow = max(1.0, said.least_s / sum(step))  # no compiler beats the bounds
        needed = max(said.least_bytes, said.state + round(self.memory * said.temporaries))
        parts = tuple(slow * part for part in step) if needed <= self.available else None
        return Verdict(needed, self.available, parts, self.seconds, cached=False)


def search(compiler, *, own=None, most=MOST_COMPILES, updates=math.inf):
    found = begin(space(), MODEL, compiler.available)
    found.updates = updates
    explore(found, [own] if own else [], compiler, lambda *_: None, most)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_found_though_the_model_is_wrong(seed):
    """Ten of some thousand layouts are compiled, and none of the others is more than 1% faster than the choice."""
    compiler = Compiler(seed)
    found = search(compiler, own=LayoutSpace(CONFIG, 64).own())
    everything = {one: compiler.of(one) for one in space()}
    fastest = min(verdict.step_s for verdict in everything.values())
    assert len(compiler.asked) <= MOST_COMPILES
    assert compiler.asked[0] == LayoutSpace(CONFIG, 64).own()
    assert found.best.verdict.step_s <= 1.01 * fastest
    assert all(everything[one].step_s >= found.best.verdict.step_s for one in found.too_slow)
    assert not any(everything[one].fits for one in found.too_large)
    assert found.counted == len(everything) == len(found.open) + len(found.trials) + len(found.too_slow) + len(found.too_large)


def test_the_choice_is_never_slower_than_the_users_own():
    compiler = Compiler()
    best = search(compiler).best
    again = search(compiler, own=best.layout, most=1)
    assert again.best.layout == best.layout


def test_a_lone_try_is_the_most_promising_not_the_leanest():
    """Topologies are compared by a single compiled layout of each."""
    compiler = Compiler()
    search(compiler, most=1)
    estimates = {one: MODEL.estimate(one) for one in space()}
    fitting = [said for said in estimates.values() if max(said.state + said.temporaries, said.least_bytes) <= AVAILABLE]
    assert sum(estimates[compiler.asked[0]].parts) == pytest.approx(min(sum(said.parts) for said in fitting))


def test_what_cannot_be_faster_is_dropped_once_something_is_known():
    keeps_little = Compiler(1)
    keeps_little.wrong = [0.7] * 5  # so fast a machine that recomputing at the peak is slower
    found = search(keeps_little)
    assert found.too_slow
    assert min(MODEL.estimate(one).least_s for one in found.too_slow) > found.best.verdict.step_s


def unrolled(found, verify):
    explore_unrolled(found, LayoutSpace(CONFIG, 64), MODEL, verify, lambda *_: None, MOST_UNROLLED)


def keeping(gain):
    """A compiler of layers without a loop: a step is so much faster for each tensor that it keeps."""
    compiler = Compiler(seconds=1.0)

    def verify(layout):
        assert layout.unroll
        verdict = compiler(layout)
        kept = 9 if layout.remat == "none" else len(layout.kept)
        return verdict if verdict.parts is None else replace(verdict, parts=tuple((1 - gain * kept) * part for part in verdict.parts))

    return compiler, verify


def test_the_fastest_goes_on_without_a_loop_over_layers_and_keeps_more_there():
    found = search(Compiler(seconds=1.0))
    before, counts = found.best, (found.tried, found.counted, dict(found.open), found.end)
    compiler, verify = keeping(0.02)
    unrolled(found, verify)
    tried = compiler.asked
    assert tried[0] == replace(before.layout, unroll=True) and replace(tried[0], remat="none", offload=()) in tried[:2]
    assert all(layout.unroll and layout.mesh == before.layout.mesh for layout in tried) and len(set(tried)) == len(tried) <= MOST_UNROLLED
    assert (found.tried, found.counted) == (counts[0] + len(tried), counts[1] + len(tried)) and (found.open, found.end) == counts[2:]
    assert found.best.layout.unroll and found.best.layout.apply(CONFIG).memory.unroll
    assert found.best.verdict.step_s < before.verdict.step_s


def test_a_loop_over_layers_stays_where_it_is_faster():
    found = search(Compiler(seconds=1.0))
    before, tried = found.best, found.tried
    unrolled(found, keeping(-0.05)[1])
    assert found.best is before and found.tried > tried


@pytest.mark.parametrize("why", ["no time is left", "stopped", "ctrl-c", "it fails"])
def test_what_was_found_stays_where_it_cannot_be_compiled_without_a_loop(why):
    found = search(Compiler(seconds=PATIENCE_S / 2 if why == "no time is left" else 1.0))
    before, counted, ended = found.best, found.counted, found.end
    errors = {"ctrl-c": KeyboardInterrupt(), "it fails": UserError("the compiler failed")}

    def verify(_):
        raise errors[why]

    found.end = STOPPED if why == "stopped" else found.end
    unrolled(found, verify)
    assert found.best is before and not any(layout.unroll for layout in found.open)
    assert found.counted == counted + (why == "it fails") and len(found.failed) == (why == "it fails"), "one failure is enough"
    assert found.end == (STOPPED if why in ("stopped", "ctrl-c") else ended)


def test_few_long_trials_leave_no_time_for_more():
    found = begin(space()[:2], MODEL, AVAILABLE)
    explore(found, [], Compiler(seconds=PATIENCE_S / 2), lambda *_: None, MOST_COMPILES)
    tried = found.tried
    unrolled(found, None)
    assert found.best is not None and found.tried == tried <= 2


def test_chunks_of_the_loss_are_compiled_where_they_are_predicted_to_be_faster():
    """They change a step as predicted, and are not worth a try because predictions may be wrong."""
    some = [replace(space()[0], loss_chunks=number) for number in (2, 4, 8, 16)]
    estimates = {layout: Estimate(10.0, 0.0, 0.0, 0.01 * place, 0.0, 0, 1, 0, 0.0) for place, layout in enumerate(some)}
    found = begin(some, SimpleNamespace(estimate=estimates.get), AVAILABLE)
    verify = lambda layout: Verdict(1, AVAILABLE, estimates[layout].parts, 1.0, cached=False)  # noqa: E731
    explore(found, [some[2]], verify, lambda *_: None, MOST_COMPILES)
    assert [one.layout for one in found.trials] == [some[2], some[0]]


@pytest.mark.parametrize("seed", range(4))
def test_a_mesh_that_was_compiled_is_soon_known(seed):
    """Layouts of other meshes keep their margin until several meshes were compiled, those of this one do not."""
    found = begin([layout for layout in space() if layout.sizes["fsdp"] == 64], MODEL, AVAILABLE)
    explore(found, [], Compiler(seed), lambda *_: None, MOST_COMPILES)
    assert found.best is not None and found.tried <= MOST_COMPILES / 2


def test_a_mesh_unlike_the_compiled_is_tried_though_their_parts_speak_against_it():
    """One waits six times as long as predicted, for weights; another, which sends tokens, as predicted, and that is more."""
    gathers, sends = (next(one for one in space() if one.sizes["fsdp"] == size) for size in (64, 8))
    waits = {gathers: (1.0, 6.0), sends: (2.4, 2.4)}
    parts = {layout: [(10.0, 0.0, 0.0, wait, 0.0) for wait in both] for layout, both in waits.items()}
    estimates = {layout: Estimate(*said, 0, 1, 0, 0.0) for layout, (said, _) in parts.items()}
    found = begin(waits, SimpleNamespace(estimate=estimates.get), AVAILABLE)
    verify = lambda layout: Verdict(1, AVAILABLE, parts[layout][1], 1.0, cached=False)  # noqa: E731
    explore(found, [], verify, lambda *_: None, MOST_COMPILES)
    assert [one.layout for one in found.trials] == [gathers, sends] and found.best.layout == sends


@pytest.mark.parametrize("stopped_at", [0, 1, 3])
def test_ctrl_c_keeps_what_was_found(stopped_at):
    compiler = Compiler()

    def interrupted(layout):
        if len(compiler.asked) == stopped_at:
            raise KeyboardInterrupt
        return compiler(layout)

    found = begin(space(), MODEL, AVAILABLE)
    explore(found, [LayoutSpace(CONFIG, 64).own()], interrupted, lambda *_: None, MOST_COMPILES)
    assert (found.end, len(found.trials)) == ("stopped", stopped_at)
    assert (found.best is None) == (stopped_at == 0)


def test_a_second_run_asks_the_same():
    first, second = Compiler(3), Compiler(3)
    search(first, own=LayoutSpace(CONFIG, 64).own())
    search(second, own=LayoutSpace(CONFIG, 64).own())
    assert first.asked == second.asked


def test_a_slow_compiler_is_asked_less():
    """But never less than three times: with fewer there is nothing to learn from."""
    slow = Compiler(1, seconds=PATIENCE_S / 4.5)
    found = search(slow)
    assert len(slow.asked) == 4
    assert found.end == "the time for compiling is spent"
    slow = Compiler(1, seconds=PATIENCE_S)
    found = search(slow)
    assert len(slow.asked) == 3
    assert found.end == "the time for compiling is spent"


def tried_until_it_does_not_pay(steps_s, updates, hoped=0.9, trial_s=25.0, hosts=1.0):
    """Number of trials, with steps of `steps_s`, until another does not pay of which `hoped` times the best is hoped for."""
    for tried in range(2, len(steps_s) + 1):
        best = min(steps_s[:tried])
        if not pays((1 - hoped) * best, tried - 1 - steps_s.index(best), updates, trial_s, hosts):
            return tried
    return len(steps_s)


def test_a_search_ends_when_another_trial_saves_less_of_the_run_than_it_takes():
    flat = [1.0] * 24
    falling = [0.97**number for number in range(24)]
    minutes, hours, days = 120, 3600, 260_000  # updates of a second
    assert tried_until_it_does_not_pay(flat, minutes) == 2, "6 s are hoped for, at even odds, and 30 are needed"
    assert 3 < tried_until_it_does_not_pay(flat, hours) < 12 < tried_until_it_does_not_pay(falling, hours)
    assert tried_until_it_does_not_pay(flat, days) == 24
    counts = [tried_until_it_does_not_pay(flat, updates) for updates in (minutes, 1000, hours, 10_000, days)]
    assert counts == sorted(counts) and counts[0] < counts[-1], "a longer run is worth a longer search"
    assert tried_until_it_does_not_pay(flat, hours, trial_s=5.0) > tried_until_it_does_not_pay(flat, hours, trial_s=100.0)
    assert tried_until_it_does_not_pay(flat, hours, hoped=0.999) == 2, "little is hoped for"
    assert tried_until_it_does_not_pay(flat, hours, hosts=32) == 24, "a pod's seconds cost more than the compiler's"


def test_a_short_run_is_searched_for_less_than_a_long_one():
    def trials(updates):
        found = search(Compiler(seconds=10.0), updates=updates)
        return found.tried, found.end, found.best.verdict.step_s

    toy, short, long = (trials(updates) for updates in (1, 500, 1e7))
    endless = trials(math.inf)
    assert toy[0] == 2 < short[0] < long[0] and toy[2] >= short[2] >= long[2]
    assert "is expected to save" in toy[1] and "of the run, and takes about 15 s to compile" in toy[1] and "expected to save" in short[1]
    assert long == endless, "a run of months is searched for as long as anything better is expected"


def test_layers_without_a_loop_are_compiled_only_where_that_may_pay():
    found = search(Compiler(seconds=10.0), updates=1)
    tried = found.tried
    unrolled(found, None)
    assert found.tried == tried and "is expected to save" in found.looped
    found.updates, found.looped = 1e7, ""
    unrolled(found, keeping(0.02)[1])
    assert found.tried > tried and not found.looped


def test_each_layout_that_was_predicted_to_be_faster_has_its_reason():
    """Compiled and slower, too large, refused by the compiler, not compiled: a line each, and none for slower ones."""
    compiler = Compiler(1, available=24 * GIB, seconds=10.0)
    compiler.memory = 2.0

    found = begin(space(), MODEL, compiler.available)
    found.updates = 2000
    explore(found, [], failing(compiler, 1), lambda *_: None, MOST_COMPILES)
    named = not_taken(found)
    best_s = found.best.verdict.step_s
    assert all(one.predicted_s < best_s and one.layout != found.best.layout for one in named)
    reasons = {one.layout: one.reason for one in named}
    for trial in found.trials:
        if trial is not found.best and found.predicted_s[trial.layout] < best_s:
            fits = trial.verdict.fits
            assert ("compiled: " if fits else "does not fit: needs ") in reasons[trial.layout]
    assert any("does not fit" in reason for reason in reasons.values())
    (failed,) = found.failed
    assert (failed in reasons) == (found.predicted_s[failed] < best_s)
    found.predicted_s[failed] = best_s / 2
    assert {one.layout: one.reason for one in not_taken(found)}[failed].startswith("the compiler failed: The compiler's process ended")
    untried = [one for one in named if one.layout in found.open]
    assert untried and all(one.reason.startswith("not compiled: ") for one in untried)


def test_when_the_model_thinks_too_little_of_memory_something_that_fits_is_found():
    compiler = Compiler(available=24 * GIB)
    compiler.memory = 2.0
    found = search(compiler)
    assert found.best is not None
    assert any(not one.verdict.fits for one in found.trials)


def test_the_model_believes_the_compiler():
    """A correction is almost whole near what was compiled, and less far from it."""
    own = LayoutSpace(CONFIG, 64).own()
    said = MODEL.estimate(own)
    verdict = Verdict(said.state + 2 * said.temporaries, AVAILABLE, tuple(1.5 * part for part in said.parts), 1.0, cached=False)
    far = next(one for one in space() if one.remat == "none" and one.sizes["tensor"] == 8)
    found = predict(Estimates.from_layouts([own, far], [said, MODEL.estimate(far)]), [Trial(own, said, verdict)])
    near_s, far_s = (step / sum(MODEL.estimate(one).parts) for step, one in zip(found.step_s_N, (own, far), strict=True))
    assert near_s == pytest.approx(1.5, rel=0.03)
    assert 1 < far_s < near_s
    assert found.needed_N[0] == pytest.approx(verdict.needed, rel=0.05)
    assert found.trust_N[0] == 1 > found.trust_N[1]


def test_the_frontier_holds_what_no_other_beats():
    found = search(Compiler(2), own=LayoutSpace(CONFIG, 64).own())
    drawn = points(found)
    compiled = [point for point in drawn if point.compiled and point.fits]
    for point in compiled:
        as_good = [other for other in compiled if other.step_s <= point.step_s and other.needed <= point.needed]
        alike = [other for other in as_good if (other.step_s, other.needed) == (point.step_s, point.needed)]
        assert sum(other.frontier for other in alike) == (len(as_good) == len(alike)), "of several alike, one is enough"
    for point in (point for point in drawn if point.frontier and not point.compiled):
        assert not any(other.step_s < point.step_s and other.needed < point.needed for other in drawn if other.fits)
    shown = rows(drawn)
    assert {point.layout for point in shown if point.compiled} == {one.layout for one in found.trials}
    assert len(shown) <= len(found.trials) + 6
    assert [point.frontier for point in shown] == sorted((point.frontier for point in shown), reverse=True)


def test_a_comparison_that_is_stopped_forgets_no_layout_that_does_not_fit(monkeypatch):
    """Ctrl-C while the second layout of a machine is compiled: the first, predicted to fit, did not."""
    search, one = begin(space()[:1], MODEL, AVAILABLE), space()[0]
    (point,) = points(search)
    machine = choose_topology.Machine(parse("v5p:4x4x4"), CONFIG, search, None, None, point=point)

    def explore_some(search, *_, most, **__):
        if most == 1:
            search.trials.append(Trial(one, search.open.pop(one), Verdict(2 * AVAILABLE, AVAILABLE, None, 1.0, cached=False)))
        search.end = "1 are enough" if most == 1 else STOPPED

    monkeypatch.setattr(choose_topology, "explore", explore_some)
    monkeypatch.setattr(choose_topology, "Compiler", lambda **_: contextlib.nullcontext(print))
    with pytest.raises(KeyboardInterrupt):
        choose_topology._check([machine], lambda _: None)
    assert machine.point is None


def failing(compiler, *at):
    """The stand-in for the compiler, whose process ends at these calls."""
    calls = []

    def verify(asked, topology=None):
        calls.append(asked)
        if len(calls) - 1 in at:
            raise UserError("The compiler's process ended with code -9: see above.")
        return compiler(asked if topology is None else LayoutSpace(asked, topology.devices).own())

    return verify


def test_a_layout_at_which_the_compiler_fails_is_dropped():
    compiler, found = Compiler(), begin(space(), MODEL, AVAILABLE)
    explore(found, [], failing(compiler, 2, 3), lambda *_: None, MOST_COMPILES)
    assert set(found.failed.values()) == {"The compiler's process ended with code -9: see above."} and len(found.failed) == 2
    assert found.tried == len(compiler.asked) + 2 <= MOST_COMPILES
    assert found.best is not None and not set(found.failed) & {*found.open, *compiler.asked}


def test_a_layout_whose_loops_are_not_counted_is_dropped():
    """Else its step would be the shortest of all."""
    compiler = Compiler()

    def sometimes(layout):
        verdict = compiler(layout)
        return replace(verdict, parts=(1e-9,), unknown_loops=("while.2",)) if len(compiler.asked) == 2 else verdict

    found = begin(space(), MODEL, AVAILABLE)
    explore(found, [], sometimes, lambda *_: None, MOST_COMPILES)
    assert list(found.failed) == [compiler.asked[1]] and "while.2" in found.failed[compiler.asked[1]]
    assert found.best.verdict.step_s > 1e-9


def test_a_compiler_that_fails_at_once_is_an_error():
    with pytest.raises(UserError, match="code -9"):
        explore(begin(space(), MODEL, AVAILABLE), [], failing(Compiler(), 0), lambda *_: None, MOST_COMPILES)


@pytest.mark.parametrize("fails", [(0,), (1, 2)])
def test_a_comparison_outlives_a_failed_compile(monkeypatch, fails):
    """The second machine has only its prediction then, of another layout than the compiler failed at."""
    monkeypatch.setattr(choose_topology, "Compiler", lambda **_: contextlib.nullcontext(failing(Compiler(), *fails)))
    machines = [
        choose_topology.Machine(parse("v5p:4x4x4"), CONFIG, search, None, None, point=points(search)[0])
        for search in (begin(space()[start : start + 50], MODEL, AVAILABLE) for start in (0, 50))
    ]
    monkeypatch.setattr(choose_topology.Machine, "choose", lambda self: setattr(self, "point", choose_topology._best(self.search)))
    if 0 in fails:
        with pytest.raises(UserError, match="code -9"):
            choose_topology._check(machines, lambda _: None)
        return
    choose_topology._check(machines, lambda _: None)
    assert [(len(one.search.trials), len(one.search.failed)) for one in machines] == [(1, 0), (0, 2)]
    assert machines[1].point is not None and machines[1].point.layout not in machines[1].search.failed
