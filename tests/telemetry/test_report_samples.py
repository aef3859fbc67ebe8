"""Texts that the model has written and its evaluations over time, in the report; and no text from outside becomes markup on any page."""

import json
import re
from html.parser import HTMLParser

import pytest

from maxlm.telemetry.observer import Event
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.report.samples import MAX_STEPS, MAX_TEXTS, append_samples, read_samples
from maxlm.telemetry.run_dir import RunDirectory

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload=x &lt;b&gt; ]]> <!-- \x1b[31m\x00\u202e"


class Outline(HTMLParser):
    """Elements, attributes that run scripts, texts of <pre>, and cells of tables."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.handlers, self.blocks, self.rows, self._open = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._open.append(tag)
        if tag == "pre":
            self.blocks.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "pre" in self._open:
            self.blocks[-1] += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data


@pytest.fixture
def make(tmp_path):
    """Writes a run with these events and samples by step, and gives its directory."""

    def run_of(name, events=(), samples=()):
        run = RunDirectory.create(tmp_path, name)
        steps = max([1, *(event.step for event in events), *(step for step, _ in samples)])
        run.metrics.write_text(
            "".join(json.dumps({"step": step, "loss": 5.0, "time": 1000.0 + step}) + "\n" for step in range(1, steps + 1))
        )
        run.events.write_text("".join(event.to_json() + "\n" for event in [Event("start", 0, 1000.0), *events]))
        for step, texts in samples:
            append_samples(run.samples, step, texts)
        return run

    return run_of


def page_of(*runs):
    return render([load_run(run.path) for run in runs])


def test_each_prompt_has_a_block_of_its_own_and_the_newest_step_is_open(make):
    run = make("r", samples=[(10, {"def ": "f(x)"}), (20, {"def ": "\n\n main():\n  pass", "Once": " more", "long": None, "end": ""})])
    html = page_of(run)
    assert Outline(html).blocks == [
        "def \n\n main():\n  pass",
        "Once more",
        "long (the prompt fills the context)",
        "end (nothing)",
        "def f(x)",
    ]
    assert re.findall(r"<details( open)?><summary>(step \d+)", html) == [(" open", "step 20"), ("", "step 10")]


def test_a_prompt_that_is_continued_again_after_a_step_shows_the_newer_text(make):
    run = make("r", samples=[(10, {"a": "old", "b": "kept"}), (10, {"a": "new"})])
    assert Outline(page_of(run)).blocks == ["anew", "bkept"]


def test_samples_of_undone_steps_are_left_out(make):
    """Those of before the rollback; one of the same step after it counts."""
    run = make("r", [Event("rollback", 5, 5e9, {"from_step": 20})], [(3, {"a": "3"}), (10, {"a": "10"})])
    assert Outline(page_of(run)).blocks == ["a3"]
    with run.samples.open("a") as file:
        file.write(json.dumps({"step": 4, "time": 6e9, "prompt": "a", "text": "4"}) + "\n")
    assert Outline(page_of(run)).blocks == ["a4", "a3"]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"step": 1}', '{"step":1,"time":1,"prompt":2,"text":"x"}', '{"step":-1,"time":1,"prompt":"","text":""}']
)
def test_a_damaged_line_costs_itself_only(make, line):
    run = make("r", samples=[(1, {"a": "b"})])
    with run.samples.open("a") as file:
        file.write(line + "\n")
    append_samples(run.samples, 2, {"a": "c"})
    notes = []
    found = read_samples(run.samples, notes, lambda *_: False)
    assert [(one.step, one.text) for one in found] == [(1, "b"), (2, "c")]
    assert "samples.jsonl: 1 line could not be read" in notes[0]


def test_many_long_samples_make_a_page_of_bounded_size_that_says_so(make):
    run = make("r", samples=[(step, {f"{i}": "x" * 20_000 for i in range(MAX_TEXTS + 3)}) for step in range(1, MAX_STEPS + 6)])
    html = page_of(run)
    assert len(html) < 3_000_000
    assert (
        "12,000 characters more" in html
        and "Only in samples.jsonl: more prompts (3)" in html
        and "Only in samples.jsonl: earlier steps (5)" in html
    )


def test_text_from_outside_is_no_markup_wherever_it_stands(make):
    """Names, notes, reasons, metrics, tasks, devices, prompts and continuations: the page has the elements of one with plain text."""

    def page(word):
        data = {"device_kind": word, "devices": word, "metrics": {"m": {"title": word, "unit": word, "entries": [word]}}, "folder": word}
        evaluated = {"eval_loss": 3.0, f"eval_loss/{word}": 2.0}
        events = [
            Event("start", 0, 1000.5, data),
            *(Event("eval", step, 1001.0 + step, evaluated) for step in (1, 2)),
            *(Event("tasks", step, 1001.0 + step, {"tasks": {word: {word: 0.5}}, "notes": [word]}) for step in (1, 2)),
            Event("alarm", 2, 1003.0, {"reason": word, "cause": word}),
            Event("skip", 2, 1003.0, {"reason": word}),
            Event("rollback", 2, 1003.0, {"reason": word, "from_step": 2}),
            Event("observer", 2, 1003.0, {"name": word, "reason": word}),
            Event("stop", 2, 1004.0, {"reason": word, "message": word, "bill": {"currency": word, "cost": 1.0}}),
        ]
        run = make(str(len(word)), events, [(2, {word: word, "plain": word, f"{word}2": None})])
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": 2, "loss": 3.0, "m": 1.0, "m_1": 2.0, word: 4.0}) + "\n")
        run.config.write_text(json.dumps({"model": {word: word}}))
        run.evaluations.mkdir()
        (run.evaluations / "2-t.json").write_text(json.dumps({"task": word, "step": 2, "metrics": {word: {"value": 0.5}}}))
        return page_of(run)

    evil, plain = Outline(page(EVIL)), Outline(page("word"))
    assert (evil.tags, evil.handlers) == (plain.tags, [])
    assert any(EVIL.replace("\x00", "") in block.replace("\x00", "") for block in evil.blocks)


def test_evaluations_over_time_are_rows_with_the_least_loss_marked(make):
    losses = {100: 4.0, 200: 3.0, 300: 3.5}
    events = [Event("eval", step, 1000.0 + step, {"eval_loss": loss, "eval_loss/wiki": loss - 1}) for step, loss in losses.items()]
    run = make("r", events)
    run.evaluations.mkdir()
    for step in (100, 300):
        result = {"task": "arc", "step": step, "metrics": {"acc": {"value": step / 1000}}, "time": 1e9}
        (run.evaluations / f"{step}-arc.json").write_text(json.dumps(result))
    html = page_of(run)
    rows = Outline(html).rows
    assert ["step", "Held-out loss", "Held-out loss: wiki", "arc: acc"] in rows
    at = rows.index(["step", "Held-out loss", "Held-out loss: wiki", "arc: acc"])
    assert rows[at + 1 : at + 4] == [
        ["100", "4.000", "3.000", "0.1000"],
        ["200", "3.000", "2.000", "–"],
        ["300", "3.500", "2.500", "0.3000"],
    ]
    assert re.findall(r"<b>([\d.]+)</b></td>", html) == ["3.000", "2.000"]
    assert '"title":"arc: acc"' in html.replace('": "', '":"'), "a chart of results that files hold"


def test_of_very_many_evaluations_the_first_the_last_and_the_best_are_listed(make):
    events = [Event("eval", step, 1000.0 + step, {"eval_loss": 3.0 + abs(step - 777) / 1000}) for step in range(1, 1001)]
    html = page_of(make("r", events))
    rows = [row[0] for row in Outline(html).rows]
    assert {"1", "777", "1,000"} <= set(rows) and len(rows) < 60
    assert re.search(r"\d+ of 1,000 evaluations are shown", html)


def test_one_evaluation_is_no_table(make):
    assert "<h2>Evaluations" not in page_of(make("r", [Event("eval", 5, 1005.0, {"eval_loss": 3.0})]))
