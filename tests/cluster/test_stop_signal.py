"""A signal to one process of a cluster ends in all of them what they do together."""

import ast
import contextlib
import subprocess
import sys

import fork_server
import pytest
from small_run import environment, free_port

from maxlm.cluster import signals
from maxlm.cluster.signals import StopSignal


@pytest.mark.parametrize("other", [False, True])
def test_a_signal_that_another_process_received_is_known_here(monkeypatch, other):
    monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
    monkeypatch.setattr(signals.agree, "max_over_processes", lambda mine: max(mine, int(other)))
    with contextlib.closing(StopSignal()) as stop:
        assert stop.received_anywhere() is other
        assert not stop.abandon_batch()
        stop.received = "SIGTERM"
        assert stop.received_anywhere()


SIGNALLED = """
import sys, time
import jax
from maxlm.cluster import signals
with signals.beside_preemption_service():
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 1, 0, cluster_detection_method="deactivate")
signals.jax.process_count = lambda: 2
stop = signals.StopSignal(lambda: "")
before = int(sys.argv[2])
answers = [stop(11 + number) for number in range(before)]
stop.request("the return of host1")
time.sleep(2)
answers += [stop(11 + before + number) for number in range(3)]
print(answers[:before + 2])
"""


@pytest.mark.parametrize("before", [0, 2])
def test_what_is_asked_before_the_first_step_of_a_resumed_run_is_not_lost(before):
    """All stop at a call soon after, whatever the number of the step."""
    program = [sys.executable, "-c", SIGNALLED, str(free_port()), str(before)]
    done = fork_server.run(program, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = ast.literal_eval(done.stdout.splitlines()[-1])
    assert answers[:before] == [None] * before
    assert "the return of host1" in answers[before:]


TOGETHER = """
import sys, time
import jax
from maxlm.cluster import cluster, signals
named = {"coordinator": f"localhost:{sys.argv[1]}", "process_count": "2", "process_id": sys.argv[2]}
with cluster.joined(named, lambda text: None):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.devices()
    stop = signals.StopSignal(lambda: "")
    if sys.argv[2] == "1":
        stop.request("a test")
    began, asked = time.monotonic(), 0
    while (reason := stop(asked)) is None and time.monotonic() < began + 60:
        asked += 1
        time.sleep(0.001)  # Python's lock is free for a moment only, as in a loop that traces
    print("stopped", asked, reason)
"""


def test_processes_agree_where_to_stop_while_jax_holds_pythons_lock():
    """It does while they agree, over the coordination service."""
    port = free_port()
    both = [
        fork_server.Popen(
            [sys.executable, "-c", TOGETHER, str(port), str(number)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    (_, first, _), (_, second, reason) = [out.splitlines()[-1].split(" ", 2) for out, _ in said]
    assert first == second
    assert reason == "a test"
