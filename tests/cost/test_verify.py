"""The process of the compiler: another takes its place when it ends."""

import os

import pytest

from maxlm.config.errors import UserError
from maxlm.cost import verify
from maxlm.cost.verify import Compiler, Verdict

ANSWER = Verdict(1, 2, (1.0,), 3.0, cached=False)


def end_or_answer(line):
    """Stand-in for the process: ends at the first request, or answers each."""
    while True:
        config, _ = line.recv()
        if config == "end":
            os._exit(9)
        line.send(ANSWER)


def test_after_its_end_the_next_call_starts_another_process(monkeypatch):
    monkeypatch.setattr(verify, "_serve", end_or_answer)
    with Compiler() as compiler:
        for _ in range(2):
            with pytest.raises(UserError, match="ended with code 9"):
                compiler("end", None)
        assert compiler("a config", None) == ANSWER
