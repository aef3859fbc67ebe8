"""The fixtures of a cloud that is not there: stand-ins first on PATH, and a small git repository that holds gcp/ as it is here."""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from absent_cloud import PYTHON, ROOT, Cloud, run_dry


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    """A clean git repository with gcp/ and slurm/; maxlm itself is found through PYTHONPATH."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("gcp", "slurm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder of this session, the same in all of its workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def python(tmp_path_factory, shared) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("python") / "python"
    path.write_text(PYTHON.format(memory=shared, pid=os.getpid()))
    path.chmod(0o755)
    command = [sys.executable, "-c", "import absent_cloud; absent_cloud.serve_python()"]
    with fork_server.Popen(command, cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        (shared / f"port.{os.getpid()}").write_text(server.stdout.readline())
        yield path


@pytest.fixture
def cloud(tmp_path, repository, python) -> Cloud:
    home = tmp_path / "home"
    return Cloud(home, repository, python)


@pytest.fixture
def only_programs(cloud, tmp_path) -> str:
    """A PATH with the stand-ins and with what every Linux has: no real gcloud, kubectl, srun or maxlm of this machine."""
    folder = tmp_path / "programs"
    folder.mkdir()
    names = "bash cat cp cut date dirname env git grep id md5sum mkdir mktemp mv od paste rm sed seq sort tail touch tr"
    for name in names.split():
        (folder / name).symlink_to(shutil.which(name))
    return f"{cloud.home}/bin:{folder}"


@pytest.fixture(scope="session")
def dry_runs(repository, shared, python, tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a dry run of each maxlm-gcp of the documentation, and of what it leaves out.

    In a folder that has the configs they speak of; the first worker does it for all.
    """
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = shared / "dry_runs.json"
        if not known.exists():
            known.write_text(json.dumps(run_dry(repository, python, tmp_path_factory.mktemp("user"))))
        return json.loads(known.read_text())


@pytest.fixture(scope="session")
def printed(dry_runs) -> list[list[str]]:
    """Every command that these print, in words."""
    lines = [line for _, out, _ in dry_runs.values() for line in out.splitlines()]
    return [shlex.split(line[2:]) for line in lines if line.startswith("+ ")]
