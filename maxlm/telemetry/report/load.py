"""Read a run directory, whether the run is finished, running, killed or damaged."""

import contextlib
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ruamel.yaml.error import YAMLError

from maxlm.base.errors import UserError, error_kind
from maxlm.base.strict_json import is_number, read_objects
from maxlm.config.fields import flatten
from maxlm.config.loader import parse_yaml
from maxlm.telemetry.course import Undone, current_step, evaluations, surviving
from maxlm.telemetry.ledger import Attempt, LastRecord, Ledger, attempts_of, ledger_of
from maxlm.telemetry.lifetime import Beat, Process, read_beat, read_processes
from maxlm.telemetry.observer import Event, is_step
from maxlm.telemetry.report.results import Outcomes, read_results
from maxlm.telemetry.report.samples import Sample, read_samples
from maxlm.telemetry.run_dir import RunDirectory


class Series(NamedTuple):
    """One metric over steps, which increase; null values are left out."""

    steps_N: NDArray[np.float64]
    values_N: NDArray[np.float64]

    def after(self, step: float) -> "Series":
        """The part after that step."""
        newer = self.steps_N > step
        return Series(self.steps_N[newer], self.values_N[newer])


class Loads(NamedTuple):
    """Choices of each expert (E) in each layer with experts (L), at some of the steps."""

    steps_N: NDArray[np.float64]  # increasing
    load_NLE: NDArray[np.int64]
    first_layer: int  # index of the first of these layers in the model


class Declared(NamedTuple):
    """A metric as a `start` event declares it (see metric.py)."""

    title: str
    unit: str
    entries: list[str]  # names of the entries of a vector, as far as they have any


