"""The report: one file that fetches nothing, escapes everything and copes with whatever a killed run left behind."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from maxlm.config.errors import UserError
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.summary import figures_of, status_of
from maxlm.telemetry.run_dir import RunDirectory

CONFIG = "model: {{n_layers: 6, d_model: 256, vocab_size: 4096}}\ntrain: {{steps: 100}}\noptimizer: {{peak_lr: {lr}}}\n"
START = {"parameters": 5_770_496, "devices": 8, "device_kind": "TPU v5p", "total_steps": 100}
GOODPUT = {"wall_s": 20.0, "seconds": {"init": 1.0, "compile": 3.0, "step": 15.0, "save": 1.0}}
VOID = {"meta", "input", "br", "line", "rect", "circle", "polyline"}


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
    assert not [item for item in page.attributes if item[1] in ("src", "href", "srcset", "action", "data")]
    assert "default-src 'none'" in html
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", html)
    assert set(re.findall(r"https?://[^'\"\s]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address that is opened


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
    table = page.text.split("Differing settings")[1].split("Events")[0]
    assert "optimizer.peak_lr 0.001 0.003 0.001" in table
    assert "n_layers" not in table
    assert "3 runs compared" in page.text
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


def test_a_place_that_takes_no_report_is_an_error_and_the_old_one_stays(tmp_path, make):
    with pytest.raises(UserError, match="cannot be written"):
        write_report([make("r")], tmp_path / "no" / "such" / "report.html")


def test_a_stale_attempt_does_not_double_a_step(tmp_path):
    (tmp_path / "r").mkdir()
    records = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0), (3, None), (4, 4.0)]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in records]
    (tmp_path / "r" / "metrics.jsonl").write_text("\n".join(lines))
    loss = load_run(tmp_path / "r").get("loss")
    assert loss.steps_N.tolist() == [1, 2, 3, 4]
    assert loss.values_N.tolist() == [9, 5, 7, 4]


@pytest.mark.parametrize(
    ("reason", "word", "tone"),
    [
        ("done", "finished", "good"),
        ("preempted", "preempted", "warn"),
        ("unhealthy", "unhealthy", "bad"),
        (None, "no end recorded", "idle"),
    ],
)
def test_status(make, reason, word, tone):
    status = status_of(load_run(make("r", reason=reason)))
    assert (status.label, status.tone) == (word, tone)


def test_time_of_a_killed_attempt_is_that_of_its_steps(make):
    """First attempt: killed after 60 steps of 0.1 s with no last word; second: steps 51 to 100 and a stop after 8 s; between them 95 s."""
    path = make("r", reason=None)
    events = [
        Event("start", 0, 1000.0),
        Event("start", 0, 1100.0),
        Event("restore", 50, 1101.0),
        Event("stop", 100, 1108.0, {"reason": "done"}),
    ]
    (path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    run = load_run(path)
    figures = figures_of(run)
    assert figures.attempts == 2
    assert [attempt.wall_s for attempt in run.attempts] == pytest.approx([5.0, 8.0])
    assert figures.seconds == pytest.approx(108.0)
    assert run.ledger.seconds["down"] == pytest.approx(95.0)


def test_a_long_run_makes_a_small_page(tmp_path):
    run = RunDirectory.create(tmp_path, "long")
    with run.metrics.open("w") as file:
        for step in range(1, 300_001):
            wave = 0.1 * ((step * 7919) % 1000) / 1000
            file.write(
                f'{{"step":{step},"loss":{3 + wave:.6f},"grad_norm":{1 + wave:.6f},"lr":0.0003,"tokens":{step * 512},'
                f'"tokens_per_s":{80000 + 999 * wave:.3f},"step_time_s":{0.1 + wave:.5f},"mfu":0.4,"data_wait_s":{wave / 100:.7f}}}\n'
            )
    with run.events.open("w") as file:
        for step in range(0, 300_001, 500):
            file.write(Event("save", step, 1e9 + step).to_json() + "\n")
            file.write(Event("eval", step, 1e9 + step, {"eval_loss": 3.0}).to_json() + "\n")
    html = report_of(tmp_path, run.path)
    assert len(html.encode()) < 2_000_000
    assert "Saved 601 times, steps 0 to 300,000" in Page(html).text


def test_telemetry_needs_no_jax():
    code = (
        "import sys, maxlm.telemetry.report, maxlm.telemetry.console, maxlm.telemetry.files, maxlm.telemetry.tensorboard, "
        "maxlm.telemetry.goodput; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_restarts_and_skipped_updates_are_marked_and_charts_span_all_steps(tmp_path, record):
    run = RunDirectory.create(tmp_path, "r")
    for first, last in ((0, 60), (50, 100)):
        files = FileObserver(run)
        files.on_event(Event("start", first, 1000.0 + first, START))
        for step in range(first + 1, last + 1):
            files.on_step(record(step, grad_norm=1.0 if step < 70 else float("nan")))
        files.close()
    with run.events.open("a") as file:
        file.write(Event("skip", 70, 1080.0, {"reason": "loss nan"}).to_json() + "\n")
    html = report_of(tmp_path, run.path)
    drawn = re.findall(r"<figure>.*?</figure>", html)
    assert any("Gradient norm" in figure for figure in drawn)
    for figure in drawn:
        assert 'class="restart' in figure
        assert 'class="skip"' in figure
        assert ">100</text>" in figure  # the last step is on the axis
    assert "restart" in Page(html).text
    assert "skipped update" in Page(html).text


def test_losses_of_the_moving_average_are_charts_of_losses(tmp_path, make, record):
    run = make("r")
    with (run / "events.jsonl").open("a") as file:
        for step in (50, 100):
            losses = {"eval_loss": 3.25, "eval_loss_ema": 3.0, "eval_loss/wiki": 3.5, "eval_loss_ema/wiki": 3.4}
            file.write(Event("eval", step, 1019.0, losses).to_json() + "\n")
    text = Page(report_of(tmp_path, run)).text
    assert "Held-out loss of the moving average nats a token" in text
    assert "Held-out loss of the moving average: wiki nats a token" in text
    assert "Held-out loss: wiki nats a token" in text
    assert "of a task" not in text
