"""`maxlm --help` and an error in a config are answered at once: jax is not even imported."""

import resource
import subprocess
import sys

import pytest
from source_files import ROOT

CPU_SECONDS = 0.5
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "numpy", "tokenizers", "pyarrow", "matplotlib")
HELP = ["--help"]
MISTAKE = ["train", "runs/quickstart", "model.d_modle=8"]

both = pytest.mark.parametrize(("arguments", "code"), [(HELP, 0), (MISTAKE, 2)], ids=["help", "mistake"])


@both
def test_it_takes_little_cpu_time(arguments, code):
    """CPU seconds, the least of a few runs: however many processes share the machine, a run has the same work to do."""
    seconds = []
    while len(seconds) < 3 or (min(seconds) >= CPU_SECONDS and len(seconds) < 10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run([sys.executable, "-m", "maxlm", *arguments], cwd=ROOT, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert answer.returncode == code
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < CPU_SECONDS


@both
def test_it_imports_nothing_heavy(arguments, code):
    command = [sys.executable, "-X", "importtime", "-m", "maxlm", *arguments]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == code
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in imported, "the list of imports is not read as it should be"
    assert imported.isdisjoint(HEAVY), sorted(imported.intersection(HEAVY))
