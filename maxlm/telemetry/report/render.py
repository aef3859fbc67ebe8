"""The report as one HTML page. All text from a run is escaped here or in charts.py."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from maxlm.telemetry.formatting import count, duration, energy, figure, percent, sentence
from maxlm.telemetry.ledger import TITLES
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import experts, results
from maxlm.telemetry.report.charts import FULL, Frame, Line, Marks, chart, metric_lines
from maxlm.telemetry.report.load import EMPTY, Run, Series
from maxlm.telemetry.report.style import COLORS, CSS, EXPERTS_CSS, JS
from maxlm.telemetry.report.summary import Figures, Status, figures_of, headline, status_of
from maxlm.telemetry.report.tables import table

MAX_EVENTS = 200  # rows a run; all are in events.jsonl
ROUTINE = {"save": "Saved", "eval": "Evaluated", "skip": "Skipped the update"}  # frequent events
MAX_STRETCH = 12  # consecutive frequent events shown one by one

# No network access: the page works from a disk, a mail or a bucket.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

CHARTS = (
    ("Throughput", "tokens/s", "tokens_per_s", True),
    ("Model FLOP/s utilization", "share of the peak", "mfu", True),
    ("Learning rate", "", "lr", True),
    ("Gradient norm", "before clipping", "grad_norm", True),
    ("Step time", "", "step_time_s", True),
    ("Data wait", "a step", "data_wait_s", True),
)
HELD_OUT = {"eval_loss": "Held-out loss", "eval_loss_ema": "Held-out loss of the moving average"}


def render(runs: Sequence[Run]) -> str:
    """The page for one run, or for several side by side."""
    names = [run.name for run in runs]
    title = " · ".join(names)
    labels = [str(run.path) if names.count(run.name) > 1 else run.name for run in runs]
    runs = [replace(run, label=label, color=index % COLORS) for index, (run, label) in enumerate(zip(runs, labels, strict=True))]
    about_experts = experts.section(runs)
    css = CSS + EXPERTS_CSS if about_experts else CSS
    goodput, events = _by_run("Wall time", runs, _goodput), _by_run("Events", runs, _events)
    sections = [_headline(runs), _results(runs), _charts(runs), about_experts, goodput, _differences(runs), events, _configs(runs)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · training report</title><style>{css}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + f'\n</main><div id="tip" hidden></div><script>{JS}</script></body></html>\n'
    )


def _headline(runs: Sequence[Run]) -> str:
    many = len(runs) > 1
    title = f"{len(runs)} runs compared" if many else escape(runs[0].name)
    figures = [figures_of(run) for run in runs]
    blocks = []
    for run, f in zip(runs, figures, strict=True):
        status = status_of(run)
        head = f"<h3>{_head(run)}{_chip(status)}</h3>" if many else ""
        summary = " ".join([*headline(run, f), status.explanation])
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
        blocks.append(f"{head}<p class=lead>{escape(summary)}</p>{notes}")
    chip = "" if many else _chip(status_of(runs[0]))
    cards = _comparison(runs, figures) if many else _cards(figures[0])
    return f'<header><p class="kind">Training report</p><h1>{title}{chip}</h1>{"".join(blocks)}{cards}</header>'


def _chip(status: Status) -> str:
    return f' <span class="chip {status.tone}">{escape(status.label)}</span>'


def _or_none(text: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else text(value)


def _marked(f: Figures, text: Callable[[float], str], value: float | None) -> str | None:
    """The text of a figure of energy, marked where it is estimated."""
    return None if value is None else f"{'~' if f.energy_estimated else ''}{text(value)}"


# name, formatted value, explanation
_FIGURES: tuple[tuple[str, Callable[[Figures], str | None], str], ...] = (
    ("Parameters", lambda f: _or_none(count, f.parameters), "numbers of the model"),
    ("Trained", lambda f: _or_none(count, f.trained), "of them, in adapters"),
    (
        "Steps",
        lambda f: f"{f.steps:,}" + (f" of {f.total_steps:,}" if f.total_steps and f.total_steps != f.steps else ""),
        "updates of the model",
    ),
    ("Tokens", lambda f: _or_none(count, f.tokens), "pieces of text seen"),
    ("Training loss", lambda f: _or_none(figure, f.loss), "lower is better"),
    ("Held-out loss", lambda f: _or_none(figure, f.held_out), "on text never trained on"),
    ("Throughput", lambda f: _or_none(count, f.tokens_per_s), "tokens/s, median"),
    ("MFU", lambda f: _or_none(percent, f.mfu), "of the hardware's peak"),
    ("Data wait", lambda f: _or_none(percent, f.data_wait), "of a step's time"),
    ("Time", lambda f: _or_none(duration, f.seconds), "since the first start"),
    ("Goodput", lambda f: _or_none(percent, f.goodput), "of that time, on steps that count"),
    ("Cost", lambda f: f.cost or None, "of the chips, so far"),
    ("Energy", lambda f: _marked(f, energy, f.kwh), "of the data centre; ~: estimated"),
    ("Energy a token", lambda f: _marked(f, lambda joules: f"{figure(joules, 3)} J", f.joules_per_token), "mean of all of it"),
)


def _cards(f: Figures) -> str:
    figures = ((name, value(f), hint) for name, value, hint in _FIGURES)
    cards = (f"<div><dt>{name}</dt><dd>{escape(text)}</dd><small>{hint}</small></div>" for name, text, hint in figures if text is not None)
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _comparison(runs: Sequence[Run], figures: Sequence[Figures]) -> str:
    rows = []
    for name, value, hint in _FIGURES:
        cells = [value(f) for f in figures]
        if any(cell is not None for cell in cells):
            rows.append([f"{name} <small>{hint}</small>", *(escape(cell or "–") for cell in cells)])
    return table(["", *map(_head, runs)], rows, numbers=True)


def _head(run: Run) -> str:
    return f'<span class="swatch c{run.color}"></span>{escape(run.label)}'


def _results(runs: Sequence[Run]) -> str:
    """Results of tasks at each run's newest evaluation of them."""
    rows = results.rows([run.results for run in runs])
    heads = map(_head, runs) if len(runs) > 1 else ["value"]
    return f"<section><h2>Results of tasks</h2>{table(['task', *heads], rows, numbers=True)}</section>" if rows else ""


