"""The report as one HTML page. All text from a run is escaped here, in curves.py or in charts.py."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from maxlm.base.strict_json import is_number
from maxlm.telemetry import pages
from maxlm.telemetry.formatting import duration, figure, sentence
from maxlm.telemetry.ledger import TITLES
from maxlm.telemetry.observer import Event
from maxlm.telemetry.pages import Cell, table
from maxlm.telemetry.report import curves, maps, results, samples
from maxlm.telemetry.report.charts import FEW_RUNS, points_per_line
from maxlm.telemetry.report.load import EMPTY, Run
from maxlm.telemetry.report.summary import FIGURES, Status, figures_of, headline, loss_text, notes_of, status_of
from maxlm.telemetry.run_dir import PROFILE_PAGE, RunDirectory

MAX_PROFILES = 50  # of a run that are linked
MAX_EVENTS = 200  # rows a run; all are in events.jsonl
ROUTINE = {"save": "Saved", "eval": "Evaluated", "skip": "Skipped the update"}  # frequent events
MAX_STRETCH = 12  # consecutive frequent events shown one by one
MAX_EVALUATIONS, MAX_COLUMNS = 24, 12  # rows and figures of the table of evaluations

TITLE_END = "· training report</title>"  # by which a page is known as ours

PART_COLORS = {  # part of wall time -> variable of page.css
    **{"step": "p2", "lost": "bad", "init": "p4", "compile": "p6", "wait_hosts": "warn", "restore": "p5", "data_wait": "p1"},
    **{"save": "p3", "eval": "p0", "hang": "ink", "elastic": "good", "down": "rule"},
}
SCRIPTS = ("vendor/uplot.js", "charts.js", "page.js")  # one after the other


def render(runs: Sequence[Run], version: str = "", folder: Path | None = None) -> str:
    """The page for one run, or for several side by side. `version`: of a page that a server shows, which asks it for a newer one.
    `folder`: of the page, from where it links to files of the runs; None: it names them.
    """
    names = [run.name for run in runs]
    title = " · ".join(names) if len(names) <= FEW_RUNS else f"{len(names)} runs"
    labels = [str(run.path) if names.count(run.name) > 1 else run.name for run in runs]
    runs = [replace(run, label=label, number=number) for number, (run, label) in enumerate(zip(runs, labels, strict=True))]
    points = points_per_line(runs)
    about_experts, about_layers = maps.experts_section(runs, points), maps.layers_section(runs)
    css = "".join(map(_packaged, ("vendor/uplot.css", "page.css", *["heat.css"] * bool(about_experts or about_layers))))
    goodput, events = _by_run("Wall time", runs, _goodput), _by_run("Events", runs, _events)
    texts = _by_run("Samples", runs, lambda run: samples.block(run.samples))
    held_out, evaluations = (_held_out(runs[0]), _evaluations(runs[0])) if len(runs) == 1 else ("", "")
    sections = [_headline(runs), held_out, _results(runs), curves.section(runs, points), evaluations, texts, about_layers, about_experts]
    files = _by_run("Files", runs, lambda run: _files(run, folder))
    sections += [goodput, _differences(runs), events, files, _configs(runs)]
    sections = [*pages.contents([section for section in sections if section]), curves.page_data(runs)]
    scripts = "".join(_packaged(name) for name in (*SCRIPTS, *["live.js"] * bool(version)))
    policy = pages.SCRIPTS_POLICY + "; connect-src 'self'" * bool(version)
    title = f"{title} {TITLE_END.removesuffix('</title>')}"
    meta = {"runs": identity([run.path for run in runs])}
    return pages.page(title, sections, css=css, scripts=scripts, policy=policy, meta=meta, version=version)


def identity(run_dirs: Sequence[Path]) -> str:
    """Digest of the folders of the runs in any order, which differs for runs of the same names elsewhere."""
    folders = "\n".join(sorted(str(path.resolve()) for path in run_dirs))
    return hashlib.sha256(folders.encode(errors="surrogateescape")).hexdigest()[:16]


def _packaged(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _headline(runs: Sequence[Run]) -> str:
    many = len(runs) > 1
    title = f"{len(runs)} runs compared" if many else escape(runs[0].name)
    figures = [figures_of(run) for run in runs]
    blocks, notes = [], []
    for run, values in zip(runs, figures, strict=True):
        status = status_of(run)
        head = f"<h3>{_head(run)}{_chip(status)}</h3>" if many else ""
        summary = " ".join([*headline(run, values), status.explanation])
        blocks.append(f"{head}<p class=lead>{escape(summary)}</p>")
        notes += [f'<p class="note">{f"{_head(run)}: " if many else ""}{escape(note)}</p>' for note in notes_of(run)]
    described = "".join(blocks)
    if many:  # on phones page.js folds it
        described = f"<details{' open' * (len(runs) <= FEW_RUNS)}><summary>What each run did</summary>{described}</details>"
    chip = "" if many else _chip(status_of(runs[0]))
    shown = ((one.name, cell, one.hint) for key, one in FIGURES.items() if (cell := _cell(key, runs[0], figures[0][key])) is not None)
    cards = _comparison(runs, figures) if many else pages.cards(shown)
    return f'<header><p class="kind">Training report</p><h1>{title}{chip}</h1>{described}{"".join(notes)}{cards}</header>'


def _chip(status: Status) -> str:
    return f' <span class="chip {status.tone}">{escape(status.label)}</span>'


def _cell(key: str, run: Run, value: float | None) -> str | None:
    """HTML of a figure with the value to sort by; None where nothing was recorded."""
    return None if value is None else Cell(escape(FIGURES[key].text(run, value)), value)


def _comparison(runs: Sequence[Run], figures: Sequence[Mapping[str, float | None]]) -> str:
    rows = []
    for key, one in FIGURES.items():
        cells = [_cell(key, run, values[key]) or "–" for run, values in zip(runs, figures, strict=True)]
        rows.append((f'<span title="{one.hint}">{one.name}</span>', cells))
    for name, title in curves.held_out_sets(runs).items():
        rows += [(escape(title), [_last(run, name) for run in runs])] if name != "eval_loss" else []
    shown = [(name, cells) for name, cells in rows if set(cells) != {"–"}]
    return _side_by_side(runs, "", [("State", [_chip(status_of(run)) for run in runs]), *shown])


def _last(run: Run, name: str) -> str:
    """HTML of the last held-out loss of a set."""
    losses = run.evaluated.get(name, EMPTY).values_N
    value = math.inf if name in run.lost else float(losses[-1]) if len(losses) else None
    return "–" if value is None else Cell(loss_text(value), value)


def _side_by_side(runs: Sequence[Run], what: str, rows: Sequence[tuple[str, Sequence[str]]], *, numbers: bool = True) -> str:
    """A table of name and cell a run. A column a run; of more than a few runs a row each, so that they can be sorted by any column."""
    heads, names = list(map(_head, runs)), [name for name, _ in rows]
    if len(runs) <= FEW_RUNS:
        return table([what, *heads], [[name, *cells] for name, cells in rows], numbers=numbers)
    return table(["run", *names], [[head, *(cells[i] for _, cells in rows)] for i, head in enumerate(heads)], numbers=numbers)


def _head(run: Run) -> str:
    return f"{run.swatch}{escape(run.label)}"


def _held_out(run: Run) -> str:
    """Losses of a run on several held-out sets: the last and the least."""
    rows = []
    for name, title in curves.held_out_sets([run]).items():
        steps_N, values_N = run.evaluated[name]
        least = int(values_N.argmin())
        cell = Cell(f"{loss_text(values_N[least])} <small>step {steps_N[least]:,.0f}</small>", float(values_N[least]))
        rows.append([escape(title), _last(run, name), cell])
    return f"<section><h2>Held-out losses</h2>{table(['set', 'last', 'least'], rows, numbers=True)}</section>" if len(rows) > 1 else ""


def _evaluations(run: Run) -> str:
    """Figures of evaluations over steps, if there were several. The least loss of each held-out set is bold."""
    steps = sorted({int(step) for series in run.evaluated.values() for step in series.steps_N})
    if len(steps) < 2:
        return ""
    titles, names = curves.held_out_sets([run]), list(run.evaluated)[:MAX_COLUMNS]
    columns = [dict(zip(*map(np.ndarray.tolist, run.evaluated[name]), strict=True)) for name in names]
    least = [min(column, key=column.__getitem__) if name in titles else -1 for name, column in zip(names, columns, strict=True)]
    shown = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, MAX_EVALUATIONS)} | {int(step) for step in least if step >= 0}
    rows = [
        [Cell(f"{step:,}", step), *(_evaluated(column.get(step), step == best) for column, best in zip(columns, least, strict=True))]
        for step in sorted(shown)
    ]
    notes = [f"{len(rows)} of {len(steps):,} evaluations are shown."] * (len(rows) < len(steps))
    notes += [f"{len(run.evaluated) - len(names)} more figures have only a chart."] * (len(names) < len(run.evaluated))
    drawn = table(["step", *(escape(titles.get(name) or curves.task_title(name)) for name in names)], rows, numbers=True)
    return f'<section><h2>Evaluations</h2>{drawn}<p class="note">{" ".join(notes)}</p></section>'


def _evaluated(value: float | None, best: bool) -> str:
    return "–" if value is None else Cell(f"<b>{loss_text(value)}</b>" if best else loss_text(value), value)


def _results(runs: Sequence[Run]) -> str:
    """Results of tasks at each run's newest evaluation of them."""
    rows = results.rows([run.results for run in runs])
    if not rows:
        return ""
    alone = len(runs) == 1
    drawn = table(["task", "value"], [[name, *cells] for name, cells in rows], numbers=True) if alone else _side_by_side(runs, "task", rows)
    return f"<section><h2>Results of tasks</h2>{drawn}</section>"


