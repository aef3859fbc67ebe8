"""The supervisor: what is started again, what is not, and what it says."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest
from small_run import command, environment, free_port

from maxlm.cluster import progress_file
from maxlm.supervision import launch
from maxlm.supervision.launch import End, Supervisor
from maxlm.telemetry.lifetime import read_processes

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from maxlm.cluster import progress_file
told = progress_file.current()
if told.gave_up: Path("told").write_text(told.gave_up); sys.exit(6)
tries = Path("tries")
number = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (number + 1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # as a command of maxlm does
def came(step, hosts=("a", "b")):
    progress_file.record(hosts=hosts)
    progress_file.record(step=step)
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """(exit code, lines said, attempts made) of a script under the supervisor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": fork_server.Popen}))

    def run(script, restarts=5, backoff=0.01):
        said = []
        code = Supervisor([sys.executable, "-c", PRELUDE + script], restarts=restarts, backoff=backoff, say=said.append).run()
        return code, said, len((tmp_path / "tries").read_text())

    return run


REGROUP = "progress_file.record(absent=[2, 5])\nif number in (1, 3): progress_file.record(regroup=True); sys.exit(3)\n"


def test_a_run_that_joins_anew_is_started_at_once_and_again_and_again(supervise):
    """It counts neither as a restart nor as another end at the same step; and the next attempt knows who was absent."""
    crash = (
        "Path(f'seen{number}').write_text(','.join(map(str, told.absent_before or ())))\ncame(7)\n"
        + REGROUP
        + "sys.exit(1 if number < 4 else 0)"
    )
    code, said, tries = supervise(crash, restarts=2)
    assert (code, tries) == (0, 5)
    assert [line for line in said if "join anew" in line] == ["maxlm launch: the run was saved, and its processes join anew"] * 2
    assert [Path(f"seen{number}").read_text() for number in range(5)] == ["", "2,5", "2,5", "2,5", "2,5"]


def test_joining_anew_uses_up_no_restart_and_is_on_record(supervise):
    """All restarts are left after it, with the first pause; and hosts that do not come are waited for, as they have been there."""
    script = (
        "came(7)\nprogress_file.record(folder=os.getcwd())\nif number == 2: progress_file.record(regroup=True); sys.exit(3)\n"
        "if number == 5: progress_file.record(hosts=()); sys.exit(6)\nsys.exit(0 if number == 6 else 1)"
    )
    code, said, tries = supervise(script, restarts=2)
    assert (code, tries) == (0, 7)
    how = [line.rpartition("; ")[2] for line in said]
    assert how[:2] == how[3:5] == ["restart 1 of 2 in 0.01 s", "restart 2 of 2 in 0.02 s"]
    assert how[5] == "trying again in 0.01 s"
    ends = read_processes(Path("supervisor.jsonl"))
    assert [end.code for end in ends] == [1, 1, 3, 1, 1, 6, 0]
    assert ends[2].reason == "the run was saved, and its processes join anew"


