"""Send signals at random moments to the commands of maxlm; check that each ends in time, with the right exit code, and loses nothing.

    python tests/faults/attack_signals.py --trials 100 --seed 0

Each trial starts a command in a copy of a small workspace, waits until it handles signals, sends it SIGINT, SIGTERM, SIGHUP, two SIGINTs
or SIGKILL at a random moment of its usual duration, and then runs the same command again without signals. Needs Linux: it reads /proc.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maxlm.base.errors import ExitCode

GRACE_SECONDS = 25.0
MARGIN_SECONDS = 8.0  # for a machine that is busy
PROMPT_SECONDS = 2.0
STEPS = 60
MARK = "MAXLM_ATTACK"  # in the environment of all processes of a trial
CONFIG = """\
model: {vocab_size: 320, d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ff: 64}
data:
  store: store
  seq_len: 32
  prepare: {sources: [texts], eval_fraction: 0.1, workers: 2, tokenizer: {vocab_size: 300}}
train: {steps: %d, global_batch: 8, loss_chunks: 2, eval_batches: 2}
optimizer: {warmup_steps: 4, peak_lr: 1e-2}
memory: {remat: none}
precision: {compute: float32}
checkpoint: {every_steps: 10, keep: 10}
run: {name: small, dir: runs, tensorboard: false}
samples: {prompts: [document], tokens: 8}
"""


@dataclass(frozen=True)
class Target:
    """A command, the folders that it needs, the function that reads its result, and whether it saves on a signal."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    result: Callable[[Path, str], object]
    saves: bool = False
    weight: int = 1


@dataclass
class Reference:
    """Result of the same command without signals."""

    code: int
    seconds: float
    result: object


@dataclass
class Trial:
    """Outcome of a signal."""

    target: str
    signals: str
    moment: float  # seconds after the command has installed its handlers
    code: int
    seconds: float  # from the last signal to the end
    problems: list[str]


def _training(folder: Path, said: str) -> object:
    """Return the losses of every step and the digests of the last state, to the bit."""
    run = folder / "runs" / "small"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((run / "checkpoints" / str(STEPS) / "manifest" / "manifest.json").read_text())
    exact = [(one["step"], one["loss"], one["grad_norm"], one["lr"], one["batch_digest"]) for one in records]
    return exact, manifest["leaves"], (run / "report.html").read_text().rstrip().endswith("</html>")


def _store(folder: Path, said: str) -> object:
    """Return the digest of every file of the token store, except for the dates of its sources, which differ in each trial."""
    files = [path for path in sorted((folder / "store").rglob("*")) if path.is_file() and path.name not in (".lock", "sources.json")]
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def _printed(folder: Path, said: str) -> object:
    return said


def _report(folder: Path, said: str) -> object:
    """True if the page is complete."""
    return (folder / "page.html").read_text().rstrip().endswith("</html>")


TRAIN = ("train", "small.yml")
TARGETS = (
    Target("train", TRAIN, ("store",), _training, saves=True, weight=5),
    Target("launch", ("launch", "--backoff", "0.1", "--", *TRAIN), ("store",), _training, saves=True, weight=3),
    Target("data prepare", ("data", "prepare", "small.yml"), (), _store, weight=3),
    Target("generate", ("generate", "runs/small", "document", "--tokens", "200", "--temperature", "0"), ("runs",), _printed, weight=3),
    Target("report", ("report", "runs/small", "--out", "page.html"), ("runs",), _report, weight=2),
    Target("data inspect", ("data", "inspect", "store"), ("store",), _printed),
    Target("config", ("config", "small.yml"), (), _printed),
    Target("doctor", ("doctor",), (), lambda folder, said: None),
)
ATTACKS = {
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGHUP": (signal.SIGHUP,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGKILL": (signal.SIGKILL,),
}


