"""The report: one file that fetches nothing, escapes everything and copes with whatever a killed run left behind."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import maxlm.telemetry.report
from maxlm.base.errors import UserError
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import check_place, default_place, write_report
from maxlm.telemetry.report.charts import points_per_line
from maxlm.telemetry.report.load import Run, Series, load_run
from maxlm.telemetry.report.render import identity, render
from maxlm.telemetry.report.summary import figures_of, status_of
from maxlm.telemetry.run_dir import RunDirectory

CONFIG = "model: {{n_layers: 6, d_model: 256, vocab_size: 4096}}\ntrain: {{steps: 100}}\noptimizer: {{peak_lr: {lr}}}\n"
START = {"parameters": 5_770_496, "devices": 8, "device_kind": "TPU v5p", "total_steps": 100}
GOODPUT = {"wall_s": 20.0, "seconds": {"init": 1.0, "compile": 3.0, "step": 15.0, "save": 1.0}}
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Checks that tags close in order, and keeps text, attributes and identifiers."""

    def __init__(self, html):
        super().__init__()
        self.open, self.attributes, self.ids, self.words = [], [], [], []
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


@pytest.fixture
def make(tmp_path, record):
    """Writes a run of 100 steps and gives its folder."""

    def run_of(name, lr=1e-3, reason="done", start=None, config=CONFIG, steps=100):
        run = RunDirectory.create(tmp_path, name)
        run.write_config(config.format(lr=lr))
        files = FileObserver(run)
        files.on_event(Event("start", 0, 1000.0, start or START))
        for step in range(1, steps + 1):
            files.on_step(record(step, loss=8.0 - 0.05 * step, mfu=0.42, tokens_per_s=81234.0))
        files.on_event(Event("eval", steps, 1019.0, {"eval_loss": 3.25}))
        if reason:
            files.on_event(Event("stop", steps, 1020.0, {"reason": reason, "goodput": GOODPUT}))
        files.close()
        return run.path

    return run_of


def report_of(tmp_path, *runs):
    return write_report(list(runs), tmp_path / "report.html").read_text()


def test_a_stranger_reads_what_happened(tmp_path, make):
    page = Page(report_of(tmp_path, make("quickstart")))
    for words in (
        "quickstart trained a model of 5.77 M parameters (6 layers, width 256, vocabulary 4,096)",
        "for 100 steps and saw 51,200 tokens in 20 s",
        "Training loss fell from 7.95 to 3.1",
        "on held-out text it is 3.25 (perplexity 25.8)",
        "81,234 tokens a second, 42.0% of the hardware's peak (MFU) on 8 x TPU v5p",
        "finished",
        "starting 5.0%",
        "compiling 15.0%",
        "peak_lr: 0.001",
    ):
        assert words in page.text
    assert len(page.ids) == len(set(page.ids))


def test_the_peak_that_mfu_is_a_share_of_is_named_unless_it_is_that_of_bf16(tmp_path, make):
    for peak, said in (("bf16", "the hardware's peak"), ("int8", "the hardware's int8 peak"), (["x"], "the hardware's peak")):
        page = Page(report_of(tmp_path, make(f"run-{len(said)}-{len(peak)}", start={**START, "mfu_peak": peak})))
        assert f"42.0% of {said} (MFU)" in page.text


def test_what_a_run_has_cost_is_shown_and_an_estimate_is_marked(tmp_path, make, record):
    bill = {"currency": "USD", "energy": "estimated"}
    spent = {"cost": 1234.0, "energy_kwh": 56.0, "joules_per_token": 0.5, "energy_estimated": True}
    for name, start, marked in (("guess", bill, True), ("counted", {**bill, "energy": "counters"}, False)):
        path = make(name, start={**START, "bill": start}, reason="")
        files = FileObserver(RunDirectory(path, primary=True))
        files.on_step(record(101, extra=spent))
        files.on_event(Event("stop", 101, 1021.0, {"reason": "done", "bill": {"cost": 1250.0, "energy_kwh": 57.0}}))
        files.close()
        text = Page(report_of(tmp_path, path)).text
        assert "$1,250" in text and "57 kWh" in text and "Energy a token" in text
        assert ("~57 kWh" in text) == marked
    assert "$" not in Page(report_of(tmp_path, make("unknown"))).text