def _by_run(title: str, runs: Sequence[Run], block: Callable[[Run], str]) -> str:
    """A section with a block a run, each under the run's name if there are several; "" if all are empty."""
    blocks = [(run, text) for run in runs if (text := block(run))]
    heading = "<h3>{}</h3>{}" if len(runs) <= FEW_RUNS else "<details><summary>{}</summary>{}</details>"
    drawn = "".join(heading.format(_head(run), text) if len(runs) > 1 else text for run, text in blocks)
    return f"<section><h2>{title}</h2>{drawn}</section>" if drawn else ""


def _goodput(run: Run) -> str:
    whole, number = run.ledger.wall_s, run.ledger.attempts
    if not whole:
        return ""
    parts = [
        (TITLES[part], value / whole, f"background:var(--{PART_COLORS[part]})", f" <small>{duration(value)}</small>")
        for part, value in run.ledger.seconds.items()
        if value > 0
    ]
    note = f'<p class="note">{duration(whole)} since the first start, in {number:,} attempts.</p>' if number > 1 else ""
    return pages.bar(parts, "wall time by part") + note


def _files(run: Run, folder: Path | None) -> str:
    """Links to the profiles of a run, the newest first, and to what its page shows a part of."""
    there = RunDirectory(run.path, primary=False)
    profiles = sorted(islice(there.profiles.rglob(PROFILE_PAGE), MAX_PROFILES), key=lambda page: page.stat().st_mtime, reverse=True)
    found = {page: f"Profile of the steps from {page.relative_to(there.profiles).parts[0]} on" for page in profiles}
    names = {"evaluations": "Results of tasks", "samples": "All samples", "metrics": "Records", "events": "All events", "log": "Log"}
    found |= {path: title for name, title in names.items() if (path := getattr(there, name)).exists()}
    rows = "".join(f"<li>{_link(path, title, folder)}</li>" for path, title in found.items())
    return f'<ul class="files">{rows}</ul>' if rows else ""


