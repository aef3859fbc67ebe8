"""Traces of a running job: begun and ended where asked, and no failure of theirs reaches the run."""

import json
import sys

import jax.numpy as jnp
import pytest

from maxlm.config.reliability import ProfileConfig
from maxlm.training import profiling
from maxlm.training.profiling import RunProfiler


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

    def go(start=None, stop=None, answer='{"page": "p", "attributed": 1.0}', until=12, seconds=0, gives_up=False, **settings):
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
        profiler = RunProfiler(ProfileConfig(**settings), tmp_path, "run", events.append, lambda: gives_up)
        for step in range(until):
            profiler.before(step, jnp.float32(step), meter)
        profiler.close()
        return calls, [(event.kind, event.step, dict(event.data)) for event in events], meter

    return go


def test_each_trace_has_a_folder_and_an_event(run):
    calls, events, meter = run(at=(3, 8), steps=2)
    assert calls == [("start", "3"), ("stop", "3"), ("start", "8"), ("stop", "8")]
    assert [(kind, step, data["page"], data["attributed"]) for kind, step, data in events] == [
        ("profile", 3, "p", 1.0),
        ("profile", 8, "p", 1.0),
    ]
    assert meter.flushed == 4  # only where a trace begins or ends
    assert meter.paused == 8


@pytest.mark.parametrize(
    ("failure", "calls", "reason"),
    [
        ({"start": RuntimeError("no profiler here\nmore")}, 1, "no profiler here"),
        ({"stop": OSError("disk full")}, 2, "disk full"),
        ({"answer": "nothing"}, 2, "its process ended with code 0"),
        ({"answer": json.dumps({"reason": "damaged"})}, 2, "damaged"),
        ({"until": 5}, 1, "the run ended before its steps did"),
        ({"seconds": 3, "gives_up": True}, 2, "the run ended before the page was made"),
    ],
    ids=["start", "stop", "page", "reduction", "end", "signal"],
)
def test_a_failure_is_an_event_and_nothing_more(run, failure, calls, reason):
    called, events, _ = run(at=(4,), steps=2, **failure)
    assert len(called) == calls
    ((kind, step, data),) = events
    assert (kind, step) == ("profile", 4)
    assert reason in data["reason"]
    assert "\n" not in data["reason"]
