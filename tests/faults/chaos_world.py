"""A small run on hosts in miniature, as faults see it: what they may break, and what is known of its progress."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chaos_libc import GOOD, Machine
from chaos_store import BATCH, SEQ_LEN
from hosts import Hosts, Run

STEPS, SAVE_EVERY = 60, 10
STEP_MS = 100  # pace of the steps: a fault that lasts for seconds must meet some
CONFIG = f"""\
model: {{vocab_size: 320, d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ff: 64}}
data: {{store: store, seq_len: {SEQ_LEN}, prefetch: 1}}
train: {{steps: {STEPS}, global_batch: {BATCH}, loss_chunks: 2, eval_batches: 0}}
optimizer: {{warmup_steps: 4, peak_lr: 1e-2}}
memory: {{remat: none}}
precision: {{compute: float32}}
checkpoint: {{every_steps: {SAVE_EVERY}, keep: 10}}
run: {{name: small, dir: runs, tensorboard: false}}
"""
LIMIT_SECONDS = 400.0  # of a trial, on a machine that is not busy
DISK_MB = 48
_TICK_SECONDS = 0.03


@dataclass(frozen=True)
class Shape:
    """Hosts, and devices of each. Replicas are on different hosts; on one host, the devices are the replicas."""

    hosts: int
    devices: int

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (f"mesh.data={self.hosts}", f"mesh.fsdp={self.devices}")


@dataclass
class Progress:
    """Progress that a thread reads off metrics.jsonl and events.jsonl while the run goes on."""

    step: int = 0  # the newest on record
    times: list[tuple[float, int]] = field(default_factory=list)  # monotonic time, step: whenever that changed
    restores: list[tuple[float, int]] = field(default_factory=list)  # monotonic time, step: restarts, and roll backs

    def lost_after(self, began: float) -> int:
        """Steps that were trained twice because of what happened at `began`."""
        lost, before = 0, 0.0
        for now, restored in self.restores:
            reached = max((step for at, step in self.times if before <= at < now), default=0)
            lost += max(0, reached - restored) if now > began else 0
            before = now
        return lost

    def seconds_to_new_step(self, began: float) -> float | None:
        """From `began` until a step is done that was not done before the last restore; without one, before `began`."""
        until = max([began, *(at for at, _ in self.restores)])
        reached = max((step for at, step in self.times if at < until), default=0)
        return next((at - began for at, step in self.times if at >= until and step > reached), None)


@dataclass(frozen=True)
class Setup:
    """Settings that a run is started with. `store`: of tokens; `environment`: of all processes; `disks`: folders below the
    run's that are file systems of their own, of DISK_MB megabytes.
    """

    store: Path
    library: Path  # of `chaos_libc`
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    disks: tuple[str, ...] = ()
    steps: int = STEPS
    limit_s: float = LIMIT_SECONDS  # until the run is at fault if it goes on


class World:
    """A run on `shape.hosts` hosts in `folder`. Use in a `with`, at whose end all of it is gone but the folder."""

    def __init__(self, folder: Path, shape: Shape, seed: str, setup: Setup) -> None:
        self.folder, self.shape, self.dice, self.setup = folder, shape, random.Random(seed), setup
        self.progress = Progress()
        folder.mkdir(parents=True)
        (folder / "small.yml").write_text(CONFIG)
        (folder / "store").symlink_to(setup.store)
        self.hosts = Hosts(folder, shape.hosts, folder / "memory")
        self.victim = self.dice.choice(self.hosts.names)
        self.machines = {name: Machine(setup.library, folder / f"{name}.page") for name in self.hosts.names}
        self._ended = threading.Event()

    def __enter__(self) -> "World":
        with contextlib.ExitStack() as stack:
            for disk in (self.folder / name for name in self.setup.disks):
                disk.mkdir()
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", disk], check=True)
                stack.callback(_unmount, disk)
            stack.enter_context(self.hosts)
            rows = BATCH // self.shape.hosts
            for machine in self.machines.values():
                machine.set(delay_ms=STEP_MS // -(-rows // 4))  # four reads at once
            self.run = Run(
                self.hosts,
                self.folder,
                f"train.steps={self.setup.steps}",
                *self.shape.settings,
                *self.setup.settings,
                devices=self.shape.devices,
                of_host=lambda name: self.machines[name].environment,
                **self.setup.environment,
            )
            watcher = threading.Thread(target=self._watch, daemon=True)
            watcher.start()
            stack.callback(watcher.join)
            stack.callback(self._ended.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- what faults ask

    @property
    def others(self) -> list[str]:
        """All hosts but the victim."""
        return [name for name in self.hosts.names if name != self.victim]

    def until(self, there: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait; False if it was not `there()` in time, or all supervisors have ended before."""
        limit = time.monotonic() + (self.setup.limit_s if seconds is None else seconds)
        while time.monotonic() < limit:
            if there():
                return True
            if all(process.poll() is not None for process in self.run.processes.values()):
                return there()
            time.sleep(_TICK_SECONDS)
        return False

    def trainer(self, name: str) -> int | None:
        """Pid of the process that trains on a host, if there is one."""
        return next((pid for pid in _children(self.run.processes[name].pid) if b"train" in _command(pid)), None)

    def signal(self, name: str, number: int) -> None:
        """Signal the trainer of a host, if there is one."""
        pid = self.trainer(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def restart_supervisor(self, name: str) -> None:
        """Start the host's supervisor again, as a scheduler does once nothing of its task is left; Slurm kills the rest after a while."""
        limit = time.monotonic() + 60
        while self.hosts.pids(name) and time.monotonic() < limit:
            time.sleep(_TICK_SECONDS)
        self.hosts.kill_all(name)
        time.sleep(1)
        self.run.start(name)

    def said(self) -> str:
        """All output of all hosts, the events, and the log of the run."""
        run = self.folder / "runs" / "small"
        files = [run / "events.jsonl", run / "log.txt"]
        return "\n".join([*map(self.run.said, self.hosts.names), *(path.read_text() for path in files if path.exists())])

    def checkpoints(self) -> Path:
        """Their folder."""
        return self.folder / "runs" / "small" / "checkpoints"

    @contextlib.contextmanager
    def hanging(self, **faults: int) -> Iterator[None]:
        """`faults` of the victim's machine until its trainer is another, or the block ends."""
        machine, pid = self.machines[self.victim], self.trainer(self.victim)
        machine.set(**faults)
        try:
            yield
            self.until(lambda: self.trainer(self.victim) != pid)
        finally:
            machine.set(**dict.fromkeys(faults, GOOD))

    def _watch(self) -> None:
        run, seen = self.folder / "runs" / "small", 0
        while not self._ended.wait(_TICK_SECONDS):
            step = _last_step(run / "metrics.jsonl")
            if step is not None and step != self.progress.step:
                self.progress.step = step
                self.progress.times.append((time.monotonic(), step))
            restores = _restores(run / "events.jsonl")
            self.progress.restores += [(time.monotonic(), one) for one in restores[seen:]]
            seen = max(seen, len(restores))


def _unmount(disk: Path) -> None:
    """Unmount a disk, and keep a copy of what is on it, except for what fills it."""
    shutil.copytree(disk, disk.with_name(f"{disk.name}-kept"), ignore=shutil.ignore_patterns("ballast"))
    subprocess.run(["umount", "--lazy", disk], check=True)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _last_step(path: Path) -> int | None:
    try:
        lines = path.read_bytes()[-4096:].split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return None


def _restores(path: Path) -> list[int]:
    try:
        events = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except (OSError, ValueError):
        return []
    return [event["step"] for event in events if event["kind"] in ("restore", "rollback")]
