"""Processes that join, and that refuse to begin where one of them is not like the others."""

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from small_run import command, environment, finish, free_port, make_workspace, start

import maxlm
from maxlm.config.errors import UserError
from maxlm.runtime import cluster

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
        subprocess.Popen([*train, "process_id=0"], cwd=folder, env=environment(), **how),
        subprocess.Popen([*under, *train, "process_id=1", *changes], cwd=elsewhere or folder, env=environment(**environ), **how),
    )


def refused(processes):
    """What both say, which is the same line."""
    lines = [finish(process, code=2).strip().splitlines()[-1] for process in processes]
    assert lines[0] == lines[1]
    return lines[0]


def test_the_command_line_joins_and_says_so(workspace):
    processes = both(workspace)
    said = [finish(process) for process in processes]
    assert "process 0 of 2 at localhost:" in (workspace / "runs" / "small" / "events.jsonl").read_text()
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
    shutil.copytree(Path(maxlm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "training" / "step.py").write_text((package / "training" / "step.py").read_text() + "# changed here alone\n")
    assert "(process 1): maxlm is " in refused(both(workspace, PYTHONPATH=str(package.parent)))


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
