"""The three packages of this folder, installed in a fresh environment: trained, killed, resumed, planned, exported and imported."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from small_run import CONFIG, environment, make_workspace

HERE = Path(__file__).parent
PACKAGES = ("label_smoothing", "parallel_residual", "tiger")
NAMES = [f"maxlm_{name}" for name in PACKAGES]
SETTINGS = """\
extensions: [maxlm_label_smoothing, maxlm_parallel_residual, maxlm_tiger]
objective: {kind: label_smoothing, smoothing: 0.05}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `bin` of an environment with maxlm, its dependencies and the three packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join([str(HERE.parents[1]), *others]) + "\n")
    for name in PACKAGES:
        source = shutil.copytree(HERE / name, folder / "sources" / name, ignore=shutil.ignore_patterns("__pycache__"))
        options = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin/python", *options, source], check=True)
    return folder / "bin"


def start(installed: Path, folder: Path, *words: str) -> subprocess.Popen:
    variables = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [installed / "python", "-m", "maxlm", *words]
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(installed: Path, folder: Path, *words: str, code: int = 0) -> str:
    process = start(installed, folder, *words)
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out + err


def losses(folder: Path, name: str) -> dict[int, tuple[float, float]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {one["step"]: (one["loss"], one["smoothed_loss"]) for one in map(json.loads, lines) if "smoothed_loss" in one}


@pytest.mark.soak
def test_packages_survive_training_a_kill_a_plan_and_an_export(installed, tmp_path):
    make_workspace(tmp_path)
    text = CONFIG.replace("d_ff: 64}", "d_ff: 64, norm_position: parallel}").replace("steps: 20", "steps: 200")
    text = text.replace("warmup_steps: 4", "name: tiger, tiger: {momentum: 0.9}, warmup_steps: 4")
    (tmp_path / "small.yml").write_text(SETTINGS + text)

    shown = run(installed, tmp_path, "config", "small.yml")
    assert all(name in shown for name in NAMES) and "optimizer.tiger.momentum" in shown
    whole = run(installed, tmp_path, "train", "small.yml", "run.name=whole")
    assert "report" in whole and max(losses(tmp_path, "whole")) == 200

    process = start(installed, tmp_path, "train", "small.yml")
    checkpoints = tmp_path / "runs" / "small" / "checkpoints"
    while not any(path.name.isdigit() for path in checkpoints.glob("*")) and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run(installed, tmp_path, "train", "small.yml")
    assert losses(tmp_path, "small")[200] == losses(tmp_path, "whole")[200]
    assert any(json.loads(line)["kind"] == "start" for line in (tmp_path / "runs/small/events.jsonl").read_text().splitlines()[1:])

    planned = run(installed, tmp_path, "plan", "small.yml", "--topology", "v5p:2x2x1", "--quick", "mesh.fsdp=-1", "train.global_batch=64")
    assert "step" in planned
    written = run(installed, tmp_path, "config", "small-planned.yml")
    assert all(name in written for name in NAMES) and "parallel" in written
    compiled = run(installed, tmp_path, "compile", "small.yml", "--topology", "v5p:2x2x1", "mesh.fsdp=-1")
    assert "GiB" in compiled or "MiB" in compiled

    run(installed, tmp_path, "export", "runs/small", "--out", "out", "--dtype", "float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "parallel_llama"
    options = ["--extension", "maxlm_parallel_residual"]
    run(installed, tmp_path, "import", "out", "--out", "back", *options)
    asked = ["document", "--tokens", "8", "--temperature", "0"]
    texts = [run(installed, tmp_path, "generate", folder, *asked) for folder in ("runs/small", "back")]
    assert texts[0].splitlines()[-1] == texts[1].splitlines()[-1]

    refused = run(installed, tmp_path, "import", "out", "--out", "again", code=2)
    assert "parallel_llama" in refused and "Traceback" not in refused