def test_a_crash_is_started_again_and_what_is_done_is_done(supervise):
    code, said, tries = supervise("came(10 * number)\nif number < 2: os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, tries) == (0, 3)
    assert said == [
        "maxlm launch: the run was killed by SIGKILL after step 0; restart 1 of 5 in 0.01 s",
        "maxlm launch: the run was killed by SIGKILL after step 10; restart 1 of 5 in 0.01 s",
    ]


@pytest.mark.parametrize(("code", "words"), [(2, "the input is wrong"), (4, "unhealthy")])
def test_what_would_end_the_same_way_is_not_started_again(supervise, code, words):
    answer, said, tries = supervise(f"came(3)\nsys.exit({code})")
    assert (answer, tries) == (code, 1)
    assert words in said[-1]


def test_a_clock_that_was_set_meanwhile_is_named(supervise, monkeypatch):
    """jax ends all processes of several hosts if the clock of the first is set back, and names no cause."""
    ahead = iter([0.0, 0.0, 3600.0, 0.0])  # beginning and end of two attempts; what follows is recorded only
    real = time.time
    monkeypatch.setattr(launch.time, "time", lambda: real() - next(ahead, 0.0))
    monkeypatch.setattr(Supervisor, "_record", lambda *_: None)
    _, said, _ = supervise("came(7)\nsys.exit(1 if number == 1 else 7 if number == 0 else 0)")
    assert "clock" not in said[0]
    assert "after step 7; this machine's clock was set forward, or the machine was suspended, by 3,600 s meanwhile; restart" in said[1]
    assert "clock was set back by 86,400 s" in str(End(-6, progress_file.Progress(), clock_s=-86400.0))


def test_a_step_that_fails_three_times_is_no_accident(supervise):
    code, said, tries = supervise("came(7)\nprogress_file.record_error(RuntimeError('boom'))\nsys.exit(1)", restarts=50)
    assert (code, tries) == (1, 3)
    assert said[-1].endswith("it has ended after step 7 3 times in a row, so it is no accident; its last error: RuntimeError: boom")


def test_restarts_are_counted_while_there_is_no_progress(supervise):
    """An end at another step is no loop, but only a later step than any before is progress."""
    code, said, tries = supervise("came(9 if number < 2 else 7 + number % 2)\nsys.exit(9)", restarts=4)
    assert (code, tries) == (9, 5)
    assert said[-1].endswith("all 4 restarts since its last progress are used up")


@pytest.mark.soak
def test_losses_with_progress_between_them_are_no_reason_to_give_up(supervise):
    """At Llama 3's rate a job loses eight hosts a day, for weeks."""
    script = "came(1000 * number)\nprogress_file.record_error('lost', 'b (process 1)')\nsys.exit(0 if number == 25 else 6)"
    code, said, tries = supervise(script, restarts=3)
    assert (code, tries) == (0, 26)
    assert all(line.endswith("; lost: b (process 1); restart 1 of 3 in 0.01 s") for line in said)


def test_a_host_that_is_not_back_yet_is_waited_for(supervise):
    """However often, once all have been there; before that it may never come. Wrong input is never tried again."""
    script = "if number == 0: came(5)\nsys.exit([6, 6, 6, 6, 6, 0][number])"
    code, said, tries = supervise(script, restarts=1)
    assert (code, tries) == (0, 6)
    assert said[1] == "maxlm launch: the run waited for hosts that did not come; trying again in 0.01 s"
    Path("tries").unlink()
    assert supervise("sys.exit(6)", restarts=4)[::2] == (6, 5)
    Path("tries").unlink()
    assert supervise("if number == 0: came(5)\nsys.exit([6, 2][number])")[::2] == (2, 2)


LOST = "came(7)\nfor lost in ('b (process 1)', ''): progress_file.record_error('lost', lost)\nsys.exit(6)"


@pytest.mark.parametrize(
    ("code_there", "tries"),
    [("-11", 3), ("1", 3), ("-9", 4), ("-15", 4), ("7", 4), ("6", 4), ("None", 4), ("-11 if number == 1 else -9", 4)],
)
def test_a_lost_host_is_named_and_one_that_crashes_again_and_again_is_no_accident(supervise, code_there, tries):
    """One that is killed may come back: its own supervisor starts it again, too. The first reason on record is the cause; the errors that
    follow from it change nothing.
    """
    told = f"before = {code_there}\nif number and before is not None: progress_file.record(codes_before={{'1': before}})\n"
    code, said, made = supervise(told + LOST, restarts=3)
    assert (code, made) == (6, tries)
    assert "after step 7; lost: b (process 1); restart 1 of 3" in said[0]
    assert ("it has ended after step 7 3 times in a row" in said[-1]) == (tries == 3)


def test_each_attempt_knows_how_the_one_before_ended_here(supervise):
    """Not one that waited for hosts in vain between them."""
    seen = "Path(f'seen{number}').write_text(str(told.last_code))\n"
    script = seen + "if number == 0: came(5); os.kill(os.getpid(), signal.SIGKILL)\nif number == 2: came(6)\nsys.exit([0, 6, 1, 0][number])"
    assert supervise(script)[::2] == (0, 4)
    assert [Path(f"seen{number}").read_text() for number in range(4)] == ["None", "-9", "-9", "1"]


def test_who_gives_up_tells_the_other_hosts_and_who_is_told_ends(supervise):
    """They may have logged another step, and count other ends. There is nobody to tell for a process that was alone, or was told itself."""
    crash = "progress_file.record_error(RuntimeError('bö\\0om'))\nsys.exit(1)"
    assert supervise(f"came(7)\n{crash}")[::2] == (1, 3)
    assert Path("told").read_text().endswith("3 times in a row, so it is no accident; its last error: RuntimeError: b?om")
    for script, code, tries in ((f"came(7, 'a')\n{crash}", 1, 3), ("came(7)\nsys.exit(4)", 4, 1)):
        Path("tries").unlink()
        Path("told").unlink(missing_ok=True)
        assert supervise(script)[::2] == (code, tries)
        assert not Path("told").exists()
    Path("tries").unlink()
    told = "if number == 0: came(5)\nif number == 2: progress_file.record(final=True, error='a has given up')\nsys.exit(6)"
    code, said, tries = supervise(told)
    assert (code, tries, Path("told").exists()) == (6, 3, False)
    assert said[-1] == "maxlm launch: the run ended with 6; not started again: a has given up"


def test_a_replaced_host_that_crashes_before_it_joins_tells_the_others(supervise):
    """They wait for it. One that only waited for hosts in vain has nobody to tell."""
    assert supervise("progress_file.record(process=3)\nsys.exit(1)")[::2] == (1, 3)
    assert Path("told").exists()
    Path("tries").unlink()
    Path("told").unlink()
    assert supervise("progress_file.record(process=3)\nsys.exit(6)", restarts=1)[::2] == (6, 2)
    assert not Path("told").exists()


def test_a_host_that_is_lost_before_the_first_step_is_named_and_counted(supervise):
    """Not taken for one that has not come, for which this one would wait for ever."""
    lost = "progress_file.record(lost=('b (process 1)',))\nsys.exit(6 if number < 4 else 2)"
    code, said, tries = supervise(f"if number == 0: came(5); sys.exit(6)\n{lost}", restarts=1)
    assert (code, tries) == (6, 2)
    assert said[-1].startswith("maxlm launch: the run ended with 6; lost: b (process 1); not started again: all 1 restarts")


def test_one_that_is_killed_when_all_was_done_is_not_started_again(supervise):
    """The others have ended, and it would wait for them for ever. Alone it can do what is left."""
    killed = "progress_file.record(concluded=True, reported=True, folder=os.getcwd())\nos.kill(os.getpid(), signal.SIGKILL)"
    code, said, tries = supervise(f"came(7)\n{killed}")
    assert (code, tries, Path("told").exists()) == (0, 1, False)
    assert said[-1].endswith("was killed by SIGKILL after step 7; not started again: all is trained and saved on all hosts")
    Path("tries").unlink()
    assert supervise(f"if number: sys.exit(0)\ncame(7, 'a')\n{killed}")[::2] == (0, 2)
    said = supervise(f"came(7)\n{killed}".replace("reported=True, ", ""))[1]
    assert said[-1].endswith(f"on all hosts; the report was not written: make it with `maxlm report {Path.cwd()}`")


def test_why_a_process_could_not_join_is_said(supervise):
    taken = "progress_file.record_error('process 1 is not lost.')\nsys.exit(6)"
    code, said, tries = supervise(taken, restarts=1)
    assert (code, tries) == (6, 2)
    assert said[0] == "maxlm launch: the run could not join the other hosts: process 1 is not lost; restart 1 of 1 in 0.01 s"


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_waits_is_told_by_one_that_gives_up(tmp_path, number):
    """Over the real rendezvous: that process crashes before it joins, and the other would wait for it for ever."""
    join = "from maxlm.cluster import cluster\nwith cluster.joined(dict(a.split('=') for a in sys.argv[1:]), print): time.sleep(60)"
    crashes = "if progress_file.current().gave_up is None:\n    progress_file.record(hosts=('a', 'b'), step=7); sys.exit(1)\n" + join
    place, imports = (
        [f"coordinator=localhost:{free_port()}", "process_count=2"],
        "import os, sys, time\nfrom maxlm.cluster import progress_file\n",
    )
    program = "import sys\nfrom maxlm.supervision.launch import Supervisor\n"
    program += "sys.exit(Supervisor(sys.argv[1:], restarts=3, backoff=0.1, say=print).run())"
    runs = [
        fork_server.Popen(
            [sys.executable, "-c", program, sys.executable, "-c", imports + script, *place, f"process_id={process}"],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for script, process in ((crashes, number), (join, 1 - number))
    ]  # fmt: skip
    said = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [1, 6], said
    line = f"(process {number}) has given up: it has ended after step 7 3 times in a row"
    assert "not started again: the launcher of " in said[1] and line in said[1], said[1]


def test_a_hang_that_may_pass_is_told_as_such(supervise):
    """To the supervisors of the others, for which its process was lost: they go by the exit code of the attempt before."""
    seen = "Path(f'seen{number}').write_text(str(told.last_code))\n"
    script = "came(number)\nprogress_file.record(passing=number == 0)\nsys.exit([5, 5, 0][number])"
    assert supervise(seen + script)[::2] == (0, 3)
    assert [Path(f"seen{number}").read_text() for number in range(3)] == ["None", "7", "5"]


@pytest.mark.parametrize(("there", "tries"), [("-9", 5), ("-11", 3)])
def test_a_lost_process_is_known_by_the_number_it_was_started_with(supervise, there, tries):
    """Two processes on one host, and the places of all change while another is absent: no neighbour's code is taken for its own."""
    script = (
        "two = number % 2\n"
        "progress_file.record(hosts=('a', 'b', 'b')[not two:], numbers=(0, 1, 2)[not two:], step=7, lost=(f'b (process {1 + two})',))\n"
        f"if number: progress_file.record(codes_before={{str(place): code for place, code in ((two, OTHER), (two + 1, {there}))}})\n"
        "sys.exit(6)"
    )
    other = {"-9": "-11", "-11": "-9"}[there]
    assert supervise(script.replace("OTHER", other), restarts=4)[::2] == (6, tries)


def test_losing_one_host_after_the_other_is_no_crash_loop(supervise):
    script = "came(7, 'abcd')\nprogress_file.record_error('lost', f'host{number} (process {number})')\nsys.exit(0 if number == 4 else 6)"
    assert supervise(script)[::2] == (0, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_once_and_ends_both(tmp_path, number):
    """A save takes its time; the supervisor waits for it and starts nothing again."""
    script = PRELUDE + (
        "def asked(number, frame):\n    time.sleep(0.5); Path('saved').write_text(signal.Signals(number).name); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, asked); signal.signal(signal.SIGINT, asked)\nPath('ready').touch()\ntime.sleep(60)"
    )
    program = (
        "import sys\nfrom maxlm.supervision.launch import Supervisor\n"
        f"sys.exit(Supervisor([sys.executable, '-c', {script!r}], restarts=3, backoff=1, say=print).run())"
    )
    process = fork_server.Popen([sys.executable, "-c", program], cwd=tmp_path, start_new_session=True)
    until = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(30) == 3
    assert (tmp_path / "saved").read_text() == number.name
    assert (tmp_path / "tries").read_text() == "x"


NOT_YET = "Path('ready').touch(); time.sleep(60)"
BETWEEN = "Path('ready').touch(); sys.exit(1)"
IN_ITS_SAVE = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); Path('ready').touch(); time.sleep(60)"


@pytest.mark.parametrize(("script", "code"), [(NOT_YET, 3), (BETWEEN, 3), (IN_ITS_SAVE, 1)], ids=["cannot save yet", "between", "crashes"])
def test_who_is_stopped_with_nothing_to_save_may_go_on(tmp_path, script, code):
    """Exit code 3 also where the run dies of the signal, as it does before its first step, or is not running; not where its save fails."""
    program = (
        "import sys\nfrom maxlm.supervision.launch import Supervisor\n"
        f"run = [sys.executable, '-c', {PRELUDE + script!r}]\n"
        "sys.exit(Supervisor(run, restarts=3, backoff=60, say=lambda line: print(line, flush=True)).run())"
    )
    process = fork_server.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    if script == BETWEEN:
        assert "restart 1 of 3 in 60 s" in process.stdout.readline()
    until = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code


def test_from_the_command_line(tmp_path):
    """An error of the input is said once, by the command itself, and its exit code is handed on."""
    answer = fork_server.run(
        command("launch", "--restarts", "3", "--", "train", "no-such-config"),
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr.count("no-such-config") == 1
    assert "not started again: the input is wrong" in answer.stderr


def test_kills_from_outside_are_no_crash_loop(supervise):
    """However often before the first step; the limit of restarts holds. A run that crashes by a signal of its own is a crash."""
    kill = "if number < 4: os.kill(os.getpid(), [signal.SIGKILL, signal.SIGTERM][number % 2])"
    assert supervise(kill)[::2] == (0, 5)
    Path("tries").unlink()
    assert supervise("os.kill(os.getpid(), signal.SIGKILL)", restarts=4)[::2] == (1, 5)
    Path("tries").unlink()
    assert supervise("import faulthandler; faulthandler.disable(); os.kill(os.getpid(), signal.SIGSEGV)")[::2] == (1, 3)


@pytest.mark.parametrize(
    ("code", "passing", "tries"), [(7, False, 5), (5, False, 3), (5, True, 5), (1, True, 3)], ids=["unavailable", "hung", "waits", "crash"]
)
def test_what_may_pass_is_tried_again(supervise, code, passing, tries):
    """Storage that is away may come back, however often it was not there, or kept a save waiting; what hangs elsewhere at one step three
    times is no accident.
    """
    script = f"came(3)\nprogress_file.record(passing={passing})\nsys.exit({code})"
    made = supervise(script, restarts=4)
    assert made[::2] == (code, tries)
    assert "in 0.01 s" in made[1][0] and "in 0.02 s" in made[1][1], "it backs off"


def launcher(tmp_path, script, **settings):
    """`launch` of `script` in a process of its own, once the script is ready."""
    program = (
        "import sys\nfrom maxlm.supervision import launch\n"
        + "".join(f"launch.{name} = {value}\n" for name, value in settings.items())
        + f"run = [sys.executable, '-c', {PRELUDE + script!r}]\n"
        "sys.exit(launch.Supervisor(run, restarts=3, backoff=0.1, say=lambda line: print(line, flush=True)).run())"
    )
    environ = {**os.environ, "MAXLM_GRACE_SECONDS": "1"}
    process = fork_server.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return process


def test_a_run_that_does_not_end_is_killed(tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); Path('ready').touch(); time.sleep(60)"
    process = launcher(tmp_path, script, MARGIN_SECONDS=1)
    process.send_signal(signal.SIGTERM)
    assert "the run did not end within 2 s of SIGTERM and was killed; not started again" in process.communicate(timeout=30)[0]
    assert process.returncode == 5


def test_a_run_that_is_stopped_by_sigstop_is_started_again(tmp_path):
    """The other hosts of a cluster wait for it, and it does not know."""
    script = "Path('ready').touch()\nif number == 0: os.kill(os.getpid(), signal.SIGSTOP)"
    process = launcher(tmp_path, script, FROZEN_SECONDS=1)
    assert "the run was stopped (SIGSTOP) for 1 s and was killed; restart 1 of 3" in process.communicate(timeout=30)[0]
    assert process.returncode == 0


def test_a_run_that_is_stopped_by_sigstop_hears_of_the_end(tmp_path):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); Path('ready').touch(); os.kill(os.getpid(), signal.SIGSTOP)"
    process = launcher(tmp_path, script)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 3


def test_a_run_ends_with_its_launcher(tmp_path):
    """Even if the launcher dies by kill -9: the run saves and ends in order."""
    script = (
        "from maxlm import __main__, cli\nfrom maxlm.cluster import deadline\n"
        "def command():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (Path('ended').touch(), sys.exit(3)))\n"
        "    with deadline.allow(deadline.SAVE): Path('ready').touch(); time.sleep(60)\n"
        "cli.main = command; __main__.main()"
    )
    process = launcher(tmp_path, script)
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < until, "the run lives on"
        time.sleep(0.02)


def test_a_run_that_dies_without_an_outcome_keeps_its_progress(supervise):
    """Killed, or crashed outside Python: the steps are on record, and what the last crash left is not attributed to the next."""
    crash = "came(7)\nif number == 0: progress_file.record_error('boom')\nimport faulthandler; os.kill(os.getpid(), signal.SIGSEGV)"
    code, said, tries = supervise(crash)
    assert (code, tries) == (1, 3)
    assert "was killed by SIGSEGV after step 7; restart 1 of 5" in said[0]
    assert said[-1].endswith("its last error: none on record, see its output")


@pytest.mark.parametrize(
    ("raises", "code", "error"),
    [
        ("raise RuntimeError('boom')", 1, "RuntimeError: boom"),
        ("raise UserError('no such field')", 2, "no such field"),
        ("raise OSError(28, 'No space left', 'disk')", 7, "disk: cannot be read or written: No space left."),
    ],
)
def test_a_command_records_why_it_ended(tmp_path, raises, code, error):
    program = (
        "from maxlm import __main__, cli\nfrom maxlm.base.errors import UserError\n"
        f"def fails(**how):\n    {raises}\ncli.app = fails\n__main__.main()"
    )
    path = tmp_path / "progress.json"
    environ = {**os.environ, progress_file.VARIABLE: str(path)}
    answer = fork_server.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (answer.returncode, progress_file.read(path).error) == (code, error), answer.stderr


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("what", ["mkdtemp", "Popen", "pipe"])
def test_a_machine_without_space_memory_or_processes_costs_a_restart(supervise, monkeypatch, what):
    """The supervisor outlives it, and starts the run once there is some again."""
    module, error = {
        "mkdtemp": (launch.tempfile, OSError(errno.ENOSPC, "No space left on device")),
        "Popen": (launch.subprocess, BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
        "pipe": (launch.os, OSError(errno.EMFILE, "Too many open files")),
    }[what]
    failures, real, open_before = iter([error] * 4), getattr(module, what), open_files()

    def fails(*arguments, **settings):
        for one in failures:
            raise one
        return real(*arguments, **settings)

    monkeypatch.setattr(module, what, fails)
    code, said, tries = supervise("came(5)")
    assert (code, tries) == (0, 1)
    assert said[3] == f"maxlm launch: the run could not be started: {error}; restart 4 of 5 in 0.08 s"
    assert open_files() == open_before


def test_a_machine_without_space_is_no_reason_to_give_up_once_all_have_joined(supervise, monkeypatch):
    """The others wait without a limit, and so does this host: 5 minutes of a full disk must not end the job."""
    real, calls = launch.tempfile.mkdtemp, []

    def fails(*arguments, **settings):
        calls.append(None)
        if 2 <= len(calls) <= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **settings)

    monkeypatch.setattr(launch.tempfile, "mkdtemp", fails)
    monkeypatch.setattr(launch, "MAX_BACKOFF_SECONDS", 0.05)
    code, said, tries = supervise("came(5)\nsys.exit(1 if number == 0 else 0)", restarts=2)
    assert (code, tries) == (0, 2)
    assert said[-1].endswith("No space left on device; trying again in 0.05 s")


def test_a_run_that_can_never_be_started_ends(supervise, monkeypatch):
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "python")

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(launch.subprocess, "Popen", fails)
    said = []
    assert Supervisor(["python"], restarts=2, backoff=0.01, say=said.append).run() == 7
    assert said[-1].startswith(f"maxlm launch: the run could not be started: {error}; not started again: all 2 restarts since")


def test_a_signal_ends_the_supervisor_of_a_run_that_could_not_be_started(monkeypatch):
    def fails(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launch.subprocess, "Popen", fails)
    said = []
    assert Supervisor(["python"], restarts=2, backoff=60, say=said.append).run() == 3
    assert said[0].endswith("not started again: SIGTERM was received")


def test_what_is_known_of_the_attempt_before_outlives_one_that_could_not_be_started(supervise, monkeypatch):
    real, made = launch.subprocess.Popen, []

    def fails_once(*arguments, **settings):
        told = progress_file.read(Path(settings["env"][progress_file.VARIABLE]))
        made.append((told.last_code, told.absent_before))
        if len(made) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*arguments, **settings)

    monkeypatch.setattr(launch.subprocess, "Popen", fails_once)
    assert supervise("progress_file.record(absent=[2])\ncame(7)\nsys.exit(1 if number == 0 else 0)")[::2] == (0, 2)
    assert made == [(None, None), (1, (2,)), (1, (2,))]


def test_a_terminal_that_is_gone_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def gone(line):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    script = PRELUDE + "came(5)\nsys.exit(1 if number == 0 else 0)"
    assert Supervisor([sys.executable, "-c", script], restarts=1, backoff=0.01, say=gone).run() == 0


def test_a_record_of_another_version_is_read(tmp_path):
    """maxlm may be upgraded while the supervisor runs. A file that is none says nothing."""
    path = tmp_path / "progress.json"
    path.write_text('{"step": 7, "from_another_version": [1], "hosts": ["a", "b"]}')
    assert progress_file.read(path) == progress_file.Progress(hosts=("a", "b"), step=7)
    path.write_text('{"step": 7, "hosts": ["a", "b"]')
    assert progress_file.read(path) == progress_file.Progress()
