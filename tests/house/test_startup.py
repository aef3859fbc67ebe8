"""`maxlm --help` and an error in a config are answered at once: jax is not even imported."""

import math
import resource
import subprocess
import sys
from functools import cache

import pytest
from source_files import ROOT

LIBRARIES = ["-c", "import typer, pydantic, ruamel.yaml"]
TIMES_LIBRARIES = 4  # CPU seconds over those of importing these libraries, on any machine: 2.9 to 3.3 were seen
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "numpy", "tokenizers", "pyarrow", "matplotlib")
HELP = ["--help"]
MISTAKE = ["train", "runs/quickstart", "model.d_modle=8"]

both = pytest.mark.parametrize(("arguments", "code"), [(HELP, 0), (MISTAKE, 2)], ids=["help", "mistake"])


@both
def test_it_takes_little_cpu_time(arguments, code):
    """CPU seconds, the least of a few runs: however many processes share the machine, a run has the same work to do."""
    seconds = []
    while min(seconds, default=math.inf) >= TIMES_LIBRARIES * cpu_seconds_of_libraries() and len(seconds) < 10:
        seconds.append(cpu_seconds(["-m", "maxlm", *arguments], code))
    assert min(seconds) < TIMES_LIBRARIES * cpu_seconds_of_libraries()


@cache
def cpu_seconds_of_libraries():
    return min(cpu_seconds(LIBRARIES, 0) for _ in range(5))


def cpu_seconds(arguments, code):
    """CPU time of Python with these arguments, which ends with `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == code
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@both
def test_it_imports_nothing_heavy(arguments, code):
    command = [sys.executable, "-X", "importtime", "-m", "maxlm", *arguments]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == code
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in imported, "the list of imports is not read as it should be"
    assert imported.isdisjoint(HEAVY), sorted(imported.intersection(HEAVY))