LARGEST = 1e304  # of a value
COLORS = 8  # in the palette of the runs, --p0 to --p7 of page.css; it repeats from the ninth run
DASHES = 3  # patterns of lines, of which each repetition of the palette has its own
EMPTY = Series(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Run:
    """A run directory in memory."""

    name: str
    path: Path
    series: dict[str, Series]
    events: list[Event]
    config: dict[str, Any]  # nested, as in config.yml; {} when there is none
    config_text: str
    notes: list[str]  # sentences about what is missing or damaged
    modified: float  # time of the last write, seconds since 1970
    loads: Loads | None = None  # None: no experts
    results: Outcomes = field(default_factory=dict)  # of tasks, as files hold them
    beat: Beat | None = None
    processes: Sequence[Process] = ()  # that a supervisor started
    not_finite: Mapping[str, int] = field(default_factory=dict)  # of records: metric -> step from which on it has no finite value
    origin: str = ""  # of a model that was not trained here: a sentence
    samples: Sequence[Sample] = ()  # texts that the model has written, by step
    label: str = ""  # name that no other run of the page has
    number: int = 0  # on the page

    @property
    def swatch(self) -> str:
        """HTML of a square in the run's colour, striped if that is also the colour of another."""
        return f'<span class="swatch c{self.number % COLORS} d{self.number // COLORS % DASHES}"></span>'

    def get(self, name: str) -> Series:
        """The metric `name` over steps; empty if it was not recorded."""
        return self.series.get(name, EMPTY)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config by dotted name."""
        return dict(flatten(self.config)) if self.config else {}

    @cached_property
    def start(self) -> dict[str, Any]:
        """Data of all start events; newer values replace older ones."""
        return {key: value for event in self.events if event.kind == "start" for key, value in event.data.items()}

    @cached_property
    def bills(self) -> list[dict[str, Any]]:
        """Bills that the starts and ends of attempts state."""
        bills = (event.data.get("bill") for event in self.events if event.kind in ("start", "stop"))
        return [bill for bill in bills if isinstance(bill, dict)]

    @property
    def metrics(self) -> dict[str, Declared]:
        """Metrics that the run declares in its `start` events, by name; {} for older runs."""
        declared: dict[str, Declared] = {}
        for event in self.events:
            stated = event.data.get("metrics") if event.kind == "start" else None
            for name, item in stated.items() if isinstance(stated, dict) else ():
                if isinstance(item, dict):
                    entries = item.get("entries")
                    names = list(map(str, entries)) if isinstance(entries, list) else []
                    declared[name] = Declared(str(item.get("title", "")), str(item.get("unit", "")), names)
        return declared

    @property
    def loss_unit(self) -> str:
        """Unit of the loss, as its objective declares it."""
        return (self.metrics["loss"].unit if "loss" in self.metrics else "") or "nats a token"

    @property
    def eval_loss(self) -> Series:
        """Held-out loss over steps."""
        return self.evaluated.get("eval_loss", EMPTY)

    @cached_property
    def evaluated(self) -> dict[str, Series]:
        """Figures of evaluations over steps, by name: eval_loss, eval_loss/NAME, tasks/TASK/METRIC."""
        points: dict[str, list[tuple[int, float]]] = {}
        for name, step, value in self._evaluations:
            if is_number(value):
                points.setdefault(name, []).append((step, value))
        arrays = {name: np.array(points[name], np.float64) for name in sorted(points, key=lambda name: name.startswith("tasks/"))}
        series = {name: _rising(points_N2[:, 0], points_N2[:, 1]) for name, points_N2 in arrays.items()}
        return {name: one for name, one in series.items() if len(one.steps_N)}

    @cached_property
    def lost(self) -> dict[str, int]:
        """Step from which on a metric or an evaluation has no finite value any more, by name."""
        lost = dict(self.not_finite)
        for name, step, value in self._evaluations:
            _note_value(lost, name, step, value)
        return lost

    @cached_property
    def _evaluations(self) -> list[tuple[str, int, Any]]:
        """(name, step, value) of evaluations of updates that still count."""
        found: list[tuple[str, int, Any]] = [
            (f"tasks/{task}/{metric}", outcome.step, outcome.value)
            for (task, metric), of_task in self.results.items()
            for outcome in of_task
        ]
        found += [(name, event.step, value) for event, name, value in evaluations(surviving(self.events))]
        return found

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Attempts of the run, in order."""
        clock = self.get("time")
        last = LastRecord(int(clock.steps_N[-1]), float(clock.values_N[-1])) if len(clock.steps_N) else None
        return attempts_of(self.events, last, self.beat, self.processes)

    @cached_property
    def ledger(self) -> Ledger:
        """Wall time by part, up to the last sign of life."""
        return ledger_of(self.attempts, self.processes)

    @property
    def last_step(self) -> int:
        """Updates done, without undone updates."""
        return _last_step(self.series, self.events)


def load_run(path: Path) -> Run:
    """Read one run directory. Raises UserError if `path` is not one or cannot be read."""
    run = RunDirectory(path, primary=False)
    files = (run.config, run.metrics, run.events)
    try:
        existing = [file for file in files if file.is_file()]
    except (OSError, ValueError) as error:  # a name too long, a NUL
        raise error_kind(error)(f"{path}: cannot be read ({error})") from error
    if not existing:
        inside: list[Path] = []
        reason = "does not exist" if not path.exists() else "holds none of config.yml, metrics.jsonl, events.jsonl"
        with contextlib.suppress(OSError):
            inside = sorted(metrics.parent for metrics in path.glob("*/metrics.jsonl"))
        fix = (
            f"it holds runs: give those, such as {inside[0]}"
            if inside
            else "give the folder that `maxlm train` wrote, such as runs/quickstart"
        )
        raise UserError(f"{path} is not a run directory: it {reason}; {fix}")
    notes: list[str] = []
    try:
        if run.model.is_file() and existing == [run.config]:
            return _load_model(run, path)
        text, config = _read_config(run.config, notes)
        series, not_finite = _read_metrics(run.metrics, notes)
        events = [event for item in _objects(run.events, notes) if (event := Event.from_item(item)) is not None]
        loads = _read_routing(run.routing, config, notes) if run.routing.is_file() else None
        undone = Undone(events, _last_step(series, events) if events else None)
        results, samples = read_results(run.evaluations, notes, undone), read_samples(run.samples, notes, undone)
        modified = max(file.stat().st_mtime for file in existing)
    except OSError as error:
        raise error_kind(error)(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error
    life = read_beat(run.heartbeat), read_processes(run.supervisor)
    return Run(path.resolve().name, path, series, events, config, text, notes, modified, loads, results, *life, not_finite, samples=samples)


def check_distinct(paths: Sequence[Path]) -> None:
    """Raise UserError if a folder is named twice, as by `runs/* runs/a`: its lines would hide each other."""
    named: dict[Path, Path] = {}
    for path in paths:
        try:
            place = path.resolve()
        except (OSError, ValueError) as error:  # a NUL, a loop of links
            raise error_kind(error)(f"{path}: cannot be read ({error})") from error
        if place in named:
            raise UserError(f"{path} is named twice: leave one of them out.")
        named[place] = path


def _last_step(series: Mapping[str, Series], events: Sequence[Event]) -> int:
    return current_step(events, [int(one.steps_N[-1]) for one in series.values() if len(one.steps_N)])


def _load_model(run: RunDirectory, path: Path) -> Run:
    """A model of `maxlm import` or `average`: its results of tasks. Training settings of its config.yml are defaults, and left out."""
    notes: list[str] = []
    text, _ = _read_config(run.model, notes)
    _, config = _read_config(run.config, notes)
    results = read_results(run.evaluations, notes, Undone((), None))
    origin = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    config = {key: section for key, section in config.items() if key == "model"}
    return Run(
        path.resolve().name, path, {}, [], config, text, notes, run.model.stat().st_mtime, None, results, origin=origin or "A model."
    )


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notes.append("config.yml is missing, so the settings are not shown.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = parse_yaml(text)
        dict(flatten(config))  # it may hold itself
    except (YAMLError, ValueError, LookupError, RecursionError):
        config = None
    if not isinstance(config, dict):
        notes.append("config.yml is empty or damaged; it is shown unchanged.")
        return text, {}
    return text, config


def _objects(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Objects of the file. Adds to `notes` that it is missing, or how many lines are not objects."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return
    bad = 0
    for item in read_objects(path):
        if not is_step(item.get("step")):
            bad += 1
        else:
            yield item
    if bad:
        notes.append(f"{path.name}: {bad} {'line' if bad == 1 else 'lines'} could not be read and {'is' if bad == 1 else 'are'} left out.")


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Series], dict[str, int]]:
    """The metrics by name, and the step from which on one has no finite value."""
    steps, columns = array("d"), dict[str, array]()  # a column may end early, and is NaN in records without the metric
    lost: dict[str, int] = {}
    for record in _objects(path, notes):
        step, records = record.pop("step"), len(steps)
        steps.append(step)
        for name, value in record.items():  # of millions of records: no function is called for a finite value
            if (type(value) is float or type(value) is int) and -LARGEST < value < LARGEST:
                column = columns.get(name)
                if column is None:
                    columns[name] = column = array("d")
                if len(column) < records:
                    column.extend(repeat(math.nan, records - len(column)))
                column.append(value)
                if lost:
                    lost.pop(name, None)
            elif name not in lost:
                _note_value(lost, name, step, value)
    if path.is_file() and not columns:
        notes.append("metrics.jsonl holds no records yet, so there are no charts.")
    steps_N = np.array(steps)
    whole = _rising(steps_N, np.arange(len(steps_N), dtype=np.float64))  # of each step its last record
    return {name: _of_column(columns[name], steps_N, whole) for name in columns}, lost


def _of_column(column: array, steps_N: NDArray[np.float64], whole: Series) -> Series:
    """Series of a metric that is NaN, or missing at the end, where a record has none. Without gaps it shares the steps of `whole`."""
    values_N = np.array(column)
    if len(values_N) == len(steps_N) and not np.isnan(values_N).any():
        return Series(whole.steps_N, values_N[whole.values_N.astype(np.int64)])
    return _rising(steps_N[: len(values_N)], values_N)


def _note_value(lost: dict[str, int], name: str, step: int, value: Any) -> None:
    """Keep in `lost` the step from which on the figure `name` has been null, infinite or too large."""
    if is_number(value) and abs(value) < LARGEST:
        lost.pop(name, None)
    elif value is None or type(value) in (int, float):
        lost.setdefault(name, step)


def _rising(steps_N: NDArray[np.float64], values_N: NDArray[np.float64]) -> Series:
    """Sorted by step. Of several records of a step the last is used: the others are of an attempt that was killed. Left out are values
    that a page cannot hold: a thousand of them, or the sum of two, would be infinite.
    """
    finite = np.abs(values_N) < LARGEST
    steps_N, values_N = steps_N[finite][::-1], values_N[finite][::-1]
    unique_N, first_N = np.unique(steps_N, return_index=True)
    return Series(unique_N, values_N[first_N])


def _read_routing(path: Path, config: dict[str, Any], notes: list[str]) -> Loads | None:
    """Loads, or None if no line is usable. Of several lines of a step the last is used; all must have the shape of the first."""
    loads: dict[int, NDArray[np.int64]] = {}
    odd = 0
    for item in _objects(path, notes):
        load_LE = _counts(item.get("load"))
        if load_LE is None or load_LE.shape != next(iter(loads.values()), load_LE).shape:
            odd += 1
        else:
            loads[item["step"]] = load_LE
    if odd:
        notes.append(f"{path.name}: {odd} {'line' if odd == 1 else 'lines'} without usable loads {'is' if odd == 1 else 'are'} left out.")
    if not loads:
        return None
    steps = sorted(loads)
    dense = dict(flatten(config)).get("model.moe.n_dense", 0)
    return Loads(np.array(steps, np.float64), np.stack([loads[step] for step in steps]), dense if is_step(dense) else 0)


def _counts(load: Any) -> NDArray[np.int64] | None:
    """A matrix of counts, or None for anything else."""
    try:
        load_LE = np.array(load)
    except ValueError:  # ragged
        return None
    usable = load_LE.dtype.kind == "i" and load_LE.ndim == 2 and load_LE.size > 0 and load_LE.min() >= 0 and load_LE.max() < 2**40
    return load_LE if usable else None
