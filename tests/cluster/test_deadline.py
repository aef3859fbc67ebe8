"""A signal ends a command within its limit, with the right code and one line, whatever its threads do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from small_run import child

from maxlm.base.errors import UserError
from maxlm.cluster import deadline

COMMAND = """
import ctypes, signal, sys, threading, time
from maxlm import __main__, cli
from maxlm.cluster import deadline
lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)

def command():
    print("ready", flush=True)
    {body}

cli.main = command
__main__.main()
"""
SAVING = "[signal.signal(number, lambda *_: None) for number in deadline.SIGNALS]\n    with deadline.allow(deadline.SAVE): "
IN_PYTHON = "time.sleep(60)"
IN_C = "threading.Event().wait()"  # Python's handler runs, and nothing comes of it
IN_C_WITH_THE_LOCK = "lock(mutex), lock(mutex)"  # no handler runs, and no thread: a C function waits and keeps the interpreter's lock
GRACE = 1.5  # seconds


@pytest.fixture
def run():
    """Starts a command with `body`, and hands it over once it runs."""
    started = []

    def start(body):
        process = fork_server.Popen(
            [sys.executable, "-c", COMMAND.format(body=body)],
            env={**os.environ, deadline.GRACE_VARIABLE: str(GRACE)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process, *numbers, code):
    """Return stderr, and the seconds from the last signal to the end."""
    for index, number in enumerate(numbers):
        time.sleep(0.3 if index else 0)  # as a person does it
        process.send_signal(number)
        began = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    return said, time.monotonic() - began


@pytest.mark.parametrize("number", deadline.SIGNALS)
def test_a_command_that_has_nothing_to_save_ends_with_one_line(run, number):
    assert end(run(IN_PYTHON), number, code=3)[0] == f"maxlm: stopped by {number.name}\n"


def test_a_command_that_computes_in_c_ends_as_well(run):
    said, seconds = end(run(IN_C_WITH_THE_LOCK), signal.SIGINT, code=3)
    assert said == "maxlm: stopped by SIGINT\n"
    assert seconds > deadline.PROMPT_SECONDS


def test_a_module_is_imported_to_the_end_before_a_signal_raises(run, tmp_path):
    """An exception within the import of an extension in C may make it abort or crash: then there is neither the line nor the code."""
    (tmp_path / "slow.py").write_text(f"import time\ntry: time.sleep(0.3)\nexcept BaseException: open({str(tmp_path / 'raised')!r}, 'w')\n")
    said, seconds = end(run(f"sys.path.append({str(tmp_path)!r}); import slow; time.sleep(60)"), signal.SIGTERM, code=3)
    assert said == "maxlm: stopped by SIGTERM\n"
    assert seconds < deadline.PROMPT_SECONDS  # so the monitor did not end it
    assert not (tmp_path / "raised").exists()


# By a C extension that was being imported; Python makes a RuntimeError of what is raised while it makes a class.
PRINTED = "sys.excepthook(*sys.exc_info())"
WRAPPED = "\n        try: raise RuntimeError('Error calling __set_name__')\n        except RuntimeError: " + PRINTED


@pytest.mark.parametrize("printed", ["pass", PRINTED, WRAPPED])
def test_what_a_library_makes_of_the_signal_does_not_matter(run, printed):
    body = f"\n    try: time.sleep(60)\n    except KeyboardInterrupt:\n        {printed}\n        raise ImportError('a worker is gone')"
    assert end(run(body), signal.SIGTERM, code=3)[0] == "maxlm: stopped by SIGTERM\n"


@pytest.mark.parametrize("hang", [IN_C, IN_C_WITH_THE_LOCK])
def test_a_save_that_hangs_ends_after_the_grace_time_and_shows_where(run, hang):
    said, seconds = end(run(SAVING + hang), signal.SIGTERM, code=5)
    assert "most recent call first" in said
    assert " in command\n" in said
    assert seconds > GRACE


def test_a_save_in_time_ends_as_it_wants(run):
    said, _ = end(run(SAVING + "time.sleep(0.5)\n    sys.exit(3)"), signal.SIGHUP, code=3)
    assert "SIGHUP: saving, and ending within 1.5 s" in said


def test_a_second_interrupt_ends_at_once(run):
    said, seconds = end(run(SAVING + IN_C_WITH_THE_LOCK), signal.SIGINT, signal.SIGINT, code=3)
    assert said.endswith("maxlm: stopped by SIGINT, twice: not saved\n")
    assert seconds < GRACE


def test_without_a_hang_there_is_no_file_for_stacks(run, tmp_path):
    body = f"deadline.stacks_to(__import__('pathlib').Path({str(tmp_path / 'stacks.txt')!r}))\n    " + SAVING
    end(run(body + "time.sleep(0.5)\n    sys.exit(3)"), signal.SIGTERM, code=3)
    assert not (tmp_path / "stacks.txt").exists()


def test_the_stacks_are_kept_in_a_file(run, tmp_path):
    body = f"deadline.stacks_to(__import__('pathlib').Path({str(tmp_path / 'stacks.txt')!r}))\n    " + SAVING + IN_C
    end(run(body), signal.SIGTERM, code=5)
    assert " in command\n" in (tmp_path / "stacks.txt").read_text()


def test_the_guardian_ends_with_a_command_that_is_killed(run):
    process = run(IN_PYTHON)
    monitor = child(process)
    process.kill()
    process.communicate(timeout=30)  # ends with the monitor, which holds stderr, too
    stat = Path(f"/proc/{monitor}/stat")
    until = time.monotonic() + 30
    while stat.exists() and " Z " not in stat.read_text():
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.02)


def test_a_command_whose_guardian_is_killed_ends_with_its_own_code(run):
    process = run("time.sleep(1)\n    with deadline.allow(deadline.SAVE): sys.exit(4)")
    os.kill(child(process), signal.SIGKILL)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 4


def test_a_command_that_is_done_ends_although_a_thread_of_a_library_does_not(run):
    process = run("threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit(3)")
    began = time.monotonic()
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 3
    assert 1 < time.monotonic() - began < deadline.LEFT_SECONDS + 10


@pytest.mark.parametrize("text", ["soon", "0", "nan", "inf"])
def test_a_grace_time_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(deadline.GRACE_VARIABLE, text)
    with pytest.raises(UserError, match=r"MAXLM_GRACE_SECONDS = .*number of seconds"):
        deadline.grace_seconds()


def test_a_command_that_nohup_starts_goes_on_when_its_terminal_is_closed():
    code = "import signal, sys; from maxlm.cluster import deadline; sys.exit(signal.SIGHUP in deadline.SIGNALS)"
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", code]
    assert [subprocess.run(command, check=False).returncode for command in (ignoring, ignoring[4:])] == [0, 1]


def limited(body, seconds=3):
    """A command whose silence is limited while it trains, as the watchdog does it."""
    return SAVING + f"\n        deadline.limit_silence({seconds})\n        {body}"


def test_a_process_that_holds_the_interpreter_lock_is_ended_and_shown(run):
    """No thread of it can do that, and no signal came."""
    process = run(limited(IN_C_WITH_THE_LOCK))
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 5, said
    assert "hung: no Python thread has run for" in said
    assert " in command\n" in said


def test_signs_of_life_and_a_stopped_process_are_no_hang(run):
    process = run(limited("\n        for _ in range(10): deadline.alive(); time.sleep(0.5)\n        sys.exit(3)", 3))
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 3


def test_a_hang_that_is_known_is_shown_at_once_and_ended_later(run, tmp_path):
    stacks = tmp_path / "stacks.txt"
    body = (
        f"deadline.stacks_to(__import__('pathlib').Path({str(stacks)!r}))\n    "
        + SAVING
        + "deadline.hung(2); time.sleep(1); "
        + IN_C_WITH_THE_LOCK
    )
    began = time.monotonic()
    process = run(body)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 5
    assert time.monotonic() - began > 2
    assert said.count("the stacks of all threads") == 1
    assert " in command\n" in stacks.read_text()


def test_stacks_are_shown_before_a_process_that_hangs_can_end(run, tmp_path):
    """The monitor looks every two seconds, and the watchdog may end the process sooner."""
    stacks = tmp_path / "stacks.txt"
    process = run(f"deadline.stacks_to(__import__('pathlib').Path({str(stacks)!r}))\n    deadline.hung(60); __import__('os')._exit(5)")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 5 and said.count("the stacks of all threads") == 1
    assert " in command\n" in stacks.read_text()


def test_sigabrt_from_outside_ends_a_process_whose_aborts_are_delayed(run):
    """Also while it holds the interpreter's lock. Before the delay is over the process may hear why."""
    processes, began = [run(f"deadline.delay_aborts(); {busy}") for busy in (IN_PYTHON, IN_C_WITH_THE_LOCK)], time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGABRT)
    time.sleep(max(0.0, began + deadline.ABORT_SECONDS - 0.5 - time.monotonic()))
    assert [process.poll() for process in processes] == [None, None]
    for process in processes:
        assert process.wait(30) == -signal.SIGABRT
        assert time.monotonic() - began >= deadline.ABORT_SECONDS
        process.communicate()


def test_delayed_aborts_disturb_no_process_that_blocks_all_signals(run):
    body = "deadline.delay_aborts(); signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(5)"
    process = run(body)
    assert process.wait(30) == 0
    process.communicate()
