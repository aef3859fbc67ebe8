"""A cloud that is not there: what stands in for its commands, and what a user's folder and the documentation say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("gcloud", "kubectl", "srun", "scontrol", "sbatch", "docker", "systemctl", "systemd-run", "sleep")
OWNER = "ada"

MINE = "extends: runs/llama3-8b-v5p-128\n"
GPUS = """\
extends: [runs/quickstart]
cluster: {topology: "h200:2x8"}
data: {store: gs://mine/store, prepare: null}
train: {global_batch: 16}
"""
NOT_IN_DOCS = (
    "gcp/maxlm-gcp create mine-planned.yml --bucket gs://mine --zone us-east5-a --reserved --network n --subnetwork s --project p",
    "gcp/maxlm-gcp delete runs/llama3-405b-2x-v6e-256 --bucket gs://mine --zone us-east5-a",
    "gcp/maxlm-gcp delete gpu-planned.yml --bucket gs://mine --zone us-central1-b",
    "gcp/maxlm-gcp stop runs/llama3-8b-tpu7x-128 --bucket gs://mine --gke",
    "gcp/maxlm-gcp delete runs/llama3-8b-tpu7x-128 --bucket gs://mine --gke",
)

# Stands for the Python of maxlm-gcp. To read a config takes half a second, and most tests read the same one: it remembers what came of it.
REMEMBERING = """#!/usr/bin/env bash
if [[ $1 != */settings.py ]]; then exec {python} "$@"; fi
known={memory}/$(printf '%s\\n' "${{@:4}}" | md5sum | cut -c1-32)
if [[ ! -e $known/code ]]; then
  mkdir -p "$known.$$" && touch "$3"
  {python} "$@" >"$known.$$/out" 2>"$known.$$/err"; echo $? >"$known.$$/code"
  cp "$3" "$known.$$/config"; mv -T "$known.$$" "$known" 2>/dev/null || rm -r "$known.$$"
fi
cat "$known/out"; cat "$known/err" >&2; cp "$known/config" "$3"; exit "$(<"$known/code")"
"""


class Cloud:
    """Runs commands with the stand-ins, and knows what these were called with."""

    def __init__(self, home: Path, repository: Path, python: Path) -> None:
        self.home, self.repository = home, repository
        self.bucket = home / "buckets" / "mine"
        binaries = home / "bin"
        binaries.mkdir(parents=True)
        stand_in = binaries / "stand_in.py"
        source = (ROOT / "tests/gcp/stand_in.py").read_text()
        stand_in.write_text(f"#!{sys.executable} -IS\n{source}")
        stand_in.chmod(0o755)
        for name in COMMANDS:
            (binaries / name).symlink_to(stand_in)
        path = f"{binaries}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "STAND_IN": str(home), "MAXLM_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
        self._rules: list[str] = []

    def answer(self, match: str, out: str = "", err: str = "", code: int = 0, times: int = -1, wait: float = 0) -> None:
        """Set the answer of the next `times` calls that contain `match` (-1: all); earlier rules come first."""
        self._rules.append("\x1f".join([match, str(times), str(code), str(wait), out, err]) + "\x1e")
        (self.home / "answers").write_text("".join(self._rules))

    def no_answers(self) -> None:
        self._rules = []
        (self.home / "answers").unlink()

    def state(self, unit: str, state: str, run: str | None = None, owner: str = OWNER, times: int = -1) -> None:
        """Set the description of a machine."""
        for verb in ("describe", "get jobset"):
            self.answer(f"{verb} {unit} ", f"{state},{run or unit},{owner}\n", times=times)

    def run(self, verb: str, *words: str, code: int = 0, place: tuple[str, ...] = ("--zone", "us-east5-a")) -> subprocess.CompletedProcess:
        """maxlm-gcp; its exit code must be `code`."""
        config, *rest = words
        command = [self.repository / "gcp/maxlm-gcp", verb, config, "--bucket", "gs://mine", "--owner", OWNER, *place, *rest]
        return self.execute(command, code)

    def execute(self, command: list, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=self.home, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _records(self) -> list[list[str]]:
        path = self.home / "calls"
        return [record.split("\x1f") for record in path.read_text().split("\x1e")[:-1]] if path.exists() else []

    @property
    def calls(self) -> list[list[str]]:
        """Words of every call, in order."""
        return [words for _, *words in self._records()]

    @property
    def changes(self) -> list[list[str]]:
        """Calls that change something."""
        looks = ("describe", "list", "get", "cat", "sleep")
        return [words for words in self.calls if not any(look in words[:5] for look in looks)]

    def sent(self) -> str:
        """The last startup script, or manifest, that a command named."""
        return [file for file, *_ in self._records() if file][-1]


def documented() -> list[str]:
    """Every command in the `sh` blocks of docs/cloud.md."""
    page = (ROOT / "docs/cloud.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


def run_dry(repository: Path, python: Path, folder: Path) -> dict[str, tuple[int, str, str]]:
    """Command -> (exit code, stdout, stderr) of a dry run in `folder`."""
    (folder / "gcp").symlink_to(repository / "gcp")
    (folder / "mine-planned.yml").write_text(MINE)
    (folder / "gpu-planned.yml").write_text(GPUS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MAXLM_PYTHON": str(python)}
    said = {}
    for line in [*documented(), *NOT_IN_DOCS]:
        if line.startswith("gcp/maxlm-gcp"):
            command = [*shlex.split(line), "--dry-run"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            said[line] = (done.returncode, done.stdout, done.stderr)
    return said
