"""Processes that join, and that refuse to begin where one of them is not like the others."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import fork_server
import pytest
from small_run import command, environment, finish, free_port, make_workspace, start

import maxlm
from maxlm.base.errors import UserError
from maxlm.cluster import cluster, process_group, progress_file
from maxlm.cluster.environment import ProcessSpec

SETTINGS = ("train.steps=2", "train.eval_batches=0", "optimizer.warmup_steps=1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = make_workspace(tmp_path_factory.mktemp("prepared"))
    finish(start(folder, *SETTINGS))
    return folder


@pytest.fixture
def workspace(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "work", ignore=shutil.ignore_patterns("runs"))
    return tmp_path / "work"


def both(folder, *changes, elsewhere=None, under=(), **environ):
    """Two processes by the command line. Of the second alone: `changes` of settings, a folder, what it runs `under`, its `environ`."""
    place = (f"coordinator=localhost:{free_port()}", "process_count=2")
    train = command("train", "small.yml", *SETTINGS, *place)
    how = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return (
        fork_server.Popen([*train, "process_id=0"], cwd=folder, env=environment(), **how),
        fork_server.Popen([*under, *train, "process_id=1", *changes], cwd=elsewhere or folder, env=environment(**environ), **how),
    )


def refused(processes):
    """Return the error line, the same in both processes."""
    lines = [finish(process, code=2).strip().splitlines()[-1] for process in processes]
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.soak
def test_the_command_line_joins_and_says_so(workspace):
    """And process 0 records how the attempt before ended elsewhere."""
    before = workspace / "before.json"
    progress_file.write(before, progress_file.Progress(last_code=-9))
    processes = both(workspace, **{progress_file.VARIABLE: str(before)})
    said = [finish(process) for process in processes]
    began, *_ = map(json.loads, (workspace / "runs" / "small" / "events.jsonl").read_text().splitlines())
    assert began["cluster"].startswith("process 0 of 2 at localhost:")
    assert began["ended_before"] == {f"{socket.gethostname()} (process 1)": "was killed by SIGKILL"}
    for number, text in enumerate(said):
        assert any(
            re.fullmatch(rf"joining as process {number} of 2 at localhost:\d+, from the command line", line) for line in text.splitlines()
        )


def test_another_config_is_named(workspace):
    line = refused(both(workspace, "train.seed=1"))
    assert line.startswith(f"maxlm: {socket.gethostname()} (process 1): config is ")
    assert not (workspace / "runs").exists(), "nothing was written"


def test_other_code_is_named(workspace, tmp_path):
    package = tmp_path / "other" / "maxlm"
    shutil.copytree(Path(maxlm.__file__).parent, package)  # with its compiled files: to translate all of it takes seconds
    (package / "training" / "step.py").write_text((package / "training" / "step.py").read_text() + "# changed here alone\n")
    assert "(process 1): maxlm is " in refused(both(workspace, PYTHONPATH=str(package.parent)))


@pytest.mark.soak
def test_another_variable_of_jax_is_named(workspace):
    """In the suite: `test_consistency`, on facts of one process."""
    line = refused(both(workspace, JAX_DEFAULT_MATMUL_PRECISION="bfloat16", JAX_COMPILATION_CACHE_DIR=str(workspace / "cache")))
    assert "(process 1): JAX_DEFAULT_MATMUL_PRECISION is bfloat16, and not set on 1 other" in line
    assert not (workspace / "runs").exists(), "nothing was written"


def test_a_host_without_the_data_is_named_and_nobody_waits_for_it(workspace, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(workspace / "small.yml", tmp_path / "elsewhere")
    assert "(process 1): data.store = store is not prepared" in refused(both(workspace, elsewhere=tmp_path / "elsewhere"))


def test_an_unreachable_coordinator_is_named_with_how_long_it_was_tried():
    began = time.monotonic()
    named = {"coordinator": f"localhost:{free_port()}", "process_count": "2", "process_id": "1"}
    with (
        pytest.raises(UserError, match=r"process 1 of 2.* and localhost:\d+ did not answer for 1 s \(.*refused.*firewall"),
        cluster.joined(named, print, seconds=1),
    ):
        raise AssertionError("there is nothing to join")
    assert time.monotonic() - began < 5


COMPILES = """
import os, sys, threading, time
import jax, jax.numpy as jnp
from maxlm.cluster import process_group, rendezvous
from maxlm.cluster.environment import ProcessSpec
port, number = int(sys.argv[1]), int(sys.argv[2])
gaps, before = [], time.monotonic()
tick = process_group.ProcessGroup._tick
def timed(self):
    global before
    gaps.append(time.monotonic() - before)
    before = time.monotonic()
    tick(self)
