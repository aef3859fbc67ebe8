"""Processes with different numbers of devices agree: on values, on the values of process 0, and on its failure."""

import json
import subprocess
import sys
from pathlib import Path

import fork_server
import numpy as np
import pytest
from small_run import environment, free_port

from maxlm.base.errors import UnavailableError, UserError
from maxlm.cluster import agree as agreement
from maxlm.cluster.agree import agree, from_process_0, gather, largest, max_over_processes, on_all, on_process_0

PROGRAM = """
import json, sys
import numpy as np
from maxlm.run.jax_setup import use_virtual_devices
number = int(sys.argv[2])
use_virtual_devices(2 - number)
import jax
from maxlm.cluster.agree import agree, from_process_0, gather, largest, max_over_processes, on_process_0
from maxlm.base.errors import UnavailableError, UserError
from maxlm.cluster import cluster

def fail(error):
    raise error

def caught(error):
    try:
        on_process_0(lambda: fail(error), "reading a file")
    except (UserError, UnavailableError) as raised:
        return [type(raised).__name__, str(raised)]

named = {"coordinator": f"localhost:{sys.argv[1]}", "process_count": "2", "process_id": sys.argv[2]}
with cluster.joined(named, lambda text: None):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    texts = ["", "\\udcff ü " * 1000]
    found = [
        agree({"text": texts[number]}) == [{"text": text} for text in texts],
        from_process_0([number, "x"]),
        max_over_processes(number + 3),
        on_process_0(lambda: {"steps": [1, 2], "number": number}, "listing"),
        caught(UserError("it is wrong")),
        caught(OSError(5, "Input/output error")),
        gather(np.array([number, 7], np.int32)).tolist(),
        largest(np.array([[number, 2 - number]], np.uint8)).tolist(),
    ]
    print(json.dumps(found), flush=True)
"""


def test_two_processes_agree():
    port = free_port()
    command = [sys.executable, "-c", PROGRAM, str(port)]
    how = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [fork_server.Popen([*command, str(number)], **how) for number in range(2)]
    said = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    wrong, failed = first.pop(4), first.pop(4)
    assert second.pop(4)[0] == second.pop(4)[0] == "UnavailableError"
    assert wrong == ["UserError", "it is wrong"]
    assert failed[0] == "UnavailableError" and "reading a file failed" in failed[1]
    assert first == second == [True, [0, "x"], 4, {"steps": [1, 2], "number": 0}, [[0, 7], [1, 7]], [[1, 2]]]


def test_a_process_alone_agrees_with_itself():
    assert agree({"a": 1}) == [{"a": 1}] and from_process_0("x") == "x" and max_over_processes(3) == 3
    assert gather(np.array([1.5])).tolist() == [[1.5]] and largest(np.array([2], np.int32)).tolist() == [2]
    assert on_process_0(lambda: [1], "listing") == [1]

    def fail():
        raise OSError(5, "Input/output error")

    with pytest.raises(UnavailableError, match=r"listing failed: .*Input/output error"):
        on_process_0(fail, "listing")
    with pytest.raises(UserError, match="wrong"):
        on_process_0(lambda: (_ for _ in ()).throw(UserError("wrong")), "listing")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda: (_ for _ in ()).throw(UserError("no such file")), "no such file"),
        (Path("nowhere").read_bytes, "nowhere: cannot be read or written: No such file"),  # a failure of storage
    ],
)
def test_a_problem_is_told_to_the_others_before_it_is_raised(monkeypatch, do, said):
    told = []
    monkeypatch.setattr(agreement, "require_equal", lambda facts, problem=None: told.append((facts, str(problem))))
    with pytest.raises(UserError, match=said):
        on_all(do)
    assert len(told) == 1 and told[0][0] == {} and said in told[0][1]
