"""The report's maps of experts: every load is in the place and the colour it should have, and a dense run has none of it."""

import json
import re

import numpy as np
import pytest

from maxlm.telemetry.balance import Balance
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.load import EMPTY, Loads, load_run
from maxlm.telemetry.report.maps import BOUNDS, EVEN, LABELS, WIDTH, columns, heat, load_sentences
from maxlm.telemetry.report.render import render
from maxlm.telemetry.run_dir import RunDirectory

TOKENS = 4096


def balance(load_LE, dropped=0):
    layers = len(load_LE)
    means = {name: np.full(layers, TOKENS * 0.5) for name in ("confidence", "entropy", "balance", "z")}
    tokens, unsound = np.full(layers, TOKENS), np.zeros(layers)
    return Balance.from_sums(1, load_E=load_LE, tokens=tokens, dropped=np.full(layers, dropped), unsound=unsound, **means)


@pytest.fixture
def make(tmp_path, record):
    """Writes a run whose loads are a function of the step, and gives its folder; None: a dense one."""

    def run_of(name, load_of, steps=40, dropped=0):
        run = RunDirectory.create(tmp_path, name)
        run.write_config("model: {n_layers: 5, moe: {n_experts: 8, n_dense: 1}}\n" if load_of else "model: {n_layers: 5}\n")
        files = FileObserver(run)
        files.on_event(Event("start", 0, 1000.0))
        for step in range(1, steps + 1):
            seen = balance(load_of(step), dropped) if load_of else None
            files.on_step(record(step, extra=seen.figures() if seen else {}, balance=seen))
        files.close()
        return run.path

    return run_of


