"""The doctor finds what is there, names what is missing with the command that brings it, and survives what is broken."""

import json
import sys
from pathlib import Path

import fork_server
import pytest

from maxlm.cluster.accelerators import find_accelerators
from maxlm.diagnostics import device_probe, doctor
from maxlm.diagnostics.doctor import (
    GIB,
    Finding,
    Report,
    as_text,
    ask_for_devices,
    cache_findings,
    device_findings,
    disk_finding,
    files_finding,
    package_findings,
    training_findings,
)

CPU = {"platform": "cpu", "devices": [{"kind": "cpu", "memory_bytes": None}], "compilation_cache": None, "error": None}
NOTHING = dict.fromkeys(("jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"))


def machine(root: Path, *, nodes=(), pci=(), driver=None) -> Path:
    """A made-up system: device files, PCI devices as (vendor, device, class), NVIDIA's driver."""
    for node in nodes:
        (root / node).parent.mkdir(parents=True, exist_ok=True)
        (root / node).touch()
    for number, values in enumerate(pci):
        device = root / "sys/bus/pci/devices" / f"0000:00:{number:02}.0"
        device.mkdir(parents=True)
        for name, value in zip(("vendor", "device", "class"), values, strict=True):
            (device / name).write_text(f"{value}\n")
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder)\nGCC version: gcc 12\n"
        (root / "proc/driver/nvidia/version").write_text(text)
    return root


def missing(root: Path, versions=NOTHING, platforms="", devices=CPU) -> list[Finding]:
    """Return the findings on accelerators that jax does not use."""
    return [f for f in device_findings(devices, find_accelerators(root), versions, platforms) if "does not use it" in f.found]


TPU_V5P = ("0x1ae0", "0x0062", "0xff0000")
TPU_NETWORK = ("0x1ae0", "0x0042", "0x020000")  # Google's network card: the same maker
H100 = ("0x10de", "0x2330", "0x030200")
NVIDIA_SOUND = ("0x10de", "0x228b", "0x040300")


def test_a_plain_machine_misses_nothing(tmp_path):
    assert missing(machine(tmp_path, nodes=["dev/null"], pci=[TPU_NETWORK, NVIDIA_SOUND])) == []
    assert missing(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "there", [{"nodes": ["dev/accel0"]}, {"pci": [TPU_V5P]}, {"pci": [TPU_NETWORK, TPU_V5P], "nodes": ["dev/vfio/0"]}], ids=str
)
def test_a_tpu_without_libtpu_is_a_problem_that_pip_solves(tmp_path, there):
    (finding,) = missing(machine(tmp_path, **there))
    assert finding.state == "problem"
    assert finding.fix.startswith("run pip install") and "[tpu]" in finding.fix


def test_vfio_alone_is_no_tpu(tmp_path):
    assert missing(machine(tmp_path, nodes=["dev/vfio/0"], pci=[NVIDIA_SOUND])) == []


def test_a_gpu_without_plugin_is_a_problem_that_pip_solves(tmp_path):
    (finding,) = missing(machine(tmp_path, nodes=["dev/nvidia0"], pci=[H100], driver="580.65.06"))
    assert finding.state == "problem"
    assert finding.fix.startswith("run pip install") and "[cuda]" in finding.fix


@pytest.mark.parametrize(
    ("there", "versions", "says"),
    [
        ({"pci": [H100]}, NOTHING, "driver, which is not loaded"),
        ({"nodes": ["dev/nvidia0"], "driver": "535.129.03"}, NOTHING, "from 535.129.03 to 580"),
        ({"nodes": ["dev/nvidia0"], "driver": "535.129.03"}, NOTHING | {"jax-cuda13-plugin": "0.10.2"}, "from 535.129.03 to 580"),
        ({"nodes": ["dev/nvidia0"], "driver": "535.129.03"}, NOTHING | {"jax-cuda12-plugin": "0.10.2"}, "another process"),
        ({"nodes": ["dev/nvidia0"], "driver": "580.65.06"}, NOTHING | {"jax-cuda13-plugin": "0.10.2"}, "another process"),
        ({"nodes": ["dev/accel0"]}, NOTHING | {"libtpu": "0.0.51"}, "another process"),
    ],
)
def test_the_fix_is_for_the_cause(tmp_path, there, versions, says):
    (finding,) = missing(machine(tmp_path, **there), versions)
    assert (finding.state, says in finding.fix) == ("problem", True)


def test_hiding_an_accelerator_by_hand_is_only_a_warning(tmp_path):
    machine(tmp_path, nodes=["dev/nvidia0"], driver="580.65.06")
    (finding,) = missing(tmp_path, platforms="cpu")
    assert (finding.state, finding.fix) == ("warning", "unset JAX_PLATFORMS, which is cpu")
    (finding,) = missing(tmp_path, platforms="cuda,cpu")
    assert finding.state == "problem"


def test_an_accelerator_that_jax_uses_is_not_missing(tmp_path):
    machine(tmp_path, nodes=["dev/nvidia0"], driver="580.65.06")
    seen = CPU | {"platform": "gpu", "devices": [{"kind": "NVIDIA H200", "memory_bytes": 100 * GIB}] * 8}
    findings = list(device_findings(seen, find_accelerators(tmp_path), NOTHING, ""))
    assert [f.state for f in findings] == ["ok"]
    assert "8 x NVIDIA H200" in findings[0].found and "100.0 GiB" in findings[0].found and "989 TFLOP/s" in findings[0].found


