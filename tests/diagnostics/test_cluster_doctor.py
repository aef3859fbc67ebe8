"""A cluster in which one host is slow for real, or has fewer devices: it is named, and no other."""

import json
import signal
import subprocess
import threading
from contextlib import contextmanager

import fork_server
import pytest
from hosts import Hosts, can_make_hosts
from small_run import command, environment, free_port

from maxlm.diagnostics.comm.cluster_doctor import SLOW, Figures, device_findings, pair_rounds, ring_order, slow_hosts, speed_findings

DOCTOR = ("doctor", "--cluster", "--json")


def begin(number, count, address, devices=1, on=None):
    """Process `number` of `count`; `on`: (hosts, the name of one), else this machine."""
    doctor = command(*DOCTOR, f"coordinator={address}", f"process_count={count}", f"process_id={number}")
    how = {"env": environment(devices), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return on[0].start(on[1], doctor, **how) if on else fork_server.Popen(doctor, text=True, **how)


def until(process, line):
    """Wait for the line on stderr that begins so."""
    assert any(said.startswith(line) for said in process.stderr), f"it ended with {process.poll()} and never said {line}"


def report_of(processes, code):
    """Return what process 0 prints, one JSON object and nothing else; the others print nothing."""
    for process in processes:
        process.said = process.communicate(timeout=240)
    for process in processes:
        assert process.returncode == code, process.said
    assert [process.said[0] for process in processes[1:]] == [""] * (len(processes) - 1)
    (line,) = processes[0].said[0].splitlines()
    return json.loads(line)


def problems(report):
    return {
        (finding["name"], finding["found"].split(")")[0].rpartition(" ")[2])
        for finding in report["findings"]
        if finding["state"] == "problem"
    }


@contextmanager
def held_up(process, stopped=0.08, runs=0.02):
    """`process` gets a fifth of the time that others get."""
    done = threading.Event()

    def hold():
        while not done.is_set() and process.poll() is None:
            for sign, seconds in ((signal.SIGSTOP, stopped), (signal.SIGCONT, runs)):
                process.send_signal(sign)
                done.wait(seconds)  # at the end it runs at once, so what is measured next is not held up

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.soak
def test_a_host_that_computes_slowly_is_named():
    address = f"localhost:{free_port()}"
    processes = [begin(number, 2, address) for number in range(2)]
    until(processes[1], "joining")
    with held_up(processes[1]):
        until(processes[1], "measuring all hosts together")
    report = report_of(processes, code=2)
    assert problems(report) <= {("matmul", "1"), ("memory", "1")} and problems(report), report["findings"]
    assert report["rows"], "all were measured together as well"


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")
def test_a_host_behind_a_slow_link_is_named(tmp_path):
    """The third of four sends through a link of 30 MB/s: its neighbours, who share a pair with it, are not blamed.

    The fourth lacks a device, and is named as well.
    """
    with Hosts(tmp_path, 4) as hosts:
        hosts.slow_down("host2", "240mbit")
        processes = [begin(number, 4, "host0:8476", 1 if number == 3 else 2, on=(hosts, name)) for number, name in enumerate(hosts.names)]
        report = report_of(processes, code=2)
    assert report["hosts"] == [f"host{number} (process {number})" for number in range(4)]
    assert ("links", "2") in problems(report), report["findings"]
    slow = report["speeds"]["links"].pop(2)
    assert slow < 36e6
    assert min(report["speeds"]["links"]) > 2 * slow, "a neighbour is judged by its other link"
    assert ("devices", "3") in problems(report) and report["devices"] == ["2 x cpu"] * 3 + ["1 x cpu"]


@pytest.mark.soak
def test_a_host_that_lacks_a_device_is_named():
    """Nothing waits for ever where hosts are not alike: the others' devices are measured against as many."""
    address = f"localhost:{free_port()}"
    report = report_of([begin(number, 3, address, devices) for number, devices in enumerate((2, 1, 2))], code=2)
    assert ("devices", "1") in problems(report), report["findings"]
    (found,) = [finding["found"] for finding in report["findings"] if finding["name"] == "devices"]
    assert found.endswith("(process 1) has 1 x cpu, and 2 others 2 x cpu")


def test_the_rule():
    """More than SLOW times as long as the median of the others; of two, the slower only."""
    assert slow_hosts({"a": 1.0, "b": 1.0, "c": 1 / (SLOW - 0.01)}) == {}
    assert slow_hosts({"a": 1.0, "b": 1.01, "c": 0.5, "d": 0.99}) == {"c": pytest.approx(2.0)}
    assert list(slow_hosts({"a": 1.0, "b": 0.5})) == ["b"]
    assert list(slow_hosts({"a": 8.0, "b": 1.0, "c": 9.0, "d": 0.5, "e": 8.0})) == ["d", "b"], "the slowest first"
    (found,) = speed_findings(["a", "b", "c"], Figures("links", "B/s", (2e9, 1e6, float("nan"))))
    assert found.state == "problem" and found.found.startswith("b is slow: 1 MB/s, 2000.0 times"), "who has no figure is not judged"


def test_where_no_kind_of_device_is_that_of_most_all_hosts_are_named():
    assert [one.found for one in device_findings(["a", "b"], ["1 x cpu", "4 x cpu"])] == [
        "a has 1 x cpu, and most hosts have no kind in common",
        "b has 4 x cpu, and most hosts have no kind in common",
    ]
    (odd,) = device_findings(["a", "b", "c"], ["1 x cpu", "4 x cpu", "4 x cpu"])
    assert odd.found == "a has 1 x cpu, and 2 others 4 x cpu"


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_every_host_meets_both_neighbours_and_one_at_a_time(n):
    met = [pair for pairs in pair_rounds(n) for pair in pairs]
    assert {frozenset(pair) for pair in met} == {frozenset((place, (place + 1) % n)) for place in range(n)}
    assert len(met) == (1 if n == 2 else n), "once each"
    for pairs in pair_rounds(n):
        hosts = [host for pair in pairs for host in pair]
        assert len(set(hosts)) == len(hosts)


@pytest.mark.parametrize("names", [["a"] * 8 + ["b"] * 8, ["a", "a", "b", "b", "c", "c"], ["a", "b", "c"], ["a"]])
def test_neighbours_are_of_different_hosts(names):
    """Otherwise processes that exchange through a host's memory would hide a dead network card."""
    ring = ring_order(names)
    assert sorted(ring) == list(range(len(names)))
    if len(set(names)) > 1:
        assert all(names[ring[place - 1]] != names[ring[place]] for place in range(len(ring)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster"], "there is one process, and nothing to compare it with"),
        (["coordinator=localhost:1"], "coordinator: only --cluster takes settings"),
        (["--cluster", "mesh.data=2"], "mesh.data=2: only --cluster takes settings"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, said):
    done = fork_server.run(command("doctor", *arguments), env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr.splitlines()[-1]
