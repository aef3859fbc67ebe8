"""The study of learning rates and the price of optimizers: results that were cut off, and missing arguments. Nothing is trained."""

import json
import sys
from importlib import util
from pathlib import Path

import fork_server
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "lab"
TRIAL = {"axis": "width", "kind": "mup", "width": 64, "depth": 2, "steps": 10, "first": 0.1, "place": 0, "rate": 0.1}
TRIAL |= {"seed": 0, "loss": 3.5}


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


@pytest.mark.parametrize("centre", [-7.3, -0.49, 0.0, 2.5, 6.8])
def test_the_search_finds_the_minimum_between_places(study, centre):
    """Each rate is tried with every seed before the next; noise that is opposite in two seeds changes nothing."""
    model, trials = study.Model("width", "mup", 128, 2), []
    while (place := study.next_place(study.means(losses := study.losses_of(trials, model, 10), 2))) is not None:
        seed = len(losses.get(place, []))
        noise = 0.3 * (-1) ** (seed + place)
        trials.append({**TRIAL, **model._asdict(), "place": place, "seed": seed, "loss": 2 + 0.01 * (place - centre) ** 2 + noise})
    found = study.means(study.losses_of(trials, model, 10), 2)
    assert study.best_place(found) == pytest.approx(centre, abs=1e-6)
    assert len(trials) == 2 * len(found) <= 2 * (abs(centre) + 2 * study.MARGIN + 2)


def test_a_model_that_diverges_is_searched_lower_and_given_up_in_the_end(study):
    losses = {0: float("inf")}
    while (place := study.next_place(losses)) is not None:
        losses[place] = float("inf") if place > -5 else 2.0 + 0.1 * abs(place + 7)
    assert study.best_place(losses) == pytest.approx(-7)
    assert study.next_place(dict.fromkeys(range(study.LOWEST, 1), float("inf"))) is None


def test_a_rate_that_diverges_is_no_neighbour_of_a_parabola(study):
    assert study.best_place({-1: 2.1, 0: 2.0, 1: float("inf")}) == 0.0


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("transfer_study.py", [], "--out"),
        ("optimizer_cost.py", [], "run"),
        ("optimizer_cost.py", ["runs/quickstart", "muon"], "cluster.topology"),
    ],
)
def test_wrong_arguments_are_one_line(program, arguments, said):
    done = fork_server.run([sys.executable, str(TOOLS / program), *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
