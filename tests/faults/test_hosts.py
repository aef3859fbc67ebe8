"""Hosts with addresses of their own lose one of them, or its network, and the run goes on as if nothing had happened."""

import re
import shutil
import sys
import time

import numpy as np
import pytest
from hosts import Hosts, Run, can_make_hosts
from small_run import command, environment, events, exact, finish, make_workspace, metrics, saved_state, start

from maxlm.base.errors import ExitCode
from maxlm.cluster.message_socket import KEEPALIVE_SECONDS

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")

MESH = {2: ("mesh.fsdp=2", "mesh.data=2"), 4: ("mesh.data=2", "mesh.fsdp=4")}  # of as many hosts, with two devices each
STEPS = 40
SETTINGS = (f"train.steps={STEPS}", "checkpoint.every_steps=10")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = make_workspace(tmp_path_factory.mktemp("prepared"))
    finish(start(folder, "train.steps=1", "train.eval_batches=0", "optimizer.warmup_steps=0"))
    return folder


@pytest.fixture
def workspaces(prepared, tmp_path):
    """Makes folders with texts, store and config, and no run yet."""

    def make(name):
        shutil.copytree(prepared, tmp_path / name, ignore=shutil.ignore_patterns("runs"))
        return tmp_path / name

    return make


def reached(folder, step):
    """True if that step was logged, with a checkpoint before it to restart from."""
    path = folder / "runs" / "small" / "metrics.jsonl"
    return path.exists() and f'"step":{step},' in path.read_text() and (path.parent / "checkpoints" / f"{step // 10 * 10}").exists()


def undisturbed(folder, count):
    with Hosts(folder, count) as hosts:
        Run(hosts, folder, *SETTINGS, *MESH[count], devices=2).finish()
    return folder


def is_as(folder, straight):
    assert [r["step"] for r in metrics(folder)] == list(range(1, STEPS + 1))
    assert exact(metrics(folder)) == exact(metrics(straight))
    assert saved_state(folder, STEPS) == saved_state(straight, STEPS)
    assert 0 < events(folder, "restore")[0]["step"] < STEPS


def killed_in_the_middle(folder, count, victim):
    """`count` hosts, of which one is killed; the others name it, all supervisors start the run again, and it goes on to its end."""
    with Hosts(folder, count) as hosts:
        run = Run(hosts, folder, *SETTINGS, *MESH[count], devices=2)
        run.wait(lambda: reached(folder, 13), "step 13")
        run.kill(victim)
        run.finish()
        named = re.compile(rf"lost: {victim} \(process \d\); restart 1 of")
        witnesses = [name for name in hosts.names if named.search(run.said(name))]
        assert "was killed by SIGKILL after step" in run.said(victim)
        assert victim not in witnesses
        assert witnesses, "nobody says who was lost"


@pytest.mark.soak
def test_a_host_that_is_killed_comes_back_and_changes_no_bit(workspaces):
    """The short form: two hosts."""
    killed_in_the_middle(folder := workspaces("killed"), 2, "host1")
    is_as(folder, undisturbed(workspaces("straight"), 2))


@pytest.mark.soak
def test_four_hosts_lose_one_or_its_network_and_come_back(workspaces):
    straight = undisturbed(workspaces("straight"), 4)
    alone = workspaces("alone")
    finish(start(alone, *SETTINGS, *MESH[4], devices=8))
    assert [r["batch_digest"] for r in metrics(straight)] == [r["batch_digest"] for r in metrics(alone)]
    np.testing.assert_allclose([r["loss"] for r in metrics(straight)], [r["loss"] for r in metrics(alone)], rtol=1e-5)
    for victim in ("host2", "host0"):  # one of many, and the one where all meet
        killed_in_the_middle(folder := workspaces(f"killed-{victim}"), 4, victim)
        is_as(folder, straight)
        is_as(cut_in_the_middle(workspaces(f"cut-{victim}"), victim), straight)


def cut_in_the_middle(folder, victim):
    """Four hosts, of which one has no network for a minute."""
    with Hosts(folder, 4) as hosts:
        run = Run(hosts, folder, *SETTINGS, *MESH[4], devices=2)
        run.wait(lambda: reached(folder, 13), "step 13")
        hosts.cut(victim)
        began = time.monotonic()
        others = [name for name in hosts.names if name != victim]
        run.wait(lambda: all("lost: " in run.said(name) for name in others), "the end of the run", 2 * KEEPALIVE_SECONDS)
        print(f"{victim} was cut off: the others ended after {time.monotonic() - began:.0f} s")
        assert all(f"maxlm: lost {victim} (process {victim[-1]}): its host did not answer for 30 s" in run.said(name) for name in others)
        time.sleep(max(0.0, began + 60 - time.monotonic()))
        hosts.mend(victim)
        run.finish()
    return folder


@pytest.mark.soak
def test_a_host_without_network_is_named_by_all(tmp_path):
    """The rendezvous and process group alone, with a short keep-alive: within twice its time, on both sides of the cut."""
    silence = 6
    program = (
        "import sys, time\nfrom maxlm.cluster import message_socket, rendezvous\nfrom maxlm.cluster.environment import ProcessSpec\n"
        f"message_socket.KEEPALIVE_SECONDS = {silence}\n"
        "rendezvous.join(ProcessSpec(3, int(sys.argv[1]), 'host0:7000', 'a test'), 30)\nprint('met', flush=True)\ntime.sleep(60)"
    )
    with Hosts(tmp_path, 3) as hosts:
        started = {
            name: hosts.start(name, [sys.executable, "-c", program, str(number)], env=environment(), stdout=-1, stderr=-1)
            for number, name in enumerate(hosts.names)
        }
        for process in started.values():
            assert process.stdout.readline() == "met\n"
        hosts.cut("host1")
        began = time.monotonic()
        ends = {name: process.communicate(timeout=2 * silence)[1] for name, process in started.items()}
        assert time.monotonic() - began > silence / 2
    lost = "maxlm: lost {} (process {}): its host did not answer for 6 s\n"
    assert ends == {"host0": lost.format("host1", 1), "host1": lost.format("host0", 0), "host2": lost.format("host1", 1)}
    assert {process.returncode for process in started.values()} == {ExitCode.HOST_LOST}


def test_commands_know_their_host(tmp_path):
    """A process started on a host has its name and reaches the others by theirs."""
    with Hosts(tmp_path, 2) as hosts:
        ask = "import socket; print(socket.gethostname(), socket.gethostbyname('host0'))"
        answer = hosts.start("host1", [*command()[:1], "-c", ask], stdout=-1).communicate(timeout=30)[0]
    assert answer == "host1 10.77.0.1\n"