def test_with_adapters_it_says_how_many_parameters_are_trained(tmp_path, make):
    page = Page(report_of(tmp_path, make("lora", start={**START, "trained_parameters": 77_824})))
    assert "a model of 5.77 M parameters, 77,824 of them trained" in page.text
    assert "Trained" not in Page(report_of(tmp_path, make("all", start={**START, "trained_parameters": 5_770_496}))).words


def test_a_model_that_was_imported_is_not_taken_for_a_run(tmp_path, make):
    """Its config.yml holds defaults of settings of training, which nobody chose."""
    model = RunDirectory(tmp_path / "llama", primary=True)
    model.evaluations.mkdir(parents=True)
    model.config.write_text(CONFIG.format(lr=33.25))
    model.model.write_text("# Imported from llama by `maxlm import`.\n# 5,770,496 parameters.\nmodel: {n_layers: 6}\n")
    result = {"step": 0, "task": "mine", "kind": "exact_match", "n": 9, "metrics": {"exact_match": {"value": 0.125, "stderr": 0.1}}}
    (model.evaluations / "0-mine.json").write_text(json.dumps(result))
    page = Page(report_of(tmp_path, model.path, make("tuned")))
    assert "Imported from llama by `maxlm import`. 5,770,496 parameters." in page.text
    assert "0.125" in page.text
    assert not re.search(r"killed|is missing|llama trained|33\.25", page.text)


def test_nothing_is_fetched(tmp_path, make):
    html = report_of(tmp_path, make("a"), make("b"))
    page = Page(html)
    assert not [item for item in page.attributes if item[1] in ("src", "srcset", "action", "data")]
    links = [place for tag, name, place in page.attributes if name == "href"]
    assert links and not [place for place in links if ":" in place or place.startswith("/")]  # followed by a click alone
    assert "default-src 'none'" in html
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", html)
    assert set(re.findall(r"https?://[^'\"\s]+", html)) == {"https://github.com/leeoniya/uPlot"}  # in a comment


def test_a_page_links_its_parts_and_files_of_its_run(tmp_path, make):
    """A profile, results, texts and records are one click away, and the links still lead there when page and run are moved together."""
    run = make("a:b<i>")
    profile = run / "profile" / "12" / "profile.html"
    profile.parent.mkdir(parents=True)
    profile.write_text("page")
    page = Page(write_report([run], run / "report.html").read_text(encoding="utf-8"))
    links = [place for tag, name, place in page.attributes if name == "href"]
    anchors, files = {place[1:] for place in links if place.startswith("#")}, [place for place in links if not place.startswith("#")]
    assert {"events", "files", "settings"} < anchors <= set(page.ids)
    assert files[0] == "profile/12/profile.html"
    assert {"metrics.jsonl", "events.jsonl"} < set(files)
    assert "Profile of the steps from 12 on" in page.text
    outside = Page(write_report([run], tmp_path / "out.html").read_text(encoding="utf-8"))
    files = [place for tag, name, place in outside.attributes if name == "href" and not place.startswith("#")]
    assert all((tmp_path / unquote(place)).exists() and ":" not in place for place in files) and files
    assert not [item for item in Page(render([load_run(run)])).attributes if item[1] == "href" and not item[2].startswith("#")]


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_text_from_a_run_cannot_become_markup(tmp_path, make):
    start = {"parameters": EVIL, "devices": EVIL, "device_kind": EVIL, "total_steps": EVIL}
    runs = [
        make(f"<b onclick=x>{i}&amp;", start=start, reason=EVIL, config="evil: '" + EVIL.replace("'", "''") + "{lr}'\n", lr=i)
        for i in (1, 2)
    ]
    html = report_of(tmp_path, *runs)
    page = Page(html)
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "<b onclick" not in html
    assert "<script>alert(1)</script>" in page.text  # it is shown as the text it is
    assert not [item for item in page.attributes if item[1].startswith("on")]


