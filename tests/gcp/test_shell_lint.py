"""Every shell script passes shellcheck, what it sources included; and starts with the settings that make errors end it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.executable).with_name("shellcheck")
SHELLCHECK = str(BESIDE) if BESIDE.exists() else shutil.which("shellcheck")
PROGRAMS = [ROOT / name for name in ("gcp/maxlm-gcp", "gcp/host.sh", "slurm/train.sbatch")]


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed: pip install -e '.[test]'")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(
        [SHELLCHECK, "--check-sourced", "--external-sources", *PROGRAMS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_shell_script_is_a_program_or_sourced_by_one():
    scripts = {
        path for folder in ("gcp", "slurm") for path in (ROOT / folder).iterdir() if path.is_file() and "bash" in path.read_text()[:80]
    }
    scripts -= {ROOT / "gcp/Dockerfile"}
    sourced = {path for path in scripts if "shellcheck shell=bash" in path.read_text()}
    assert scripts - sourced == set(PROGRAMS)
    entry = (ROOT / "gcp/maxlm-gcp").read_text()
    assert all(f'source "$HERE/{path.name}"' in entry for path in sourced)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_errors_end_a_script_and_nothing_traces_it(path):
    lines = path.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert not any(line.strip().startswith(("set -x", "set -o xtrace")) for line in lines), "a trace shows secrets"


@pytest.mark.parametrize("name", ["lib.sh", "machines.sh", "verbs.sh", "watch.sh", "host.sh", "maxlm-gcp", "settings.py"])
def test_files_are_small(name):
    assert len((ROOT / "gcp" / name).read_text().splitlines()) <= 220
