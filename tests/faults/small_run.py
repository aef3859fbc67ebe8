"""A whole run as a user starts it, small enough for tests: real text, real processes, real checkpoints."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fork_server

CONFIG = """\
model: {vocab_size: 320, d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ff: 64}
data:
  store: store
  seq_len: 32
  prepare: {sources: [texts], eval_fraction: 0.1, workers: 1, tokenizer: {vocab_size: 300}}
train: {steps: 20, global_batch: 8, loss_chunks: 2, eval_batches: 2}
optimizer: {warmup_steps: 4, peak_lr: 1e-2}
memory: {remat: none}
precision: {compute: float32}
checkpoint: {every_steps: 5, keep: 10}
run: {name: small, dir: runs, tensorboard: false}
"""


def make_workspace(folder: Path) -> Path:
    """Texts and a config in `folder`; the store is prepared by the first run."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(60):
        words = " ".join(f"{chr(97 + (number * k) % 26)}{'xyz'[(number + k) % 3]}{k % 7}" for k in range(80))
        (texts / f"{number:02}.txt").write_text(f"document {number}: {words}\n")
    (folder / "small.yml").write_text(CONFIG)
    return folder


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    """The environment of a run on `devices` virtual CPU devices; within tests its programs are compiled as quickly as theirs."""
    flags = re.sub(r"(?<=device_count=)\d+", str(devices), os.environ.get("XLA_FLAGS", "--xla_force_host_platform_device_count=1"))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "maxlm", *arguments]


def start(folder: Path, *overrides: str, devices: int = 1, under: tuple[str, ...] = (), **extra: str) -> subprocess.Popen:
    """`maxlm train small.yml ...` in `folder`, running; `under`: what stands before `train`, such as `launch --`."""
    return fork_server.Popen(
        command(*under, "train", "small.yml", *overrides),
        cwd=folder,
        env=environment(devices, **extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 180) -> str:
    """Wait for the end; the exit code must be `code`. Returns what was printed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out + err


def child(process: subprocess.Popen) -> int:
    """The pid of the one process that `process` has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def metrics(folder: Path, name: str = "small") -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, kind: str, name: str = "small") -> list[dict]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def exact(records: list[dict]) -> list[tuple]:
    """Figures that must be the same to the bit: JSON keeps a float's shortest exact form."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["batch_digest"]) for r in records]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen, name: str = "small", timeout: float = 120) -> None:
    """Until the metrics of `step` are on disk."""
    path = folder / "runs" / name / "metrics.jsonl"
    _wait(lambda: path.exists() and f'"step":{step},' in path.read_text(), f"step {step}", process, timeout)


def wait_for_checkpoint(folder: Path, step: int, process: subprocess.Popen, name: str = "small", timeout: float = 120) -> None:
    """Until a checkpoint of `step` or later is complete."""
    _wait(lambda: max(checkpoint_steps(folder, name), default=-1) >= step, f"checkpoint {step}", process, timeout)


def _wait(there: Callable[[], bool], what: str, process: subprocess.Popen, timeout: float) -> None:
    until = time.monotonic() + timeout
    while time.monotonic() < until and process.poll() is None:
        if there():
            return
        time.sleep(0.005)
    raise AssertionError(f"{what} never came: exit code {process.poll()}")


def saved_state(folder: Path, step: int, name: str = "small") -> dict:
    """Digest of every leaf of a saved state (parameters, optimizer, counters), equal for equal bits on any mesh."""
    manifest = folder / "runs" / name / "checkpoints" / str(step) / "manifest" / "manifest.json"
    return json.loads(manifest.read_text())["leaves"]


def free_port() -> int:
    """A port that is free, with the one above it, which jax's own service takes."""
    while True:
        with socket.socket() as one, socket.socket() as above, contextlib.suppress(OSError, OverflowError):
            one.bind(("localhost", 0))
            port = int(one.getsockname()[1])
            above.bind(("localhost", port + 1))
            return port


def checkpoint_steps(folder: Path, name: str = "small") -> list[int]:
    return sorted(int(entry.name) for entry in (folder / "runs" / name / "checkpoints").glob("*") if entry.name.isdigit())
