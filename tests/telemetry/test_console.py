"""Console output: few lines in a log, one live line on a terminal, no unknown figure."""

import io

import pytest
from rich.console import Console

from maxlm.telemetry.console import ConsoleObserver, Pace, describe
from maxlm.telemetry.formatting import sentence
from maxlm.telemetry.observer import Event


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def observer(total, **kwargs):
    screen, clock = io.StringIO(), Clock()
    console = Console(file=screen, width=kwargs.pop("width", 80), **kwargs)
    return ConsoleObserver(total, console=console, clock=clock), screen, clock


def test_a_log_gets_the_first_line_one_in_ten_seconds_and_the_last(record):
    console, screen, clock = observer(100)
    for step in range(1, 101):
        console.on_step(record(step))
        clock.now += 1.0
    console.close()
    said = [line.split("/")[0] for line in screen.getvalue().splitlines()]
    assert said == [f"step {step}" for step in (1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100)]


def test_a_run_that_ends_early_says_its_last_step_once(record):
    console, screen, _ = observer(100)
    for step in (1, 2, 3):
        console.on_step(record(step))
    console.close()
    console.close()
    assert [line.split("/")[0] for line in screen.getvalue().splitlines()] == ["step 1", "step 3"]


def test_a_log_line_is_one_line_without_control_codes(record):
    console, screen, _ = observer(10**9, width=20)
    console.on_step(record(1, mfu=0.4))
    console.on_event(Event("stop", 1, data={"reason": "[bold]unhealthy[/bold]", "message": "x" * 300}))
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2
    assert "[bold]unhealthy[/bold]" in lines[1]  # text is not markup
    assert "\x1b" not in screen.getvalue()


def test_mfu_is_named_only_where_known(record):
    assert not any("MFU" in piece for piece in describe(record(1), 10, 5.0))
    assert "MFU 41.2%" in describe(record(1, mfu=0.412), 10, 5.0)


def test_the_line_says_what_the_issue_asks_for(record):
    pieces = describe(record(1200, loss=3.14159, tokens_per_s=61234.5, step_time_s=0.1, data_wait_s=0.002), 5000, 192.4)
    assert pieces == ["step 1,200/5,000", "loss 3.142", "61,234 tokens/s", "data wait 2.0%", "3 min 12 s left"]


@pytest.mark.parametrize("width", [30, 45, 60, 80, 120, 200])
def test_the_live_line_fits_any_terminal(record, width):
    console, screen, _ = observer(1000, width=width, force_terminal=True, color_system=None)
    console.on_step(record(500, mfu=0.4))
    console.on_event(Event("save", 500))
    console.close()
    text = screen.getvalue()
    assert "Saved step 500" in text
    assert "step 500/1,000" in text
    assert text.endswith("\x1b[?25h")  # the cursor is given back
    drawn = Console(width=width, color_system=None).render_lines(console_line(record, width), pad=False)
    assert len(drawn) == 1


def console_line(record, width):
    console, _, _ = observer(1000, width=width, force_terminal=True, color_system=None)
    console._record = record(500, mfu=0.4)
    return console._render()


def test_other_processes_are_silent(record):
    screen = io.StringIO()
    console = ConsoleObserver(10, primary=False, console=Console(file=screen, force_terminal=True))
    console.on_event(Event("start", 0))
    console.on_step(record(1))
    console.close()
    assert screen.getvalue() == ""


def test_another_process_tells_of_the_samples_that_it_alone_left_out():
    screen = io.StringIO()
    console = ConsoleObserver(10, primary=False, console=Console(file=screen))
    console.on_event(Event("alarm", 3, data={"cause": "bad_chunk", "reason": "2 samples were left out"}))
    assert screen.getvalue() == "Alarm at step 3: 2 samples were left out\n"


def test_time_left_counts_what_the_wall_clock_sees(record):
    clock = Clock()
    pace = Pace(100, clock)
    pace.saw(record(1, step_time_s=0.5))
    assert pace.seconds_left() == pytest.approx(99 * 0.5)
    clock.now = 98.0  # 49 steps in 98 s: saves and evaluations make a step cost 2 s, whatever step_time_s says
    pace.saw(record(50, step_time_s=0.5))
    assert pace.seconds_left() == pytest.approx(100.0)
    clock.now += 10
    assert pace.seconds_left() == pytest.approx(90.0)
    clock.now += 1000
    assert pace.seconds_left() == 0.0


def test_the_end_is_said_once_and_last(record):
    """In a log the last step stood below "Stopped", which said again what "Told to stop" had said."""
    console, screen, _ = observer(100)
    for step in (1, 2, 3):
        console.on_step(record(step))
    console.on_event(Event("preempt", 3, data={"reason": "stopped by SIGTERM"}))
    console.on_event(Event("stop", 3, data={"reason": "preempted", "message": "stopped by SIGTERM"}))
    console.close()
    first, last, stopped = screen.getvalue().splitlines()
    assert (first.split("/")[0], last.split("/")[0]) == ("step 1", "step 3")
    assert stopped == "Stopped at step 3 (preempted): stopped by SIGTERM; the same command continues it"
    interrupted = sentence(Event("stop", 3, data={"reason": "interrupted", "message": "stopped by SIGINT"}))
    assert interrupted == "Stopped at step 3 (interrupted): stopped by SIGINT; the same command continues it"


def test_a_terminal_that_cannot_redraw_gets_lines(record, monkeypatch):
    """As the shell of an editor is."""
    monkeypatch.setenv("TERM", "dumb")
    console, screen, _ = observer(100, force_terminal=True, color_system=None)
    console.on_step(record(1))
    assert screen.getvalue().startswith("step 1/100")
