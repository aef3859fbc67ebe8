"""Traces of a running job: begun and ended where asked, and no failure of theirs reaches the run."""

import json
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from tiny import tiny_program

from maxlm.config.sections.profile import ProfileConfig
from maxlm.hardware.chips import chip_named
from maxlm.hardware.xla_flags import TRACED
from maxlm.run.run import _profiling
from maxlm.telemetry.profile import TRACE
from maxlm.training import profiling
from maxlm.training.profiling import RunProfiler
from maxlm.training.progress import LoopProgress
from maxlm.training.session import Session


class Pauses:
    """Stands for the meter: counts what the profiler asks of it."""

    flushed = paused = 0

    def flush(self) -> None:
        self.flushed += 1

    def pause(self) -> None:
        self.paused += 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs steps of nothing under a profiler; returns (calls, events, meter). The page is made by a program that prints `answer`."""

    def go(
        start=None, stop=None, answer='{"page": "p", "attributed": 1.0}', of=range(12), seconds=0, gives_up=False, error=None, **settings
    ):
        calls, events, meter = [], [], Pauses()

        def called(name, error):
            def call(folder):
                calls.append((name, folder.relative_to(tmp_path).as_posix()))
                if error is not None:
                    raise error

            return call

        monkeypatch.setattr(profiling, "start_trace", called("start", start))
        monkeypatch.setattr(profiling, "stop_trace", called("stop", stop))
        popen = profiling.subprocess.Popen
        monkeypatch.setattr(
            profiling.subprocess,
            "Popen",
            lambda command, **options: popen([sys.executable, "-c", f"import time; time.sleep({seconds}); print({answer!r})"], **options),
        )
        monkeypatch.setattr(profiling, "abandon_trace", called("abandon", None))
        profiler = RunProfiler(ProfileConfig(**settings), tmp_path, "run", events.append, lambda: gives_up)
        with suppress(ZeroDivisionError), profiler:
            for step in of:
                profiler.before(step, jnp.float32(step), meter)
            if error is not None:
                raise error
        return calls, [(event.kind, event.step, dict(event.data)) for event in events], meter

    return go


def test_each_trace_has_a_folder_and_an_event(run):
    calls, events, meter = run(at=(3, 8), steps=2)
    assert calls == [("start", "3"), ("stop", "3"), ("start", "8"), ("stop", "8")]
    done = [(kind, step, data["page"], data["attributed"]) for kind, step, data in events]
    assert sorted(done) == [  # in the order in which their pages were made, two at once
        ("profile", 3, "p", 1.0),
        ("profile", 8, "p", 1.0),
    ]
    assert meter.flushed == 4  # only where a trace begins or ends
    assert meter.paused == 8


@pytest.mark.parametrize(
    ("failure", "calls", "reason"),
    [
        ({"start": RuntimeError("no profiler here\nmore")}, 1, "no profiler here"),
        ({"stop": OSError("disk full")}, 3, "disk full"),
        ({"answer": "nothing"}, 2, "its process ended with code 0"),
        ({"answer": "3"}, 2, "its process ended with code 0"),
        ({"answer": json.dumps({"reason": "damaged"})}, 2, "damaged"),
        ({"of": range(5)}, 2, "the run ended before its steps did"),
        ({"seconds": 3, "gives_up": True}, 2, "the run ended before the page was made"),
        ({"seconds": 3, "error": ZeroDivisionError()}, 2, "the run ended before the page was made"),
    ],
    ids=["start", "stop", "page", "no object", "reduction", "end", "signal", "error"],
)
def test_a_failure_is_an_event_and_nothing_more(run, failure, calls, reason):
    began = time.monotonic()
    called, events, _ = run(at=(4,), steps=2, **failure)
    assert "seconds" not in failure or time.monotonic() - began < failure["seconds"], "neither a signal nor an error waits for pages"
    assert len(called) == calls
    ((kind, step, data),) = events
    assert (kind, step) == ("profile", 4)
    assert reason in data["reason"]
    assert "\n" not in data["reason"]


@pytest.mark.parametrize("back_to", [2, 4, 5], ids=["before", "first", "inside"])
def test_a_trace_that_a_roll_back_interrupts_is_given_up(run, back_to):
    """Its steps would be others than the page says, and many of them."""
    calls, events, _ = run(at=(4,), steps=3, of=[*range(6), *range(back_to, 12)])
    traced = [("start", "4"), ("stop", "4")] if back_to <= 4 else []
    assert calls == [("start", "4"), ("abandon", "4"), *traced]
    assert [data.get("reason", "") for *_, data in events] == [
        f"training went back to step {back_to} before its steps were done",
        *[""] * (len(traced) // 2),
    ]


@pytest.mark.parametrize(("start", "missed"), [(4, False), (5, True), (6, True), (7, False)])
def test_a_trace_inside_whose_steps_the_run_goes_on_is_reported(run, tmp_path, start, missed):
    """Not one that an earlier attempt has recorded."""
    _, events, _ = run(at=(4,), steps=3, of=range(start, 12))
    reasons = [data.get("reason") for _, step, data in events if step == 4]
    assert reasons == ([f"the run went on from step {start}, inside of its steps"] if missed else [None] * (start == 4))
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / TRACE).touch()
    assert "reason" not in str(run(at=(4,), steps=3, of=range(start, 12))[1])


def test_what_is_read_early_is_read_in_all_processes(run):
    """Also in a process whose trace failed: what the meter reads may end training, and a process that goes on alone waits for ever."""
    flushed = [run(at=(4,), steps=2, start=start)[2].flushed for start in (None, OSError("disk full"))]
    assert flushed == [2, 2]


def test_a_wait_for_pages_is_no_hang(run, tmp_path, monkeypatch):
    """The watchdog hears of the loop while the end of the run waits."""
    progress, heard = LoopProgress(), []
    monkeypatch.setattr(progress, "touch", lambda: heard.append(1))
    session = Session(None, None, None, None, SimpleNamespace(on_event=lambda event: None), None, progress=progress)
    of_run = SimpleNamespace(profile=ProfileConfig(at=(1,), steps=1), name="r")
    opened = SimpleNamespace(config=SimpleNamespace(run=of_run), directory=SimpleNamespace(profiles=tmp_path))
    run(at=(4,), seconds=0.3)  # replaces the profiler of jax and the program that makes pages
    with _profiling(opened, session, SimpleNamespace(received=None)) as profiled:
        for step in range(3):
            profiled.profiler.before(step, jnp.float32(step), Pauses())
    assert heard


def test_a_run_that_is_profiled_is_compiled_so_that_gpus_name_every_operation(monkeypatch):
    monkeypatch.setattr("maxlm.hardware.xla_flags.chip_of", lambda kind: chip_named("h200"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    plain, profiled = (tiny_program(1, **sections).compiler_options for sections in ({}, {"run": {"profile": {"at": [2]}}}))
    assert profiled == {**plain, **TRACED} and not plain.keys() & TRACED.keys()