def even(layers=4, experts=8):
    return np.full((layers, experts), TOKENS // experts)


def crowded(layer, expert, times, layers=4):
    load_LE = even(layers).astype(float)
    rest = (8 - times) / 7
    load_LE[layer] *= rest
    load_LE[layer, expert] = TOKENS / 8 * times
    return np.rint(load_LE).astype(int)


def report_of(tmp_path, *runs):
    return write_report(list(runs), tmp_path / "report.html").read_text()


def painted(svg):
    """The colour of every (pixel, row) that is not the ground."""
    found = {}
    for colour, strokes in re.findall(r'<path class="h(\d)" d="([^"]*)"', svg):
        for x, row, length in re.findall(r"M(\d+) (\d+)h(\d+)", strokes):
            for pixel in range(int(x), int(x) + int(length)):
                assert (pixel, int(row)) not in found  # each place has one colour
                found[pixel, int(row)] = int(colour)
    return found


# The maps


def test_every_load_has_its_colour_in_its_place():
    times = [0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 1.6, 3.0, 5.0]
    assert len(times) == len(LABELS) == len(BOUNDS) + 2
    load_NLE = np.array([[np.roll(times, step)] for step in range(9)]) * 1000
    cells = columns(Loads(np.arange(1.0, 10.0), load_NLE.astype(int), 0), 1)
    values = cells.load_CLE[:, 0] / 1000
    colours = painted(heat("Layer 0", "", "", cells, values, 0))
    width = WIDTH
    for column in range(9):
        pixel = round(width * (column + 0.5) / 9)
        assert [colours.get((pixel, row), EVEN) for row in range(9)] == np.roll(range(9), column).tolist()


@pytest.mark.parametrize(("records", "experts", "panels"), [(1, 8, 2), (7, 64, 6), (1002, 8, 1), (1002, 256, 3), (1002, 256, 6)])
def test_columns_lose_no_choice_and_are_few(records, experts, panels):
    steps_N = np.unique([1, *range(300, 300 * records, 300)]).astype(float)
    load_NLE = np.random.default_rng(0).integers(0, 1000, (len(steps_N), 2, experts))
    cells = columns(Loads(steps_N, load_NLE, 0), panels)
    assert (cells.load_CLE.sum(axis=0) == load_NLE.sum(axis=0)).all()
    assert len(cells.ends_C) == len(cells.load_CLE) <= 161
    assert (np.diff(cells.ends_C) > 0).all()
    assert (cells.first_step < cells.ends_C).all()
    assert cells.ends_C[-1] == steps_N[-1]


def test_the_map_is_painted_from_edge_to_edge(make):
    run = load_run(make("r", lambda step: crowded(0, 3, 8.0)))
    cells = columns(run.loads, 4)
    colours = painted(heat("Layer 1", "", "", cells, cells.load_CLE[:, 0] / 512, 1))
    assert {pixel for pixel, _ in colours} == set(range(WIDTH))
    assert {colours[pixel, 3] for pixel in range(WIDTH)} == {8}
    assert {colours[pixel, 4] for pixel in range(WIDTH)} == {0}


# The words


def test_the_sentence_names_the_layer_the_expert_and_its_share(make):
    run = load_run(make("r", lambda step: crowded(2, 3, 4.1) if step > 20 else even(), dropped=41))
    assert load_sentences(run).startswith("From step 37 on, expert 3 of layer 3 takes 4.1 times its share, more than any other. 1.0% of")


def test_even_load_and_idle_experts_are_said():
    assert load_sentences(load_run_of(even())) == "At step 9, load is even: no expert takes more than 1.00 times its share."
    load_LE = even()
    load_LE[3, 2:5] = 0
    assert "Experts without a token in that time: 3 of 8 in layer 5." in load_sentences(load_run_of(load_LE))
    assert "4 of 8 in layer 2, 4 of 8 in layer 3, 4 of 8 in layer 4, and some in 1 more layer." in load_sentences(
        load_run_of(np.where(np.arange(8) < 4, even(), 0))
    )


def load_run_of(load_LE):
    """A run of one record; its first layer with experts is layer 2."""

    class Run:
        loads = Loads(np.array([9.0]), load_LE[None], 2)

        @staticmethod
        def get(name):
            return EMPTY

    return Run()


# The page


def test_few_layers_have_a_map_each_and_many_one_of_all_and_the_worst(tmp_path, make):
    few = report_of(tmp_path, make("few", lambda step: crowded(1, 3, 2.0)))
    assert re.findall(r"<figcaption>(Layer \d+)", few) == [f"Layer {n}" for n in (1, 2, 3, 4)]
    assert "Busiest expert of each layer" not in few
    many = report_of(tmp_path, make("many", lambda step: np.concatenate([crowded(1, 3, 4.0), crowded(0, 1, 3.0), idle_expert()])))
    assert re.findall(r"<figcaption>(Layer \d+)", many) == ["Layer 2", "Layer 5", "Layer 9"]
    assert "Busiest expert of each layer" in many


def idle_expert():
    load_LE = even(1)
    load_LE[0, 0] = 0
    return load_LE


def test_a_dense_run_has_no_section_no_map_and_no_colours(tmp_path, make):
    html = report_of(tmp_path, make("dense", None))
    for word in ("How experts share", 'class="heat"', "--h4", "routing.jsonl"):
        assert word not in html


def test_a_dense_run_beside_one_with_experts(tmp_path, make):
    html = report_of(tmp_path, make("dense", None), make("moe", lambda step: even()))
    assert html.count('class="heat"') == 4
    section = html.split("Expert load</h2>")[1].split("</section>")[0]
    assert re.findall(r"<h3>(.*?)</h3>", section) == ["moe"]


def test_dropped_choices_have_a_chart_only_where_there_are_any(tmp_path, make):
    assert "Dropped choices" not in report_of(tmp_path, make("a", lambda step: even()))
    assert "Dropped choices" in report_of(tmp_path, make("b", lambda step: even(), dropped=4))


def test_alarms_are_told_in_the_page(tmp_path, make):
    path = make("r", lambda step: even())
    with (path / "events.jsonl").open("a") as file:
        file.write(Event("alarm", 30, 1001.0, {"reason": "layer 2: <b> 3 of 8 experts", "cause": "idle", "layer": 2}).to_json() + "\n")
    assert "Alarm at step 30: layer 2: &lt;b&gt; 3 of 8 experts" in report_of(tmp_path, path)


BROKEN = ["{}", '{"load":null}', '{"load":[[1,2],[3]]}', '{"load":[[-1,2]]}', '{"load":[[1.5,2]]}', '{"load":[["<b>",2]]}', '{"load":[]}']


@pytest.mark.parametrize("load", [*BROKEN, '{"load":[[1e400,1]]}', '{"load":[[9223372036854775807,1]]}', '{"load":[[true]]}', "[", "\0"])
def test_a_broken_line_is_left_out_and_said(tmp_path, make, load):
    path = make("r", lambda step: even())
    with (path / "routing.jsonl").open("a") as file:
        file.write(load.replace("{", '{"step":50,' if load != "{}" else '{"step":50', 1) + "\n")
    run = load_run(path)
    assert run.loads.steps_N.tolist() == list(range(1, 41))
    assert any("routing.jsonl: 1 line" in note for note in run.notes)


def test_a_file_of_nothing_but_broken_lines_makes_a_report_without_maps(tmp_path, make):
    path = make("r", lambda step: even())
    (path / "routing.jsonl").write_text("\n".join(BROKEN))
    assert 'class="heat"' not in report_of(tmp_path, path)


def test_of_two_lines_of_a_step_the_last_counts(make):
    path = make("r", lambda step: even())
    with (path / "routing.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "load": crowded(0, 0, 2.0).tolist()}) + "\n")
    loads = load_run(path).loads
    assert loads.load_NLE[6, 0, 0] == TOKENS / 8 * 2
    assert len(loads.steps_N) == 40


def test_sixty_layers_of_256_experts_make_a_small_page(tmp_path):
    run = RunDirectory.create(tmp_path, "big")
    rng = np.random.default_rng(0)
    with run.routing.open("w") as file:
        for step in range(300, 60_001, 300):
            load_LE = rng.lognormal(0, 0.7, (60, 256)) * 1000  # every neighbour differs: the worst there can be
            file.write(json.dumps({"step": step, "load": load_LE.astype(int).tolist()}) + "\n")
    run.write_config("model: {}\n")
    read = load_run(run.path)
    assert len(render([read])) < 1_000_000
    assert len(render([read] * 20)) < 4_000_000
