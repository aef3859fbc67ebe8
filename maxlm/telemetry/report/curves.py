"""Section of charts: metrics and evaluations over steps, tokens or time, with the controls of their view."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from maxlm.telemetry.device_memory import MEMORY, PEAK
from maxlm.telemetry.formatting import HELD_OUT, WAIT_CAUSES, held_out_title, sentence
from maxlm.telemetry.report import maps
from maxlm.telemetry.report.charts import FEW_RUNS, Line, chart, json_block, knots, metric_lines
from maxlm.telemetry.report.load import EMPTY, Run, Series

CHARTS = (
    ("Throughput", "tokens/s", "tokens_per_s", True),
    ("Model FLOP/s utilization", "share of the peak", "mfu", True),
    ("Learning rate", "", "lr", True),
    ("Gradient norm", "before clipping", "grad_norm", True),
    ("Step time", "", "step_time_s", True),
    ("Data wait", "a step", "data_wait_s", True),
)
KNOTS = 2000  # of tokens and of time over steps, of all runs together
MAX_MARKS = 3000  # of all runs together
MAX_MARK_TEXT = 160  # characters
FEW_ENTRIES = 4  # of a vector: of several runs each has a line; of a longer one only its largest

# Kind of a mark, its symbol as page.js draws it, and its name in the legend.
MARKS = {
    "restart": ('<path class="restart" d="M8 0V16"/>', "restart"),
    "rollback": ('<path class="rollback" d="M8 0V16M8 0L2 4L8 8"/>', "rollback"),
    "skip": ('<path class="skip" d="M5 12l3 -7l3 7z"/>', "skipped update"),
}

Mark = dict[str, str | float]


def section(runs: Sequence[Run], points: int) -> str:
    """HTML of the charts, each line of `points` at most; "" if nothing was recorded."""
    drawn = "".join([_losses(runs, points), *_figures(runs, points)])
    if not drawn:
        return ""
    keys = (f'<button type="button" data-run="{run.number}" aria-pressed="true">{run.swatch}{escape(run.label)}</button>' for run in runs)
    legend = f'<p class="legend runs">{"".join(keys)}</p>' if len(runs) > 1 else ""  # shows and hides the lines of a run
    return f'<section><h2>Metrics</h2>{_controls(runs)}{legend}<div class="grid2">{drawn}</div></section>'


def page_data(runs: Sequence[Run]) -> str:
    """JSON of what all charts share: tokens and seconds over the steps of each run, and its marks."""
    size = max(20, KNOTS // len(runs))
    items = []
    for run in runs:
        clock = run.get("time")
        seconds = Series(clock.steps_N, clock.values_N - _origin(run))
        marks = _thinned(marks_of(run), MAX_MARKS // len(runs))
        items.append({"label": run.label, "tokens": knots(run.get("tokens"), size), "seconds": knots(seconds, size), "marks": marks})
    return json_block(items, "runs")


def marks_of(run: Run) -> list[Mark]:
    """Restarts, rollbacks and skipped updates: kind, step, seconds since the first start, sentence."""
    origin = _origin(run)
    restarts = [("restart", one.first_step, one.began, f"Started again after step {one.first_step:,}") for one in run.attempts[1:]]
    events = [(event.kind, event.step, event.time, sentence(event)) for event in run.events if event.kind in ("rollback", "skip")]
    return [
        {"kind": kind, "step": step, "seconds": round(max(0.0, when - origin), 1), "text": text[:MAX_MARK_TEXT]}
        for kind, step, when, text in [*restarts, *events]
    ]


def _origin(run: Run) -> float:
    """Time of the first start, seconds since 1970; without one, of the first record."""
    clock = run.get("time").values_N
    return run.attempts[0].began if run.attempts else float(clock[0]) if len(clock) else 0.0


def _thinned(marks: list[Mark], most: int) -> list[Mark]:
    """Marks, of each kind one in each of a number of equal stretches of steps, if there are more than `most`."""
    if len(marks) <= most:
        return marks
    last = max(float(mark["step"]) for mark in marks) + 1
    places = most // len(MARKS)
    kept = {(mark["kind"], int(float(mark["step"]) / last * places)): mark for mark in reversed(marks)}
    return list(kept.values())[::-1]


def _controls(runs: Sequence[Run]) -> str:
    """Choices of the view, which page.js obeys."""
    recorded = [("step", "steps"), *(("tokens", "tokens"),) * any(len(run.get("tokens").steps_N) for run in runs)]
    recorded += [("seconds", "time")] if any(len(run.get("time").steps_N) for run in runs) else []
    radios = "".join(
        f'<label><input type="radio" name="x" value="{value}"{" checked" if value == "step" else ""}><span>{name}</span></label>'
        for value, name in recorded
    )
    found = {str(mark["kind"]) for run in runs for mark in marks_of(run)}
    symbols = "".join(f'<svg viewBox="0 0 16 16">{symbol}</svg>{name} ' for kind, (symbol, name) in MARKS.items() if kind in found)
    marks = f'<label><input type="checkbox" name="marks" checked>{symbols}</label>' if found else ""
    return (
        f'<form class="controls"><span class="pick" role="radiogroup" aria-label="horizontal axis">{radios}</span>'
        '<label title="running median over this part of what is shown">smoothing '
        '<input type="range" name="smoothing" min="0" max="6" value="3"><output></output></label>'
        f'{marks}<label><input type="checkbox" name="outliers">outliers</label>'
        '<span class="hint"></span><button type="button" name="reset" hidden>reset zoom</button></form>'
        "<noscript><p>The charts need JavaScript.</p></noscript>"
    )


def _losses(runs: Sequence[Run], points: int) -> str:
    """Chart of training and held-out loss; of many runs a chart each."""
    unit = f"{_loss_unit(runs)}, lower is better"
    training = [Line(f"training {run.label}", run.get("loss"), run.number) for run in runs]
    held_out = [Line(f"held-out {run.label}", run.eval_loss, run.number, dots=True) for run in runs]
    if len(runs) > FEW_RUNS:
        return chart("Loss", unit, training, points, wide=True) + chart("Held-out loss", unit, held_out, points, wide=True)
    if len(runs) == 1:
        training, held_out = [replace(training[0], label="training")], [replace(held_out[0], label="held-out", color=1)]
    drawn = chart("Loss", unit, [*training, *held_out], points, wide=True)
    if len(runs) == 1 or not drawn or not any(len(run.eval_loss.steps_N) for run in runs):
        return drawn
    keys = '<span class="key"></span>training <span class="key dotted"></span>held-out'
    return f'<div class="wide">{drawn}<p class="legend lines">{keys}</p></div>'


def _loss_unit(runs: Sequence[Run]) -> str:
    return " or ".join(dict.fromkeys(run.loss_unit for run in runs))


def _figures(runs: Sequence[Run], points: int) -> Iterator[str]:
    """All other charts."""
    for title, unit, key, zero in CHARTS:
        lines = metric_lines(runs, title.lower(), key)
        if key.endswith(("_time_s", "_wait_s")):
            lines, unit = _in_readable_seconds(lines, unit)
        yield chart(title, unit, lines, points, zero=zero)
    if len(runs) == 1 and any(len(runs[0].get(key).steps_N) for key in WAIT_CAUSES):
        causes = [Line(text, runs[0].get(key), 0, i) for i, (key, text) in enumerate(WAIT_CAUSES.items())]
        lines, unit = _in_readable_seconds(causes, "a step")
        yield chart("Data wait by cause", unit, lines, points, zero=True)
    memory = [Line(run.label, _in_gb(run.get(PEAK)), run.number) for run in runs]
    if len(runs) == 1:
        memory = [Line("peak", memory[0].series, 0), Line("at the moment", _in_gb(runs[0].get(MEMORY)), 0, 1)]
    yield chart("Device memory", "GB, of the fullest device", memory, points, zero=True)
    for title, unit, lines in (*_evaluated(runs), *_declared(runs)):
        yield chart(title, unit, lines, points)


def _in_gb(series: Series) -> Series:
    return Series(series.steps_N, series.values_N / 1e9)  # as `in_bytes` writes it


def _evaluated(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Line]]]:
    """(title, unit, lines) of held-out sets, raw weights and moving average, unless the chart of losses shows all there is: of one run a
    line a set in one chart, of several runs a chart a set. Then of each metric of a task that was run several times.
    """
    names, held_out = dict.fromkeys(name for run in runs for name in run.evaluated), held_out_sets(runs)
    if len(runs) == 1:
        evaluated = runs[0].evaluated
        lines = [Line(title, evaluated[name], 0, i, dots=True) for i, (name, title) in enumerate(held_out.items(), 1)]
        if held_out.keys() != {"eval_loss"}:
            yield "Held-out losses", _loss_unit(runs), lines
    for name in names:
        lines = [Line(run.label, run.evaluated.get(name, EMPTY), run.number, dots=True) for run in runs]
        if name in held_out and name != "eval_loss" and len(runs) > 1:
            yield held_out[name], _loss_unit([run for run in runs if name in run.evaluated]), lines
        elif name not in held_out and any(len(line.series.steps_N) > 1 for line in lines):
            yield task_title(name), _unit(runs, name), lines


def task_title(name: str) -> str:
    """tasks/arc_easy/accuracy -> arc easy: accuracy; eval/token_accuracy/wiki -> held-out token accuracy: wiki."""
    kind, _, rest = name.partition("/")
    held_out = "" if kind == "tasks" else held_out_title(kind.replace("eval", HELD_OUT, 1)).replace("Held-out loss", "held-out") + " "
    return held_out + rest.replace("/", ": ").replace("_", " ")


def _unit(runs: Sequence[Run], name: str) -> str:
    """Unit of a figure of an evaluation, as its metric declares it."""
    kind, metric = (*name.split("/"), "")[:2]
    declared = [run.metrics[metric] for run in runs if kind != "tasks" and metric in run.metrics]
    return declared[0].unit if declared else "of a task"


def held_out_sets(runs: Sequence[Run]) -> dict[str, str]:
    """Titles of the held-out losses that any run has: eval_loss/wiki -> Held-out loss: wiki."""
    names = dict.fromkeys(name for run in runs for name in run.evaluated)
    return {name: held_out_title(name) for name in names if name.startswith(HELD_OUT)}


def _declared(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Line]]]:
    """(title, unit, lines) of each metric that the runs declare, but for those that have a chart elsewhere."""
    charted = {"loss", *(key for _, _, key, _ in CHARTS), *maps.CHARTED}
    for name, declared in {name: item for run in runs for name, item in run.metrics.items()}.items():
        if name in charted:
            continue
        entries = {run.number: _entries(run, name) for run in runs}
        unit = declared.unit
        if len(runs) == 1:
            lines = [Line(label, series, 0, i) for i, (label, series) in enumerate(entries[runs[0].number].items())]
        elif max(map(len, entries.values())) <= FEW_ENTRIES:
            pairs = [(run, label, series) for run in runs for label, series in entries[run.number].items()]
            lines = [Line(run.label if label == name else f"{run.label} {label}", series, run.number) for run, label, series in pairs]
        else:
            lines = [Line(run.label, _largest(list(entries[run.number].values())), run.number) for run in runs]
            unit = f"{unit}; the largest of all" if unit else "the largest of all"
        yield declared.title, unit, lines


def _entries(run: Run, metric: str) -> dict[str, Series]:
    """The series of a metric by label: a scalar, or the entries of a vector by their names, or else by number."""
    numbered = {int(key.rpartition("_")[2]): key for key in run.series if re.fullmatch(rf"{re.escape(metric)}_\d+", key)}
    names = run.metrics[metric].entries if metric in run.metrics else []
    labels = {i: names[i - 1] if 0 < i <= len(names) else key for i, key in numbered.items()}
    found = {metric: run.get(metric)} if metric in run.series else {}
    return found | {labels[i]: run.get(numbered[i]) for i in sorted(numbered)}


def _largest(entries: list[Series]) -> Series:
    """At each step the largest of the entries that have a value there."""
    if not entries:
        return EMPTY
    steps_N = entries[0].steps_N
    if not all(np.array_equal(entry.steps_N, steps_N) for entry in entries):
        steps_N = np.unique(np.concatenate([entry.steps_N for entry in entries]))
    values_N = np.full(len(steps_N), -np.inf)
    for entry in entries:
        at = slice(None) if len(entry.steps_N) == len(steps_N) else np.searchsorted(steps_N, entry.steps_N)
        values_N[at] = np.maximum(values_N[at], entry.values_N)
    return Series(steps_N, values_N)


def _in_readable_seconds(lines: list[Line], unit: str) -> tuple[list[Line], str]:
    """The same lines in milliseconds if most values are short."""
    typical = [float(np.median(line.series.values_N)) for line in lines if len(line.series.values_N)]
    if not typical or max(typical) >= 0.1:
        return lines, f"seconds {unit}".strip()
    return [replace(line, series=Series(line.series.steps_N, 1e3 * line.series.values_N)) for line in lines], f"milliseconds {unit}".strip()