def test_an_unknown_chip_is_never_given_a_peak():
    seen = CPU | {"platform": "gpu", "devices": [{"kind": "NVIDIA H100 PCIe", "memory_bytes": None}]}
    (finding,) = device_findings(seen, [], NOTHING, "")
    assert finding.state == "warning"
    assert "TFLOP/s" not in finding.found


def test_a_plugin_of_another_jax_is_a_problem():
    versions = NOTHING | {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.1"}
    findings = {f.name: f for f in device_findings(CPU, [], versions, "")}
    assert findings["jax-cuda13-plugin"].state == "problem"
    assert "0.10.2" in findings["jax-cuda13-plugin"].found


def test_packages_are_held_to_what_maxlm_asks_for():
    installed = {"jax": "0.10.2", "flax": "0.12.10", "optax": "0.2.7"}
    wanted = ["jax>=0.10.2", "flax>=0.12.8", "optax>=0.2.8", "grain>=0.2.18", 'libtpu>=1; extra == "tpu"']
    findings = {f.name: f.state for f in package_findings(wanted, installed.get)}
    assert findings == {"optax": "problem", "grain": "problem", "packages": "ok"}


@pytest.mark.parametrize(
    ("code", "timeout", "says"),
    [
        ("import time; time.sleep(600)", 0.5, "did not answer within 0.5 seconds"),
        ("import sys; print('noise', file=sys.stderr); sys.exit('RuntimeError: no GPU')", 60, "RuntimeError: no GPU"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "exit code -11"),
        ("print('not json')", 60, "exit code 0"),
    ],
)
def test_a_driver_that_hangs_or_dies_is_told_and_survived(code, timeout, says):
    devices = ask_for_devices([sys.executable, "-c", code], timeout)
    (finding,) = device_findings(devices, [], NOTHING, "")
    assert finding.state == "problem"
    assert says in finding.found
    assert "\n" not in finding.found


@pytest.mark.parametrize(("free", "state"), [(GIB // 2, "problem"), (5 * GIB, "warning"), (100 * GIB, "ok")])
def test_a_filling_disk(tmp_path, free, state):
    assert disk_finding(free, tmp_path).state == state


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (good,) = cache_findings(str(tmp_path / "not" / "yet"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    (bad,) = cache_findings(str(tmp_path / "not" / "yet"))
    assert (good.state, bad.state) == ("ok", "warning")
    assert not (tmp_path / "not").exists()


def test_every_finding_that_is_not_ok_says_how_to_get_well(tmp_path, monkeypatch):
    machine(tmp_path, nodes=["dev/nvidia0", "dev/accel0"], driver="535.1")
    monkeypatch.setattr(doctor, "find_accelerators", lambda: find_accelerators(tmp_path))
    monkeypatch.setattr(doctor, "ask_for_devices", lambda command: CPU | {"error": "broken"})
    report = doctor.diagnose()
    assert not report.healthy
    assert all(finding.fix for finding in report.findings if finding.state != "ok")
    text = as_text(report)
    assert all(finding.found in text and finding.fix in text for finding in report.findings)
    assert json.loads(json.dumps(report.to_json()))["healthy"] is False


def test_a_report_is_healthy_with_warnings():
    assert Report((Finding("a", "ok", ""), Finding("b", "warning", "", "do")), {}).healthy


def test_on_this_machine_it_prints_one_json_object():
    """The real command, with the real devices: whatever it finds, stdout is JSON and nothing else."""
    answer = fork_server.run([sys.executable, "-m", "maxlm", "doctor", "--json"], capture_output=True, text=True, check=False)
    report = json.loads(answer.stdout)
    assert answer.returncode == (0 if report["healthy"] else 2)
    assert report["platform"] == "cpu"
    assert len(report["devices"]) == 8  # tests/conftest.py
    assert report["versions"]["jax"] and report["cores"] >= 1 and report["disk_free_bytes"] > 0
    assert [finding["state"] for finding in report["findings"] if finding["name"] == "training"] == ["ok"], "in the default precision"


def test_a_machine_that_cannot_train_is_not_ready():
    """`doctor` said ready where the default precision crashed."""
    (finding,) = training_findings({**CPU, "training": "INTERNAL: Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"})
    assert finding.state == "problem" and "DotThunk" in finding.found and "precision.compute=float32" in finding.fix
    (finding,) = training_findings({**CPU, "training": None})
    assert finding.state == "ok"
    assert list(training_findings({**CPU, "error": "no devices"})) == []


def test_a_probe_that_cannot_train_says_why(monkeypatch):
    monkeypatch.setattr(device_probe.fits, "host_memory", lambda: 10**6)
    assert "of memory" in (device_probe.try_to_train() or "")


def test_few_open_files_are_told():
    assert files_finding(256).state == "warning" and "ulimit" in files_finding(256).fix
    assert files_finding(20_000).state == files_finding(-1).state == "ok"
