"""The study of learning rates and the price of optimizers: results that were cut off, and missing arguments. Nothing is trained."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TRIAL = {"axis": "width", "kind": "mup", "width": 64, "depth": 2, "steps": 10, "first": 0.1, "place": 0, "rate": 0.1, "loss": 3.5}


@pytest.fixture(scope="module")
def study():
    spec = util.spec_from_file_location("transfer_study", TOOLS / "transfer_study.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kept", range(0, len(json.dumps(TRIAL)), 17))
def test_a_study_goes_on_after_half_a_line(study, tmp_path, kept):
    """Wherever the last line was cut, it counts as not made, and the next one is a line of its own."""
    path, whole = tmp_path / "results.jsonl", json.dumps(TRIAL)
    path.write_text(whole + "\n" + whole[:kept])
    assert study.read(path) == [TRIAL]
    study.add(path, {**TRIAL, "place": 1})
    study.add(path, {**TRIAL, "place": 2})
    assert [trial["place"] for trial in study.read(path)] == [0, 1, 2]


def test_a_line_that_lacks_only_its_end_is_kept(study, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(TRIAL))
    study.add(path, {**TRIAL, "place": 1})
    assert [trial["place"] for trial in study.read(path)] == [0, 1]


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("transfer_study.py", [], "--out"),
        ("optimizer_cost.py", [], "run"),
        ("optimizer_cost.py", ["runs/quickstart", "muon"], "cluster.topology"),
    ],
)
def test_wrong_arguments_are_one_line(program, arguments, said):
    done = subprocess.run([sys.executable, str(TOOLS / program), *arguments], capture_output=True, text=True, check=False, cwd=TOOLS.parent)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