process_group.ProcessGroup._tick = timed
here = rendezvous.join(ProcessSpec(2, number, f"localhost:{port}", "a test"), 60)
def f(x, factor):
    for i in range(300):
        x = jnp.tanh(x @ x) * (i + factor) + jnp.sort(x, axis=i % 2)
    return x
began, programs = time.monotonic(), 0
if number == 1:
    while time.monotonic() < began + 10:
        programs += 1
        lowered = jax.jit(f, static_argnums=1).lower(jnp.ones((8, 8)), programs)
        lowered.as_text()
        lowered.compile()
    print(programs, max(gaps), flush=True)
    here.leave()
else:
    time.sleep(600)
"""


@pytest.mark.soak
def test_heartbeats_go_on_while_the_main_thread_traces_and_compiles():
    """A run that compiles for minutes must not count as stopped. Each program differs, and none comes from a cache."""
    port = free_port()
    environ = environment(JAX_ENABLE_COMPILATION_CACHE="false")
    both_ends = [
        subprocess.Popen([sys.executable, "-c", COMPILES, str(port), str(number)], env=environ, text=True, stdout=subprocess.PIPE)
        for number in range(2)
    ]
    said = both_ends[1].communicate(timeout=900)[0]
    both_ends[0].kill()
    both_ends[0].communicate()
    programs, longest = map(float, said.split())
    print(f"traced and compiled {programs:.0f} programs in 10 s or more; longest interval between two ticks {longest:.1f} s")
    assert longest < process_group.HEARTBEAT_TIMEOUT_SECONDS / 4


@pytest.mark.soak
def test_a_checkpoint_folder_of_one_host_alone_is_refused(workspace):
    """The second has a file system of its own where the first writes, as hosts without a shared one have."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    (workspace / "runs").mkdir()
    apart = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none runs && exec "$@"', "sh")
    line = refused(both(workspace, under=apart))
    assert "(process 1): run.dir = " in line
    assert "does not see what process 0 writes there" in line
    assert not list((workspace / "runs").iterdir()), "nothing is left behind"


def test_a_crash_ends_the_process_also_if_nobody_reads_its_output(monkeypatch):
    """Else it would stay in jax's orderly exit, which waits for the others, and its heartbeats would go on."""
    left, ended = [], []

    class Group:
        spec, configured, hosts, codes_before = ProcessSpec(1, 0, "localhost:1", "a test"), (0,), ("h",), {}

        def label(self, number):
            return f"h (process {number})"

        def leave(self, reason, code):
            left.append((reason, code))

    class Closed(StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(cluster.environment, "find", lambda *_: Group.spec)
    monkeypatch.setattr(cluster.rendezvous, "join", lambda *_: Group())
    monkeypatch.setattr(cluster.os, "_exit", ended.append)
    monkeypatch.setattr(cluster.sys, "stderr", Closed())
    with contextlib.suppress(RuntimeError), cluster.joined({}, lambda text: None):
        raise RuntimeError("boom")
    assert (left, ended) == ([("h (process 0) crashed: boom", 1)], [1])


def test_hosts_are_on_record_once_they_have_met(monkeypatch, tmp_path):
    """One that is lost right after that is then known by its host."""
    monkeypatch.setenv(progress_file.VARIABLE, str(tmp_path / "progress.json"))
    monkeypatch.setattr(cluster.environment, "find", lambda *_: ProcessSpec(1, 0, f"localhost:{free_port()}", "a test"))
    with cluster.joined({}, lambda text: None):
        recorded = progress_file.read(tmp_path / "progress.json")
    assert (recorded.hosts, recorded.numbers, recorded.process) == ((socket.gethostname(),), (0,), 0)
