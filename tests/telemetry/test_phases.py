"""Before the first step a user sees what is going on, from the first second on."""

import io
import subprocess
import sys
import time

import fork_server
import pytest
from rich.console import Console
from small_run import command, environment, make_workspace

from maxlm.telemetry.phases import Phases


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


def phases(**kwargs):
    screen, clock = io.StringIO(), Clock()
    return Phases(Console(file=screen, width=80, **kwargs), clock), screen, clock


def test_a_log_gets_a_line_as_each_phase_begins():
    say, screen, _ = phases()
    with say("reading the data"):
        assert screen.getvalue() == "reading the data ...\n"
    with say("compiling the step"):
        pass
    assert screen.getvalue() == "reading the data ...\ncompiling the step ...\n"


def test_a_terminal_gets_a_spinner_and_the_time_of_what_took_long():
    say, screen, clock = phases(force_terminal=True, color_system=None)
    with say("reading the data"):
        pass
    with say("compiling the step"):
        clock.now += 12.3
    said = screen.getvalue()
    assert "compiling the step: 12.3 s\n" in said
    assert "reading the data: " not in said
    assert said.rstrip().endswith("s")
    assert "\x1b[?25h" in said  # the cursor is given back


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_ends_its_phase(terminal):
    say, screen, clock = phases(force_terminal=terminal)
    with pytest.raises(ValueError, match="no"), say("reading the data"):
        clock.now += 5
        raise ValueError("no")
    assert "5.0 s" not in screen.getvalue()
    assert not say.console._live_stack if terminal else True


def test_other_processes_are_silent():
    say, screen, _ = phases()
    say.primary = False
    with say("reading the data"):
        say.say("x")
    assert screen.getvalue() == ""


def test_the_time_is_counted_from_the_beginning():
    say, _, clock = phases()
    clock.now += 7
    assert (say.began, say.seconds()) == (5.0, 7.0)


def test_phases_need_nothing_slow():
    code = "import sys, maxlm.telemetry.phases; assert not {'jax', 'numpy', 'tensorboardX'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_line_comes_before_jax_and_every_phase_is_said(tmp_path):
    """Phases of a real run are printed in order, and no logger writes to the console."""
    make_workspace(tmp_path)
    began = time.monotonic()
    process = fork_server.Popen(
        command("train", "small.yml", "train.steps=5"),
        cwd=tmp_path,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first, first_s = process.stdout.readline(), time.monotonic() - began
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert first == "importing libraries ...\n"
    assert first_s < (time.monotonic() - began) / 2
    lines = out.splitlines()
    at = [lines.index(f"{doing} ...") for doing in ("looking for devices", "preparing the data", "reading the data", "compiling the step")]
    started = next(
        i for i, line in enumerate(lines) if line.startswith("Started at step 0 of 5 on 1 x cpu: 39,072 parameters, 1,280 tokens")
    )
    assert at == sorted(at)
    assert at[-1] < started
    assert lines[started].endswith(", in runs/small")
    assert not [line for line in (out + err).splitlines() if line.startswith(("INFO:", "WARNING:", "ERROR:"))]
