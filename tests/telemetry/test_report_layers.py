"""Heat maps of layers: of one run, a row a layer, in times its own median."""

import json
import re

import pytest

from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory

ENTRIES = ["layer 0", "layer 1", "head"]


def run_of(folder, name, values):
    run = RunDirectory.create(folder, name, primary=True)
    metrics = {"layer_gradient": {"title": "Gradient norm of <each> layer", "unit": "", "entries": ENTRIES}}
    run.events.write_text(Event("start", 0, 1.0, {"metrics": metrics}).to_json() + "\n")
    lines = [{"step": step, "loss": 1.0, **{f"layer_gradient_{i}": v for i, v in enumerate(row, 1)}} for step, row in enumerate(values, 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run.path


@pytest.fixture
def grows(tmp_path):
    """The second layer's is three times its median in the last step."""
    return run_of(tmp_path, "grows", [[0.1, 5.0, 1.0]] * 9 + [[0.1, 15.0, 1.0]])


def test_a_layer_that_grows_stands_out(grows, tmp_path):
    page = write_report([grows], tmp_path / "page.html").read_text()
    section = page[page.index("Layers over steps</h2>") :]
    (figure,) = re.findall(r'<figure class="chart">.*?</figure>', section[: section.index("</section>")])
    assert "Gradient norm of &lt;each&gt; layer" in figure
    assert re.findall(r'<path class="h7" d="(.*?)"/>', figure) == ["M900 1h100"], "2 to 4 times, in the second row, in the last column"
    assert 'viewBox="0 -0.5 1000 2"' in figure, "what is no layer has no row"


def test_a_layer_that_is_not_finite_stands_out(tmp_path):
    """Null in a record: the map is not left out for it, and the layer has the colour of the largest values."""
    run = run_of(tmp_path, "overflows", [[0.1, 5.0, 1.0]] * 9 + [[0.1, None, 1.0]])
    page = write_report([run], tmp_path / "page.html").read_text()
    assert re.findall(r'<path class="h8" d="(.*?)"/>', page) == ["M900 1h100"]


def test_a_layer_that_is_never_finite_costs_no_map(tmp_path, monkeypatch):
    """The others are shown, and it has the colour of the largest values in all columns."""
    monkeypatch.setattr("test_report_layers.ENTRIES", ["layer 0", "layer 1", "layer 2"])
    run = run_of(tmp_path, "dead", [[0.1, None, 1.0]] * 10)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert re.findall(r'<path class="h8" d="(.*?)"/>', page) == ["M0 1h1000"]


def test_of_several_runs_there_are_lines_alone(grows, tmp_path):
    other = run_of(tmp_path, "other", [[1.0, 1.0, 1.0]] * 3)
    assert "Layers over steps" not in write_report([grows, other], tmp_path / "page.html").read_text()


@pytest.mark.parametrize("values", [[], [[1.0, 1.0, 1.0]], [[0.0, None, 1.0]] * 3])
def test_few_or_missing_figures_make_no_map(tmp_path, values):
    assert "Layers over steps" not in write_report([run_of(tmp_path, "few", values)], tmp_path / "page.html").read_text()