def _link(path: Path, title: str, folder: Path | None) -> str:
    """A link to a file, relative to the page so that both can be moved; without a `folder` its path."""
    named = f"<small>{escape(str(path))}</small>"
    if folder is None:
        return f"{escape(title)} {named}"
    place = quote(os.fsencode(os.path.relpath(path.resolve(), folder.resolve())))  # with `:` as %3A, so that no name is an address
    return f'<a href="{escape(place)}">{escape(title)}</a> {named}'


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    rows: list[tuple[str, list[str]]] = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        cells = [f"<code>{escape(_yaml_text(run.settings[key]))}</code>" if key in run.settings else "–" for run in runs]
        if len(set(cells)) > 1:
            rows.append((f"<code>{escape(key)}</code>", cells))
    text = _side_by_side(runs, "setting", rows, numbers=False) if rows else "<p>None: the configs are equal.</p>"
    return f"<section><h2>Differing settings</h2>{text}</section>"


def _yaml_text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _events(run: Run) -> str:
    if not run.events:
        return ""
    stretches = groupby(run.events, key=lambda event: event.kind in ROUTINE)
    rows = [row for routine, stretch in stretches for row in _rows(list(stretch), routine)]
    cut = len(rows) - MAX_EVENTS
    left = f'<p class="note">{cut:,} earlier rows are left out; all are in events.jsonl.</p>' if cut > 0 else ""
    return left + table(["time (UTC)", "event"], rows[-MAX_EVENTS:])


def _rows(events: list[Event], routine: bool) -> list[list[str]]:
    """One row an event; a long sequence of saves, evaluations and skips is one row a kind."""
    if not routine or len(events) <= MAX_STRETCH:
        return [[_clock(event.time), f'<span class="dot {escape(event.kind)}"></span>{escape(sentence(event))}'] for event in events]
    kinds = dict.fromkeys(event.kind for event in events)
    return [_stretch(kind, [event for event in events if event.kind == kind]) for kind in kinds]


def _stretch(kind: str, events: list[Event]) -> list[str]:
    first, last = events[0], events[-1]
    losses = [event.data.get("eval_loss") for event in (first, last)]
    loss = f"; held-out loss from {figure(losses[0])} to {figure(losses[1])}" if all(map(is_number, losses)) else ""
    times = f"{len(events):,} times, steps {first.step:,} to {last.step:,}" if len(events) > 1 else f"once, at step {first.step:,}"
    begun, ended = _clock(first.time), _clock(last.time)
    span = begun if begun == ended else f"{begun} – {ended.removeprefix(begun[:11])}"  # without repeating the day
    return [span, f'<span class="dot {kind}"></span>{escape(f"{ROUTINE[kind]} {times}{loss}")}']


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "–"


def _configs(runs: Sequence[Run]) -> str:
    blocks = [
        f"<details><summary>config.yml of {escape(run.label)}</summary><pre>{escape(run.config_text)}</pre></details>"
        for run in runs
        if run.config_text.strip()
    ]
    return f"<section class=folded><h2>Settings</h2>{''.join(blocks)}</section>" if blocks else ""