class Attack:
    """Trials in copies of one workspace."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._whole = folder / "whole"
        self._references: dict[str, Reference] = {}

    def prepare(self) -> None:
        """Create the workspace, and run every command without signals."""
        texts = self._whole / "texts"
        texts.mkdir(parents=True)
        for number in range(60):
            words = " ".join(f"{chr(97 + (number * k) % 26)}{'xyz'[(number + k) % 3]}{k % 7}" for k in range(80))
            (texts / f"{number:02}.txt").write_text(f"document {number}: {words}\n")
        (self._whole / "small.yml").write_text(CONFIG % STEPS)
        store, train = TARGETS[2], TARGETS[0]
        for target in (store, train, *TARGETS):  # twice, so that compiled programs are in the cache, as in the trials
            began = time.monotonic()
            code, said, _ = self._run(target, self._whole, uuid.uuid4().hex)
            self._references[target.name] = Reference(code, time.monotonic() - began, target.result(self._whole, said))
            if target.name == "train":
                shutil.rmtree(self._folder / "runs", ignore_errors=True)
                shutil.copytree(self._whole / "runs", self._folder / "runs")
                shutil.rmtree(self._whole / "runs")
            if target.name == "launch":
                shutil.rmtree(self._folder / "runs")

    def trial(self, number: int) -> Trial:
        """Run one command with one attack, and again without."""
        target = self._random.choices(TARGETS, [one.weight for one in TARGETS])[0]
        name = self._random.choice(list(ATTACKS))
        reference = self._references[target.name]
        moment = self._random.uniform(0, reference.seconds)
        gap = self._random.uniform(0.15, 1.0)
        folder = self._folder / f"trial-{number}"
        folder.mkdir()
        for needed in ("texts", "small.yml", *target.needs):
            source = self._whole / needed
            shutil.copytree(source, folder / needed) if source.is_dir() else shutil.copy(source, folder)
        mark = uuid.uuid4().hex
        code, seconds, said = self._attacked(target, folder, mark, ATTACKS[name], moment, gap)
        trial = Trial(target.name, name, moment, code, seconds, [])
        trial.problems += self._judge(target, name, code, seconds, said)
        orphans = _wait_for_orphans(mark, GRACE_SECONDS + MARGIN_SECONDS if target.saves else MARGIN_SECONDS)
        if orphans:
            trial.problems.append(f"left running: {', '.join(orphans)}")
        if not (target.name == "generate" and code == 0):
            code, said, errors = self._run(target, folder, mark)
            trial.problems += self._judge_again(target, folder, code, said, errors)
        if not trial.problems:
            shutil.rmtree(folder)
        return trial

    def _attacked(
        self, target: Target, folder: Path, mark: str, numbers: tuple[signal.Signals, ...], moment: float, gap: float
    ) -> tuple[int, float, str]:
        process = subprocess.Popen(
            _command(target), cwd=folder, env=_environment(mark), stdout=subprocess.DEVNULL, stderr=(folder / "stderr.txt").open("w")
        )
        while process.poll() is None and not _handles_signals(process.pid):
            time.sleep(0.002)
        time.sleep(moment)
        for index, number in enumerate(numbers):
            time.sleep(gap if index else 0)
            process.send_signal(number)
        began = time.monotonic()
        try:
            process.wait(2 * (GRACE_SECONDS + MARGIN_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        said = (folder / "stderr.txt").read_text()
        (folder / "stderr.txt").unlink()
        return process.returncode, seconds, said

    def _judge(self, target: Target, attack: str, code: int, seconds: float, said: str) -> list[str]:
        problems = []
        limit = MARGIN_SECONDS + (GRACE_SECONDS if target.saves and attack != "SIGINT twice" else PROMPT_SECONDS)
        if seconds > limit:
            problems.append(f"took {seconds:.1f} s to end, above {limit:g}")
        allowed = {self._references[target.name].code, -signal.SIGKILL if attack == "SIGKILL" else int(ExitCode.STOPPED)}
        if code not in allowed:
            problems.append(f"exit code {code}, not in {sorted(allowed)}: {said[-300:]}")
        if "Traceback" in said:
            problems.append(f"traceback: {said[-2000:]}")
        return problems

    def _judge_again(self, target: Target, folder: Path, code: int, said: str, errors: str) -> list[str]:
        reference = self._references[target.name]
        if code != reference.code:
            return [f"run again, it ends with {code}: {errors[-1000:]}"]
        if "Traceback" in errors:
            return [f"run again, a traceback: {errors[-2000:]}"]
        if target.result(folder, said) != reference.result:
            return ["run again, its result differs from that without signals"]
        return []

    def _run(self, target: Target, folder: Path, mark: str) -> tuple[int, str, str]:
        done = subprocess.run(
            _command(target), cwd=folder, env=_environment(mark), capture_output=True, text=True, check=False, timeout=300
        )
        return done.returncode, done.stdout, done.stderr


def _command(target: Target) -> list[str]:
    return [sys.executable, "-m", "maxlm", *target.arguments]


def _environment(mark: str) -> dict[str, str]:
    cache = str(Path(tempfile.gettempdir()) / "maxlm-attack-cache")
    settings = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    return {**os.environ, **settings, MARK: mark, "MAXLM_GRACE_SECONDS": f"{GRACE_SECONDS:g}"}


def _handles_signals(pid: int) -> bool:
    """True once the process has installed its handlers; while the interpreter starts, signals have their default effect."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(lines["SigCgt"], 16) >> (signal.SIGHUP - 1) & 1)
    except (OSError, KeyError):
        return False


