"""A host that gets half of the processor's time and a slow link are named while training goes on, and so is recovery."""

import contextlib
import os
import shutil
import signal
import threading
import time

import pytest
from hosts import Hosts, Run, can_make_hosts
from small_run import child, events, finish, make_workspace, start

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")]

SETTINGS = (
    "train.steps=100000",
    "train.global_batch=12",
    "train.eval_batches=0",
    "mesh.data=3",
    "mesh.fsdp=1",
    "checkpoint.every_steps=100000",
)


@contextlib.contextmanager
def stopped_half_of_the_time(pid):
    """Stop the process for 0.15 s of 0.3 s."""
    done = threading.Event()

    def alternate():
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.15)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def three_hosts(tmp_path):
    """A run on three hosts that has begun, and a function that returns the alarms so far: causes, and names of hosts."""
    prepared, folder = tmp_path / "prepared", tmp_path / "run"
    prepared.mkdir()
    make_workspace(prepared)
    finish(start(prepared, "train.steps=1", "train.eval_batches=0", "optimizer.warmup_steps=0"), timeout=600)
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("runs"))
    records = folder / "runs" / "small" / "metrics.jsonl"

    def alarms():
        return [(event["cause"], [host.split()[0] for host in event["hosts"]]) for event in events(folder, "alarm")]

    with Hosts(folder, 3) as hosts:
        run = Run(hosts, folder, *SETTINGS, devices=1)
        run.wait(lambda: records.exists() and '"step":20,' in records.read_text(), "step 20", 600)
        assert alarms() == []
        yield run, alarms
        print([event["reason"] for event in events(folder, "alarm")])


def test_a_slow_host_is_named_and_so_is_its_recovery(tmp_path):
    with three_hosts(tmp_path) as (run, alarms):
        with stopped_half_of_the_time(child(run.processes["host1"])):
            run.wait(alarms, "the slow host", 300)
        assert alarms() == [("slow_host", ["host1"])]
        run.wait(lambda: len(alarms()) == 2, "its recovery", 300)
        assert alarms()[1:] == [("slow_host_recovered", ["host1"])]


def test_a_slow_link_is_named(tmp_path):
    """A step sends 200 KB over it, for four seconds."""
    with three_hosts(tmp_path) as (run, alarms):
        run.hosts.slow_down("host2", "400kbit")
        run.wait(alarms, "the slow link", 400)
        assert alarms() == [("slow_link", ["host2"])]
