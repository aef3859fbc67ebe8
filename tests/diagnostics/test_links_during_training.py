"""`maxlm bench-comm --during-training`: counters of links while steps run; bad input is one line."""

import json
import subprocess
import sys
import time

import fork_server
import jax
import pytest
from hosts import Hosts, can_make_hosts
from rich.console import Console
from small_run import command, environment, make_workspace

from maxlm import cli
from maxlm.cluster.agree import agree
from maxlm.cluster.cluster import Cluster
from maxlm.config import UserError, load
from maxlm.diagnostics.comm import during_training
from maxlm.models import count_parameters
from maxlm.telemetry.link_counters import Link
from maxlm.telemetry.link_use import LinkUse
from maxlm.telemetry.phases import Phases


def run(capfd, *arguments):
    """(exit code, stdout, stderr) of `maxlm bench-comm`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maxlm", "bench-comm", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    out, err = capfd.readouterr()
    return end.value.code or 0, out, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--during-training: needs a CONFIG to train, such as runs/quickstart"),
        (["runs/quickstart", "runs/other"], "give one CONFIG"),
        (["runs/nothing"], "config runs/nothing does not exist"),
        (["runs/quickstart", "mesh.dota=2"], "mesh.dota"),
        (["runs/quickstart", "--largest", "1KB"], "--largest: is only for bench-comm without --during-training"),
        (["runs/quickstart", "--operation", "permute"], "--operation: is only for bench-comm without"),
        (["runs/quickstart", "--steps", "0"], "--steps"),
        (["runs/quickstart", "--topology", "v5e:3x5"], "cannot be made of hosts of 2x2 chips"),
        (["runs/quickstart", "--topology", "h100:1x8"], "run this on the GPUs with cluster=null, to read counters"),
        (["runs/quickstart", "--out", "nowhere/at/all.png"], "there is no folder"),
        (["runs/quickstart", "--topology", "v5e:2x2", "--out", "nowhere/at/all.png"], "there is no folder"),
        (["runs/quickstart", "--topology", "v5e:2x2", "coordinator=a:1"], "coordinator: with --topology or --slices"),
        (["runs/dpo-tiny"], "objective.kind"),
    ],
)
def test_bad_input_is_one_line(capfd, arguments, said):
    code, out, err = run(capfd, "--during-training", *arguments)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and said in line


@pytest.mark.parametrize("option", [["--steps", "3"], ["--topology", "v5e:2x2"], ["--slices", "2"]])
def test_options_of_training_need_it(capfd, option):
    code, out, err = run(capfd, "mesh.data=2", *option)
    assert (code, out) == (2, "") and f"{option[0]}: is only for bench-comm with --during-training" in err


@pytest.mark.parametrize("text", ["", "a", "é" * 5000])
def test_text_of_any_length_is_gathered(text):
    assert agree(text) == [text]


def test_steps_run_while_the_links_of_the_host_are_read(tmp_path, monkeypatch):
    """From the end of the warm-up to that of the last step, of whose time a first reading that is slow is no part; nothing is saved."""
    monkeypatch.chdir(make_workspace(tmp_path))
    config = load("small.yml", ["mesh.data=2", f"mesh.fsdp={jax.device_count() // 2}"]).config
    reads = []

    def read():
        time.sleep(0 if reads else 2)
        reads.append(time.monotonic())
        return {Link("eth0 sent", "ethernet", 1.25e9): 1e6 * len(reads)}

    monkeypatch.setattr(during_training, "read_host", read)
    found = during_training.measure(config, Cluster("one process", ("host7",)), 3, Phases(Console(quiet=True)))
    (use,) = found.uses
    assert (found.steps, found.nvml, use.used_by, use.limit) == (3, None, "host7", 1.25e9)
    assert reads[-1] - reads[0] == pytest.approx(3 * found.step_s, abs=0.5 + 0.5 * found.step_s)
    assert use.average == pytest.approx(1e6 * (len(reads) - 1) / (reads[-1] - reads[0]), rel=0.2)
    assert not (tmp_path / "runs").exists()


def test_figures_are_printed_although_the_plot_cannot_be_written(tmp_path, capsys):
    use, here = LinkUse("eth0 sent", "ethernet", 1e6, 2e6, 3e6, 1.25e9, used_by="host7"), Cluster("one process", ("host7",))
    found = during_training.Found(0.5, 3, None, [use])
    for as_json in (True, False):
        with pytest.raises(UserError, match=r"--out .* cannot be written"):
            during_training._print("tiny", found, [use], here, tmp_path / "missing" / "plot.png", as_json=as_json)
        assert "eth0 sent" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")
def test_gradients_between_two_hosts_are_counted(tmp_path):
    """Each sends every gradient once for an all-reduce of two, in float32, behind a link of 200 Mbit/s."""
    make_workspace(tmp_path)
    fork_server.run(command("data", "prepare", "small.yml"), cwd=tmp_path, env=environment(1), check=True)
    settings = ("small.yml", "mesh.data=2", "model.d_model=256", "model.d_ff=1024", "--steps", "8", "--json")
    with Hosts(tmp_path, 2) as hosts:
        for name in hosts.names:
            hosts.slow_down(name, "200mbit")
        processes = [
            hosts.start(
                name,
                command("bench-comm", "--during-training", *settings, "coordinator=host0:8476", "process_count=2", f"process_id={number}"),
                cwd=tmp_path,
                env=environment(1),
                stdout=subprocess.PIPE,
            )
            for number, name in enumerate(hosts.names)
        ]
        said = [process.communicate(timeout=1200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and said[1] == ""
    report = json.loads(said[0])
    links = {(row["used_by"], row["link"]): row for row in report["links"] if row["kind"] == "ethernet"}
    assert set(links) == {(host, f"eth0 {way}") for host in ("host0", "host1") for way in ("sent", "received")}
    gradients = 4 * count_parameters(load(str(tmp_path / "small.yml"), settings[1:4]).config.model)
    for row in links.values():
        sent = row["average_bytes_per_s"] * report["step_s"]
        assert 0.99 * gradients <= sent < 1.1 * gradients, row
        assert row["average_bytes_per_s"] <= row["peak_bytes_per_s"]
        if row["link"] == "eth0 sent":
            assert row["p90_bytes_per_s"] < 1.1 * 25e6, "the link's own rate"
