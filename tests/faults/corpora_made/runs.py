"""`maxlm corpus run` as processes, and what they leave on disk."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxlm.corpus.files import read_shard

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """End of a process: exit code (negative: by a signal), seconds, and all that it printed to standard error."""

    code: int
    seconds: float
    errors: str

    @property
    def last(self) -> str:
        """The last line that it printed."""
        return (self.errors.strip().splitlines() or [""])[-1]


@dataclass(frozen=True)
class Row:
    """A line of the table of results. `good`: None where nothing is asked."""

    name: str
    asked: str
    found: str
    good: bool | None


def environment(**more: str) -> dict[str, str]:
    """Environment of a process that imports maxlm from this working copy."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "random", **more}


def command(file: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "maxlm", "corpus", "run", file, *overrides]


def save(folder: Path, settings: Mapping[str, Any], name: str = "corpus.yaml") -> str:
    """Write a corpus file; JSON is YAML."""
    (folder / name).write_text(json.dumps(settings, indent=1))
    return name


def start(folder: Path, *arguments: str, log: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
    """Start a run in `folder`, in a session of its own. What it prints goes to `log`."""
    target = (log or folder / "log.txt").open("wb")
    with target:
        return subprocess.Popen(
            command(*arguments), cwd=folder, stdout=subprocess.DEVNULL, stderr=target, start_new_session=True, env=environment(**env)
        )


def run(folder: Path, *arguments: str, limit: float = 1800, prefix: list[str] | None = None, **env: str) -> Ended:
    """Run a corpus file in `folder` to its end. `prefix`: a command that starts it, such as prlimit."""
    began = time.monotonic()
    done = subprocess.run(
        [*(prefix or []), *command(*arguments)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=limit,
        env=environment(**env),
    )
    return Ended(done.returncode, time.monotonic() - began, done.stderr.decode(errors="replace"))


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Records of all shards below a folder."""
    for path in sorted(folder.rglob("*.zst")):
        yield from read_shard(path)


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of the content of every file below a folder, by its name in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