def test_several_runs_show_only_the_settings_that_differ(tmp_path, make):
    page = Page(report_of(tmp_path, make("a"), make("b", lr=3e-3), make("c")))
    table = page.text.split("Differing settings")[-1].split("Events")[0]
    assert "optimizer.peak_lr 0.001 0.003 0.001" in table
    assert "n_layers" not in table
    assert "3 runs compared" in page.text
    assert "State finished finished finished" in page.text
    assert "the configs are equal" in Page(report_of(tmp_path, tmp_path / "a", tmp_path / "c")).text


@pytest.mark.parametrize("missing", ["config.yml", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "binary"])
def test_damaged_runs_still_make_a_report(tmp_path, make, missing, damage):
    path = make("r") / missing
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "torn": content[:-9] + b"{", "binary": b"\xff\0[{" * 99 + b"\n"}[damage])
    page = Page(report_of(tmp_path, tmp_path / "r"))
    assert "Training report" in page.text
    if damage in ("missing", "binary"):
        assert missing in page.text  # it says what is wrong


def test_one_readable_line_is_enough(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step":7,"loss":3.0}\n{"step":8,"lo')
    page = Page(report_of(tmp_path, tmp_path / "r"))
    assert "1 line could not be read" in page.text
    assert "Training loss is 3 nats" in page.text


def test_text_that_is_no_unicode_does_not_cost_the_page(tmp_path):
    """JSON may hold half a pair of surrogates, also in what is a folder's name that is not UTF-8."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "events.jsonl").write_text('{"kind": "alarm", "step": 1, "time": 1.0, "reason": "half \\ud800 of a letter"}\n')
    assert "half ? of a letter" in report_of(tmp_path, tmp_path / "r")


@pytest.mark.parametrize("kind", ["absent", "empty folder", "file", "nul", "none"])
def test_what_is_no_run_directory_is_an_error_of_one_line(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    given = {
        "absent": [tmp_path / "nope"],
        "empty folder": [tmp_path / "empty"],
        "file": [tmp_path / "file"],
        "nul": [tmp_path / "a\0b"],
        "none": [],
    }[kind]
    with pytest.raises(UserError) as caught:
        write_report(given, tmp_path / "out.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.html").exists()


def test_a_folder_of_runs_says_what_it_holds_and_no_run_is_named_twice(tmp_path, make, monkeypatch):
    one, other = make("a"), make("b")
    with pytest.raises(UserError, match=f"it holds runs: give those, such as {one}$"):
        write_report([tmp_path], tmp_path / "out.html")
    monkeypatch.chdir(tmp_path)
    for again in (one, Path("a"), Path("b/../a")):
        with pytest.raises(UserError, match=f"{again} is named twice"):
            write_report([one, other, again], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_a_place_without_a_folder_is_an_error_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*; make it first"):
        check_place(tmp_path / "no" / "report.html")
    assert check_place(tmp_path / "report.html") == tmp_path / "report.html"


def test_losses_of_a_column_have_the_same_digits(tmp_path):
    losses = {"a": 1.9, "b": 1.905, "c": 2.0, "d": 12.5}
    for name, loss in losses.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    html = report_of(tmp_path, *(tmp_path / name for name in losses))
    assert [text for text in ("1.900", "1.905", "2.000", "12.50") if f">{text}</td>" not in html] == []


def test_a_place_that_takes_no_report_is_an_error_and_the_old_one_stays(tmp_path, make):
    with pytest.raises(UserError, match="cannot be written"):
        write_report([make("r")], tmp_path / "no" / "such" / "report.html")


def test_a_comparison_of_other_runs_of_the_same_names_is_not_overwritten(tmp_path, make, monkeypatch):
    """By the default name; that of the same runs is made anew, and --out chooses freely among reports."""
    monkeypatch.chdir(tmp_path)
    first, second = ([shutil.copytree(make(name), tmp_path / where / name) for name in "ab"] for where in ("x", "y"))
    for _ in range(2):
        assert write_report(first, default_place(first)) == Path("report-a-b.html")
    with pytest.raises(UserError, match=r"report-a-b\.html compares other runs, or these in another place:") as caught:
        default_place(second)
    assert "\n" not in str(caught.value)
    assert check_place(Path("report-a-b.html")) == Path("report-a-b.html")
    assert default_place(first[:1]) == first[0] / "report.html"


def test_comparisons_of_many_runs_do_not_stand_in_each_others_way(tmp_path, monkeypatch):
    """Their names leave out runs: each set has a file of its own, whatever the order, and may be made again."""
    monkeypatch.chdir(tmp_path)
    sets = [[Path("x") / name for name in names] for names in ("abcd", "abce", "dcba")]
    for runs in sets:
        for folder in runs:
            RunDirectory.create("x", folder.name).config.write_text("model: {n_layers: 2}\n")
        write_report(runs, default_place(runs))
    first, second, turned = map(default_place, sets)
    assert first == turned != second and re.fullmatch(r"report-a-and-3-more-[0-9a-f]{8}\.html", str(first))
    assert {path.name for path in tmp_path.glob("*.html")} == {str(first), str(second)}
    shutil.move("x", "y")
    assert default_place([Path("y") / name for name in "abcd"]) not in (first, second)


def test_a_page_is_of_its_runs_in_any_order(make):
    runs = [make("a"), make("b")]
    assert identity(runs) == identity(runs[::-1]) != identity(runs[:1])


def test_a_stale_attempt_does_not_double_a_step(tmp_path):
    (tmp_path / "r").mkdir()
    records = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0), (3, None), (4, 4.0)]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in records]
    (tmp_path / "r" / "metrics.jsonl").write_text("\n".join(lines))
    loss = load_run(tmp_path / "r").get("loss")
    assert loss.steps_N.tolist() == [1, 2, 3, 4]
    assert loss.values_N.tolist() == [9, 5, 7, 4]


def test_figures_that_begin_late_or_have_gaps_keep_their_steps(tmp_path):
    (tmp_path / "r").mkdir()
    records = [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2, "b": 20},
        {"step": 3, "b": 30},
        {"step": 2, "a": 4},
        {"step": 5, "a": None, "c": 5.5},
    ]
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = load_run(tmp_path / "r")
    found = {name: dict(zip(one.steps_N.tolist(), one.values_N.tolist(), strict=True)) for name, one in run.series.items()}
    assert found == {"a": {1: 1, 2: 4}, "b": {2: 20, 3: 30}, "c": {5: 5.5}}
    assert run.not_finite == {"a": 5}


@pytest.mark.parametrize(
    ("reason", "word", "tone"),
    [
        ("done", "finished", "good"),
        ("preempted", "preempted", "warn"),
        ("interrupted", "interrupted", "warn"),
        ("unhealthy", "unhealthy", "bad"),
        (None, "no end recorded", "idle"),
    ],
)
def test_status(make, reason, word, tone):
    status = status_of(load_run(make("r", reason=reason)))
    assert (status.label, status.tone) == (word, tone)


@pytest.mark.parametrize("value", ["9" * 400, "1e308", "-1e308", "1e999", "NaN", "true", "{}"])
def test_no_value_spoils_a_page(tmp_path, make, value):
    """Some cannot be summed or written as JSON: what they are of is left out."""
    path = make("r")
    for file in (path / "metrics.jsonl", path / "events.jsonl"):
        lines = file.read_text().replace('"step_time_s":0.', '"step_time_s":1e308,"was":0.').splitlines()
        item = json.loads(lines[0])
        odd = [json.dumps(item).replace(json.dumps(number), value) for number in item.values() if isinstance(number, float)]
        start = json.dumps({**item, "parameters": 0.125, "trained_parameters": 0.25}).replace("0.125", value)
        file.write_text("\n".join([*odd, start, *lines]) + "\n")
    with (path / "events.jsonl").open("a") as file:
        file.write('{"kind": "restore", "step": 5, "time": 1.0, "passed_over": VALUE}\n'.replace("VALUE", value))
        file.write('{"kind": "eval", "step": 5, "time": 1.0, "eval_loss": 2.0, "eval_loss/wiki": VALUE}\n'.replace("VALUE", value))
    html = report_of(tmp_path, path)
    blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert len(blocks) > 3
    for block in blocks:
        json.loads(block, parse_constant=pytest.fail)


def test_time_of_a_killed_attempt_is_that_of_its_steps(make):
    """First attempt: killed after 60 steps of 0.1 s with no last word; second: steps 51 to 100 and a stop after 8 s; between them 95 s."""
    path = make("r", reason=None)
    events = [
        Event("start", 0, 1000.0),
        Event("killed", 60, 1005.0),  # as the next attempt notes it
        Event("start", 0, 1100.0),
        Event("restore", 50, 1101.0),
        Event("stop", 100, 1108.0, {"reason": "done"}),
    ]
    (path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    run = load_run(path)
    assert len(run.attempts) == 2
    assert [attempt.wall_s for attempt in run.attempts] == pytest.approx([5.0, 8.0])
    assert figures_of(run)["seconds"] == pytest.approx(108.0)
    assert run.ledger.seconds["down"] == pytest.approx(95.0)


def test_a_held_out_loss_is_of_the_step_that_was_evaluated(make):
    """What a run that was stopped or diverged repeats at its end is the loss of an earlier step."""
    path = make("r", reason=None)
    for reason, steps in (("preempted", [90]), ("unhealthy", [90]), ("done", [90, 99])):
        events = [
            Event("start", 0, 1000.0),
            Event("eval", 90, 1001.0, {"eval_loss": 4.1}),
            Event("stop", 99, 1002.0, {"reason": reason, "eval_loss": 4.1}),
        ]
        (path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
        assert load_run(path).eval_loss.steps_N.tolist() == steps


def test_a_long_run_makes_a_small_page(tmp_path):
    run = RunDirectory.create(tmp_path, "long")
    with run.metrics.open("w") as file:
        for step in range(1, 100_001):
            wave = 0.1 * ((step * 7919) % 1000) / 1000
            file.write(
                f'{{"step":{step},"loss":{3 + wave:.6f},"grad_norm":{1 + wave:.6f},"lr":0.0003,"tokens":{step * 512},'
                f'"tokens_per_s":{80000 + 999 * wave:.3f},"step_time_s":{0.1 + wave:.5f},"mfu":0.4,"data_wait_s":{wave / 100:.7f}}}\n'
            )
    with run.events.open("w") as file:
        for step in range(0, 100_001, 500):
            file.write(Event("save", step, 1e9 + step).to_json() + "\n")
            file.write(Event("eval", step, 1e9 + step, {"eval_loss": 3.0}).to_json() + "\n")
    html = report_of(tmp_path, run.path)
    assert len(html.encode()) < 2_000_000
    assert "Saved 201 times, steps 0 to 100,000" in Page(html).text


def test_scripts_and_styles_are_in_the_wheel():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["maxlm.telemetry.report"]
    files = [
        path for path in Path(maxlm.telemetry.report.__file__).parent.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert {path.suffix for path in files} >= {".js", ".css"}
    assert [path.name for path in files if not any(path.match(pattern) for pattern in patterns)] == []


def test_telemetry_needs_no_jax():
    code = (
        "import sys, maxlm.telemetry.report, maxlm.telemetry.console, maxlm.telemetry.files, maxlm.telemetry.tensorboard, "
        "maxlm.telemetry.goodput; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def charts_of(html):
    """Data of each chart by title; of a chart of lines where a heat map has the same title."""
    found = [json.loads(text) for text in re.findall(r'</figcaption><script type="application/json">(.*?)</script>', html, re.S)]
    return {chart["title"]: chart for chart in sorted(found, key=lambda chart: "lines" in chart)}


def shared(html):
    """Data that all charts share, an entry for each run."""
    return json.loads(re.search(r'<script type="application/json" id="runs">(.*?)</script>', html, re.S)[1])


def test_restarts_rollbacks_and_skipped_updates_are_marked_at_their_step_and_time(tmp_path, record):
    run = RunDirectory.create(tmp_path, "r")
    for first, last in ((0, 60), (50, 100)):
        files = FileObserver(run)
        files.on_event(Event("start", first, 1000.0 + first, START))
        for step in range(first + 1, last + 1):
            files.on_step(record(step, time=1000.0 + first + 0.1 * (step - first)))
        files.close()
    with run.events.open("a") as file:
        file.write(Event("skip", 70, 1052.0, {"reason": "loss nan <b>"}).to_json() + "\n")
        file.write(Event("rollback", 80, 1054.0, {"from_step": 90}).to_json() + "\n")
    html = report_of(tmp_path, run.path)
    [data] = shared(html)
    found = {mark["kind"]: (mark["step"], mark["seconds"], mark["text"]) for mark in data["marks"]}
    assert found == {
        "restart": (50, 50.0, "Started again after step 50"),
        "skip": (70, 52.0, "Skipped the update of step 70: loss nan <b>"),
        "rollback": (80, 54.0, "Rolled back from step 90 to step 80"),
    }
    for words in ("restart", "rollback", "skipped update"):
        assert words in Page(html).text.split("smoothing")[1].split("outliers")[0]  # the legend
    steps, values = np.cumsum(data["seconds"]["steps"]), data["seconds"]["values"]
    assert np.interp([1, 50, 51, 100], steps, values) == pytest.approx([0.1, 5.0, 50.1, 55.0])
    assert np.interp(80, np.cumsum(data["tokens"]["steps"]), data["tokens"]["values"]) == 512 * 80


def test_forty_thousand_marks_are_few_on_the_page(tmp_path, make):
    path = make("r", reason=None)
    with (path / "events.jsonl").open("a") as file:
        file.writelines(Event("skip", step, 1000.0 + step).to_json() + "\n" for step in range(1, 40_001))
        file.write(Event("rollback", 20_000, 60_000.0).to_json() + "\n")
    marks = shared(report_of(tmp_path, path))[0]["marks"]
    assert len(marks) <= 2000
    assert [mark["kind"] for mark in marks].count("rollback") == 1


def test_a_run_that_recorded_no_time_offers_no_axis_of_time(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step":7,"loss":3.0,"tokens":700}\n')
    html = report_of(tmp_path, tmp_path / "r")
    assert re.findall(r'name="x" value="(\w+)"', html) == ["step", "tokens"]
    assert shared(html)[0]["seconds"] is None


@pytest.fixture
def evaluated(make):
    """Writes a run with several held-out sets, and gives its folder."""

    def run_of(name):
        run = make(name)
        with (run / "events.jsonl").open("a") as file:
            for step, by in ((50, 0.0), (60, -0.5), (100, -0.25)):
                losses = {"eval_loss": 3.25, "eval_loss_ema": 3.0, "eval_loss/wiki": 3.5, "eval_loss_ema/wiki": 3.4}
                file.write(Event("eval", step, 1019.0, {key: loss + by for key, loss in losses.items()}).to_json() + "\n")
        return run

    return run_of


SETS = ["Held-out loss", "Held-out loss of the moving average", "Held-out loss: wiki", "Held-out loss of the moving average: wiki"]


def test_held_out_sets_of_a_run_are_lines_of_a_chart_and_rows_of_a_table(tmp_path, evaluated):
    html = report_of(tmp_path, evaluated("r"))
    found = charts_of(html)
    assert [line["label"] for line in found["Held-out losses"]["lines"]] == SETS
    assert found["Held-out losses"]["lines"][2]["mid"] == [3.5, 3, 3.25]
    assert "Held-out loss: wiki 3.250 3.000 step 60" in Page(html).text
    assert "of a task" not in Page(html).text


def test_held_out_sets_of_several_runs_have_a_chart_each_and_a_place_in_the_comparison(tmp_path, evaluated, make):
    html = report_of(tmp_path, evaluated("a"), make("b"))
    found = charts_of(html)
    for title in SETS[1:]:
        assert [(line["label"], line["run"]) for line in found[title]["lines"]] == [("a", 0)]
    assert "Held-out loss: wiki 3.250 –" in Page(html).text


def test_many_runs_have_a_row_each_in_tables(tmp_path, make):
    html = report_of(tmp_path, *(make(name, lr=float(i)) for i, name in enumerate("abcde", 1)))
    heads = ["".join(re.findall(r">([^<]+)<", row)) for row in re.findall(r"<tbody><tr>.*?</tr>|<tr><th scope=row>.*?</th>", html)]
    assert [head[:1] for head in heads][:5] == list("abcde")
    table = Page(html).text.split("Differing settings")[-1]
    assert table.startswith(" run optimizer.peak_lr a 1.0 b 2.0 c 3.0 d 4.0 e 5.0")


LAYERS = {"layer_gradient": {"title": "Gradient norm of each layer", "entries": ["layer 0", "layer 1", "layer 2", "layer 3", "embedding"]}}


def with_layers(make, record, name, factor=1.0):
    path = make(name, steps=0, start={**START, "metrics": LAYERS})
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, 11):
            norms = {f"layer_gradient_{i}": factor * i if i != 5 or step < 6 else 0.5 for i in range(1, 6)}
            file.write(json.dumps({"step": step, "loss": 3.0, **norms}) + "\n")
    return path


def test_figures_of_layers_are_lines_with_their_names(tmp_path, make, record):
    chart = charts_of(report_of(tmp_path, with_layers(make, record, "r")))["Gradient norm of each layer"]
    assert [line["label"] for line in chart["lines"]] == LAYERS["layer_gradient"]["entries"]
    assert chart["lines"][3]["mid"] == [4] * 10


def test_of_figures_of_layers_of_several_runs_the_largest_is_compared(tmp_path, make, record):
    chart = charts_of(report_of(tmp_path, with_layers(make, record, "a"), with_layers(make, record, "b", 10.0)))[
        "Gradient norm of each layer"
    ]
    assert [(line["label"], line["mid"]) for line in chart["lines"]] == [("a", [5] * 5 + [4] * 5), ("b", [50] * 5 + [40] * 5)]


@pytest.mark.parametrize(("runs", "steps"), [(1, 200_000), (20, 10_000)])
def test_a_page_of_long_runs_with_many_layers_is_small(runs, steps):
    """However long they are, for each line has as many points at most. Without reading them: that takes minutes."""
    steps_N = np.arange(1.0, steps + 1)
    noise = Series(steps_N, np.random.default_rng(0).normal(3, 0.1, steps))
    names = ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "mfu", "data_wait_s", "time")
    columns = dict.fromkeys((*names, *(f"layer_gradient_{i}" for i in range(1, 62))), noise)
    events = [Event("start", 0, 0.0, {"metrics": LAYERS}), *(Event("skip", step, float(step)) for step in range(1, steps // 10))]
    events += [Event("eval", step, float(step), {"eval_loss": 3.25}) for step in range(0, steps, 500)]
    one = Run("r", Path("r"), columns, events, {}, "", [], 0.0)
    html = render([one] * runs)
    assert points_per_line([one] * runs) < steps
    assert max(len(line["steps"]) for line in charts_of(html)["Loss"]["lines"][:1]) <= points_per_line([one] * runs)
    assert len(html.encode()) < 5_000_000