def _charts(runs: Sequence[Run]) -> str:
    many = len(runs) > 1
    losses: list[Line] = []
    for run in runs:
        suffix = f" {run.label}" if many else ""
        losses.append(Line(f"training{suffix}", run.get("loss"), run.color))
        losses.append(Line(f"held-out{suffix}", run.eval_loss, run.color if many else 1, dots=True))
    unit = f"{' or '.join(dict.fromkeys(run.loss_unit for run in runs))}, lower is better"
    frame = _frame(runs)
    linear = chart("Loss", unit, losses, size=FULL, frame=frame)
    log = chart("Loss", f"{unit}, logarithmic", losses, log=True, size=FULL, frame=frame)
    parts = []
    if linear:
        switch = (
            '<input type="radio" name="scale" id="linear" checked><label for="linear">linear</label>'
            '<input type="radio" name="scale" id="log"><label for="log">logarithmic</label>'
        )
        parts.append(
            f'<div class="loss">{switch}<div class="linear">{linear}</div><div class="log">{log}</div>{_loss_legend(runs, frame)}</div>'
        )
    for title, unit, key, zero in CHARTS:
        lines = metric_lines(runs, title.lower(), key)
        if key.endswith(("_time_s", "_wait_s")):
            lines, unit = _in_readable_seconds(lines, unit)
        parts.append(chart(title, unit, lines, zero=zero, frame=frame))
    parts += [chart(title, unit, lines, frame=frame) for title, unit, lines in (*_evaluated(runs), *_declared(runs))]
    drawn = "".join(parts)
    return f'<section><h2>Metrics</h2>{_legend(runs) if many else ""}<div class="grid2">{drawn}</div></section>' if drawn else ""


def _evaluated(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Line]]]:
    """(title, unit, lines) of each held-out set but the plain one, of raw weights and of their moving average, and of each metric of a task
    that was run several times.
    """
    for name in dict.fromkeys(name for run in runs for name in run.evaluated if name != "eval_loss"):
        lines = [Line(run.label, run.evaluated.get(name, EMPTY), run.color, dots=True) for run in runs]
        kind, _, rest = name.partition("/")
        if kind in HELD_OUT:
            yield f"{HELD_OUT[kind]}: {rest}" if rest else HELD_OUT[kind], "nats a token", lines
        elif any(len(line.series.steps_N) > 1 for line in lines):
            yield rest.replace("/", ": ").replace("_", " "), "of a task", lines