def _running(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes() and " Z " not in (process / "stat").read_text():
                command = (process / "cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")
                found.append(f"{process.name} ({command[-80:].strip()})")
        except OSError:
            continue
    return found


def _wait_for_orphans(mark: str, seconds: float) -> list[str]:
    """Return processes of a trial that still run after `seconds`, after killing them."""
    until = time.monotonic() + seconds
    while (left := _running(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    for one in left:
        os.kill(int(one.split()[0]), signal.SIGKILL)
    return left


def show(trials: list[Trial], console: Console) -> None:
    table = Table("command", "attack", "trials", "exit codes", "slowest end", "failed")
    rows = defaultdict(list)
    for trial in trials:
        rows[trial.target, trial.signals].append(trial)
    for (target, attack), some in sorted(rows.items()):
        codes = ", ".join(f"{code}: {sum(one.code == code for one in some)}" for code in sorted({one.code for one in some}))
        failed = sum(bool(one.problems) for one in some)
        table.add_row(target, attack, str(len(some)), codes, f"{max(one.seconds for one in some):.1f} s", str(failed or ""))
    console.print(table)


def main(
    trials: Annotated[int, typer.Option(min=1, help="Number of attacks.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of commands, signals and moments.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Working folder; failed trials stay there. Default: a temporary folder.")] = None,
) -> None:
    """Attack, print a table, and exit with 1 if a trial failed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the commands would ignore it
    console = Console(width=None if sys.stdout.isatty() else 140)
    place = folder or Path(tempfile.mkdtemp(prefix="maxlm-attack-"))
    place.mkdir(parents=True, exist_ok=True)
    attack = Attack(place, seed)
    attack.prepare()
    done = []
    for number in range(trials):
        trial = attack.trial(number)
        done.append(trial)
        said = f"{number + 1:4} {trial.target}: {trial.signals} after {trial.moment:.2f} s: code {trial.code} in {trial.seconds:.2f} s"
        console.print(said, *(f"\n     {problem}" for problem in trial.problems), markup=False, highlight=False, soft_wrap=True)
    show(done, console)
    failed = [trial for trial in done if trial.problems]
    console.print(f"{len(done)} trials, {len(failed)} failed" + (f"; see {place}" if failed else ""), highlight=False)
    if not failed and folder is None:
        shutil.rmtree(place)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
