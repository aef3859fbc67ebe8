"""The process of the compiler: another takes its place when it ends."""

import os
import sys
import tempfile
from dataclasses import replace

import fork_server
import pytest

from maxlm.base.errors import UserError
from maxlm.compiler.hidden_stderr import hidden_stderr, write_stderr_to
from maxlm.cost import verify
from maxlm.cost.verify import Compiler, Verdict

ANSWER = Verdict(1, 2, (1.0,), 3.0, cached=False)


def test_a_time_that_misses_turns_of_a_loop_is_no_time():
    assert ANSWER.whole() is ANSWER
    with pytest.raises(UserError, match=r"these loops turn is not in the compiled program: while\.2\. They count once"):
        replace(ANSWER, unknown_loops=("while.2",)).whole()


NOISE = "W1128 03:00:00 slow_operation_alarm.cc:73] Very slow compile?"


def end_or_answer(line, log):
    """Stand-in for the process: writes as XLA does past Python, and ends at the first request, or answers each."""
    write_stderr_to(log)
    while True:
        os.write(2, f"{NOISE}\n".encode())
        if line.recv().config == "end":
            os.write(2, b"F1128 03:00:01 check.cc:1] Check failed: x > 0\n")
            os._exit(9)
        line.send(verify._Answer(ANSWER))


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler whose process is the stand-in, and leaves its logs in `tmp_path`."""
    monkeypatch.setattr(verify, "_serve", end_or_answer)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Compiler() as compiler:
        yield compiler


def test_after_its_end_the_next_call_starts_another_process(compiler):
    for _ in range(2):
        with pytest.raises(UserError, match="ended with code 9"):
            compiler("end", None)
    assert compiler("a config", None) == ANSWER


def test_noise_of_the_compiler_reaches_the_screen_only_where_it_fails(compiler, capfd, tmp_path):
    compiler("a config", None)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UserError, match=r"its last lines are above, all of them in .*\.log") as caught:
        compiler("end", None)
    (log,) = tmp_path.glob("*.log")
    assert str(log) in str(caught.value) and "Check failed: x > 0" in log.read_text()
    assert capfd.readouterr().err == log.read_text() and log.read_text().count(NOISE) == 2
    compiler("a config", None)
    compiler._process.kill()
    compiler._end()
    assert list(tmp_path.glob("*.log")) == [log], "nothing is left of what went well"


def test_a_block_hides_what_is_written_past_python_unless_it_fails(capfd):
    with hidden_stderr():
        os.write(2, b"noise\n")
        print("for the user", file=sys.stderr)
    assert "noise" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="bad"), hidden_stderr():
        os.write(2, b"a reason\n")
        raise ValueError("bad")
    assert "a reason" in capfd.readouterr().err
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_python_speaks_while_the_rest_is_hidden():
    """In a process that has no test's stand-in for sys.stderr."""
    code = "import os, sys; from maxlm.compiler.hidden_stderr import hidden_stderr\nwith hidden_stderr():\n    "
    code += "os.write(2, b'noise\\n'); print('for the user', file=sys.stderr)\nprint('after', file=sys.stderr)"
    done = fork_server.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "for the user\nafter\n"