def _declared(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Line]]]:
    """(title, unit, lines) of each metric that the runs declare, a line an entry of a vector, but for those that have a chart elsewhere."""
    charted = {"loss", *(key for _, _, key, _ in CHARTS), *experts.CHARTED}
    for metric, declared in {name: item for run in runs for name, item in run.metrics.items()}.items():
        if metric in charted:
            continue
        keys = dict.fromkeys(key for run in runs for key in run.series if key == metric or re.fullmatch(rf"{re.escape(metric)}_\d+", key))
        several = [(f"{run.label} {key}" if len(runs) > 1 else key, run.get(key)) for run in runs for key in keys]
        lines = [Line(label, series, i % COLORS) for i, (label, series) in enumerate(several)]
        yield declared["title"], declared["unit"], lines


def _frame(runs: Sequence[Run]) -> Frame:
    """Steps and marks that all charts share, so that a metric that ends early shows where."""
    steps = [
        float(step) for run in runs for series in run.series.values() for step in series.steps_N[[0, -1] if len(series.steps_N) else []]
    ]
    return Frame(min(steps, default=0.0), max(steps, default=1.0), [_marks(run) for run in runs])


def _marks(run: Run) -> Marks:
    starts = [attempt.first_step for attempt in run.attempts[1:]]
    rollbacks = [event.step for event in run.events if event.kind == "rollback"]
    return Marks(starts + rollbacks, [event.step for event in run.events if event.kind == "skip"], run.color)


def _in_readable_seconds(lines: list[Line], unit: str) -> tuple[list[Line], str]:
    """The same lines in milliseconds if most values are short."""
    typical = [float(np.median(line.series.values_N)) for line in lines if len(line.series.values_N)]
    if not typical or max(typical) >= 0.1:
        return lines, f"seconds {unit}".strip()
    return [replace(line, series=Series(line.series.steps_N, 1e3 * line.series.values_N)) for line in lines], f"milliseconds {unit}".strip()


def _loss_legend(runs: Sequence[Run], frame: Frame) -> str:
    """Legend of lines and marks; "" if none is needed."""
    first, second = ("", "") if len(runs) > 1 else (" c0", " c1")
    keys = []
    if any(len(run.eval_loss.steps_N) for run in runs):
        keys.append(f'<span class="key{first}"></span>training <span class="key dotted{second}"></span>held-out')
    if any(marks.restarts for marks in frame.marks):
        keys.append('<svg viewBox="0 0 16 16"><path class="restart c7" d="M8 0V16"/></svg>restart')
    if any(marks.skips for marks in frame.marks):
        keys.append('<svg viewBox="0 0 16 16"><path class="skip" d="M5 12l3 -7l3 7z"/></svg>skipped update')
    return f'<p class="legend">{" ".join(keys)}</p>' if keys else ""


def _legend(runs: Sequence[Run]) -> str:
    return f'<p class="legend">{" ".join(f"<span>{_head(run)}</span>" for run in runs)}</p>'


def _by_run(title: str, runs: Sequence[Run], block: Callable[[Run], str]) -> str:
    """A section with a block a run, each under the run's name if there are several; "" if all are empty."""
    blocks = [(run, text) for run in runs if (text := block(run))]
    drawn = "".join(f"<h3>{escape(run.label)}</h3>{text}" if len(runs) > 1 else text for run, text in blocks)
    return f"<section><h2>{title}</h2>{drawn}</section>" if drawn else ""


def _goodput(run: Run) -> str:
    seconds = {part: value for part, value in run.ledger.seconds.items() if value > 0}
    whole = run.ledger.wall_s
    if not whole:
        return ""
    slices = "".join(
        f'<span class="part {part}" style="width:{100 * value / whole:.3f}%" title="{TITLES[part]}: {percent(value / whole)}"></span>'
        for part, value in seconds.items()
    )
    keys = "".join(
        f'<li><span class="swatch part {part}"></span>{TITLES[part]} <b>{percent(value / whole)}</b> <small>{duration(value)}</small></li>'
        for part, value in seconds.items()
    )
    number = run.ledger.attempts
    note = f'<p class="note">{duration(whole)} since the first start, in {number:,} attempts.</p>' if number > 1 else ""
    return f'<div class="bar" role="img" aria-label="wall time by part">{slices}</div><ul class="keys">{keys}</ul>{note}'


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        cells = [f"<code>{escape(_yaml_text(run.settings[key]))}</code>" if key in run.settings else "–" for run in runs]
        if len(set(cells)) > 1:
            rows.append([f"<code>{escape(key)}</code>", *cells])
    text = table(["setting", *map(_head, runs)], rows) if rows else "<p>None: the configs are equal.</p>"
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
    loss = f"; held-out loss from {figure(losses[0])} to {figure(losses[1])}" if all(isinstance(v, int | float) for v in losses) else ""
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
    return f"<section><h2>Settings</h2>{''.join(blocks)}</section>" if blocks else ""
