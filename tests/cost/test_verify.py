"""The process of the compiler: another takes its place when it ends."""

import os
from dataclasses import replace

import pytest

from maxlm.config.errors import UserError
from maxlm.cost import verify
from maxlm.cost.verify import Compiler, Verdict

ANSWER = Verdict(1, 2, (1.0,), 3.0, cached=False)


def test_a_time_that_misses_turns_of_a_loop_is_no_time():
    assert ANSWER.whole() is ANSWER
    with pytest.raises(UserError, match=r"these loops turn is not in the compiled program: while\.2\. They count once"):
        replace(ANSWER, unknown_loops=("while.2",)).whole()


def end_or_answer(line):
    """Stand-in for the process: ends at the first request, or answers each."""
    while True:
        if line.recv().config == "end":
            os._exit(9)
        line.send(verify._Answer(ANSWER))


def test_after_its_end_the_next_call_starts_another_process(monkeypatch):
    monkeypatch.setattr(verify, "_serve", end_or_answer)
    with Compiler() as compiler:
        for _ in range(2):
            with pytest.raises(UserError, match="ended with code 9"):
                compiler("end", None)
        assert compiler("a config", None) == ANSWER
