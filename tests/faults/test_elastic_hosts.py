"""Hosts that are gone for good: the others go on without them on a smaller mesh, with the same samples and losses, until they return."""

import os
import shutil
import time

import numpy as np
import pytest
from elastic_group import Cluster
from hosts import Hosts, Run, can_make_hosts
from small_run import events, finish, make_workspace, metrics, start

from maxlm.cluster.message_socket import SECRET

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")

STEPS, EVERY, LIMIT = 40, 5, 1800
SETTINGS = ("train.global_batch=12", "mesh.data=3", "mesh.fsdp=1", f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}")
ELASTIC = "elastic={min_hosts: 2, wait_s: 40, grow_after_s: 5}"
# Batches come slowly, so that there is time for what happens between two steps.
SLOW = """
import os, time
if os.environ.get("SLOW_BATCH"):
    from maxlm.data import input_pipeline
    read = input_pipeline.Pipeline.host_batch
    def host_batch(self, *arguments, **named):
        time.sleep(float(os.environ["SLOW_BATCH"]))
        return read(self, *arguments, **named)
    input_pipeline.Pipeline.host_batch = host_batch
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Texts, store and config, and a straight run of one process on three devices."""
    folder = make_workspace(tmp_path_factory.mktemp("prepared"))
    finish(start(folder, *SETTINGS, devices=3), timeout=LIMIT)
    (folder / "sitecustomize.py").write_text(SLOW)
    return folder


@pytest.fixture
def workspace(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "run", ignore=shutil.ignore_patterns("runs"))
    return tmp_path / "run"


def slowly(hosts, folder, *settings, seconds=4.0):
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return Run(
        hosts, folder, *SETTINGS, *settings, devices=1, PYTHONPATH=path, SLOW_BATCH=str(seconds), **{SECRET: "a secret of the tests"}
    )


def at(folder, step):
    path = folder / "runs" / "small" / "metrics.jsonl"
    return lambda: path.exists() and f'"step":{step},' in path.read_text()


def is_as(folder, straight):
    """Every step once, with the samples and losses of the straight run."""
    here, there = metrics(folder), metrics(straight)
    assert [r["step"] for r in here] == list(range(1, STEPS + 1))
    assert [r["batch_digest"] for r in here] == [r["batch_digest"] for r in there]
    np.testing.assert_allclose([r["loss"] for r in here], [r["loss"] for r in there], rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["host1", "host0"])
def test_two_of_three_hosts_go_on_and_take_the_third_back(prepared, workspace, victim):
    with Hosts(workspace, 3) as hosts:
        run = slowly(hosts, workspace, ELASTIC)
        run.wait(at(workspace, 8), "step 8", LIMIT)
        began = time.monotonic()
        hosts.kill_all(victim)
        run.wait(lambda: len(events(workspace, "start")) == 2, "a smaller run", LIMIT)
        small = time.monotonic() - began
        run.wait(at(workspace, events(workspace, "start")[-1]["step"] + 2), "steps without it", LIMIT)
        run.start(victim)
        run.wait(lambda: len(events(workspace, "start")) == 3, "a larger run", LIMIT)
        grown = time.monotonic() - began
        run.finish(LIMIT)
        print(f"{victim} was killed: a smaller run after {small:.0f} s, a full one after {grown:.0f} s")
    first, second, third = events(workspace, "start")
    assert "elastic" not in first and "elastic" not in third
    assert second["elastic"]["absent"] == [f"{victim} (process {victim[-1]})"]
    assert second["elastic"]["mesh"] == {"data": 2} and second["elastic"]["microbatches"] == 2
    assert (first["processes"], second["processes"], third["processes"]) == (3, 2, 3)
    assert second["step"] >= EVERY
    (left,) = events(workspace, "preempt")
    assert left["step"] == third["step"], "nothing is lost when a host returns"
    is_as(workspace, prepared)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", ["cut", "mute"])
def test_of_two_sides_of_a_cut_only_one_goes_on(tmp_path, victim, way):
    """The network of one of three hosts fails, in both directions or in one, and comes back. The rendezvous and process group alone."""
    with Hosts(tmp_path, 3) as hosts:
        three = Cluster(tmp_path, 3, wait_s=10.0, hosts=hosts)
        three.start(0, 1, 2)
        at = three.wait([0, 1, 2], seconds=LIMIT)
        getattr(hosts, way)(hosts.names[victim])
        others = [number for number in range(3) if number != victim]
        at = three.wait(others, at, seconds=LIMIT)
        time.sleep(2 * 10.0)
        assert three.joined(victim)[-1]["numbers"] == [0, 1, 2], "it must not go on alone"
        getattr(hosts, {"cut": "mend", "mute": "unmute"}[way])(hosts.names[victim])
        three.wait([0, 1, 2], at, seconds=LIMIT)
        (tmp_path / "done").touch()
        assert [process.wait(LIMIT) for process in three.running.values()] == [0, 0, 0]
