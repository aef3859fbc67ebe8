"""A host that gets half of the processor's time, and then a slow link, are named while training goes on, and so is their recovery."""

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


def test_the_slow_host_and_the_slow_link_are_named(tmp_path):
    (tmp_path / "prepared").mkdir()
    prepared = make_workspace(tmp_path / "prepared")
    finish(start(prepared, "train.steps=1", "train.eval_batches=0", "optimizer.warmup_steps=0"), timeout=600)
    folder = tmp_path / "run"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("runs"))

    def alarms():
        path = folder / "runs" / "small" / "events.jsonl"
        return (
            [(event["cause"], [host.split()[0] for host in event["hosts"]]) for event in events(folder, "alarm")] if path.exists() else []
        )

    with Hosts(folder, 3) as hosts:
        run = Run(hosts, folder, *SETTINGS, devices=1)
        log = folder / "runs" / "small" / "metrics.jsonl"
        run.wait(lambda: log.exists() and '"step":20,' in log.read_text(), "step 20", 600)
        assert alarms() == []
        with stopped_half_of_the_time(child(run.processes["host1"])):
            run.wait(lambda: alarms(), "the slow host", 300)
        assert alarms() == [("slow_host", ["host1"])]
        run.wait(lambda: len(alarms()) == 2, "its recovery", 300)
        assert alarms()[1:] == [("slow_host_recovered", ["host1"])]
        hosts.slow_down("host2", "2mbit")
        run.wait(lambda: len(alarms()) == 3, "the slow link", 300)
        assert alarms()[2:] == [("slow_link", ["host2"])]
        print([event["reason"] for event in events(folder, "alarm")])
