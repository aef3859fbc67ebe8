"""A cloud that is not there: what stands in for its commands, and what a user's folder and the documentation say."""

import contextlib
import functools
import io
import os
import re
import runpy
import select
import shlex
import shutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

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

# Stands for the Python of maxlm-gcp and of hosts: to import maxlm and to read a config takes a second, so a process that has imported it
# (`serve_python`) does what Python is asked to do. `settings.py`, to which most tests give the same words, is asked once.
PYTHON = """#!/usr/bin/env bash
text='' known="${{*:4}}" known="{memory}/settings/${{known// /,}}"
if [[ $1 == - || $1 == -c ]]; then IFS= read -r -d '' text; fi
if [[ $1 != */settings.py || ! -e $known/code ]]; then
  [[ $1 != */settings.py ]] || touch "$3"
  exec 4<>"/dev/tcp/127.0.0.1/$(<{memory}/port.{pid})"
  {{ env -0; printf '\\0'; printf '%s\\0' "$PWD" "$text" "$#" "$@"; }} >&4
  for name in code out err; do IFS= read -r -d '' "$name" <&4; done
  if [[ $1 == */settings.py ]]; then
    IFS= read -r -d '' config <"$3"
    mkdir -p "$known.$$"
    for name in out err config code; do printf %s "${{!name}}" >"$known.$$/$name"; done
    mv -T "$known.$$" "$known" 2>/dev/null || rm -r "$known.$$"
  fi
else
  for name in code out err config; do IFS= read -r -d '' "$name" <"$known/$name"; done
  printf %s "$config" >"$3"
fi
printf %s "$out"; printf %s "$err" >&2; exit "$code"
"""


def serve_python() -> None:
    """Run what the script above is asked to run, each time in a fork of this process, until stdin ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while select.select([listener, sys.stdin], [], [])[0] != [sys.stdin]:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                if (pid := os.fork()) == 0:
                    stream.write(b"".join(str(part).encode() + b"\0" for part in _answer(stream)))
                    stream.flush()
                    os._exit(0)
            os.waitpid(pid, 0)


def _answer(stream: BinaryIO) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of what `stream` asks for."""
    word = functools.partial(_word, stream)
    os.environ.clear()
    os.environ.update(pair.split("=", 1) for pair in iter(word, ""))
    os.chdir(word())
    text = word()
    sys.argv = [word() for _ in range(int(word()))]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if sys.argv[0] in ("-", "-c"):
                sys.stdin = io.StringIO(text)
                exec(text if sys.argv[0] == "-" else sys.argv[1], {"__name__": "__main__"})
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()


def _word(stream: BinaryIO) -> str:
    return b"".join(iter(lambda: stream.read(1), b"\0")).decode()


class Cloud:
    """Runs commands with the stand-ins, and knows what these were called with."""

    def __init__(self, home: Path, repository: Path, python: Path) -> None:
        self.home, self.repository = home, repository
        self.bucket = home / "buckets" / "mine"
        binaries = home / "bin"
        binaries.mkdir(parents=True)
        stand_in = binaries / "stand_in.sh"
        source = (ROOT / "tests/gcp/stand_in.sh").read_text()
        stand_in.write_text(f"#!{shutil.which('bash')}\n{source}")
        stand_in.chmod(0o755)
        for name in COMMANDS:
            (binaries / name).symlink_to(stand_in)
        path = f"{binaries}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "STAND_IN": str(home), "MAXLM_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
        self.environment["PYTHON_OF_TESTS"] = str(python)  # where a stand-in takes the place of MAXLM_PYTHON
        self._rules: list[str] = []

    def answer(self, match: str, out: str = "", err: str = "", code: int = 0, times: int = -1, wait: int = 0) -> None:
        """Set the answer of the next `times` calls that contain `match` (-1: all); earlier rules come first."""
        self._rules.append("\x1f".join([match, str(times), str(code), str(wait), out, err]) + "\x1e")
        (self.home / "answers").write_text("".join(self._rules))
        shutil.rmtree(self.home / "used", ignore_errors=True)
        (self.home / "used").mkdir()

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
    """Every command in the `sh` blocks of docs/how-to/cloud.md."""
    page = (ROOT / "docs/how-to/cloud.md").read_text(encoding="utf-8")
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
