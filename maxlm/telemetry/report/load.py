"""Reads a run directory as it is found: finished, running, killed or damaged."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from maxlm.config.errors import UserError
from maxlm.telemetry.attempts import Attempt, Sign, attempts_of
from maxlm.telemetry.observer import Event, is_step
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import read_objects


class Series(NamedTuple):
    """One figure over the steps: steps rise; a figure that was null is left out."""

    steps_N: NDArray[np.float64]
    values_N: NDArray[np.float64]


class Loads(NamedTuple):
    """Choices that fell on each expert (E) of each layer that has any (L), of some of the steps."""

    steps_N: NDArray[np.float64]  # they rise
    load_NLE: NDArray[np.int64]
    first_layer: int  # the number of the first of these layers, as the model counts


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
    notes: list[str]  # what is missing or damaged, in sentences
    modified: float  # when something was last written, seconds since 1970
    loads: Loads | None = None  # None: no experts

    def get(self, name: str) -> Series:
        return self.series.get(name, EMPTY)

    @cached_property
    def metrics(self) -> dict[str, dict[str, str]]:
        """Name -> title and unit of the metrics that the run declares in its `start` events; {} for runs of before."""
        declared: dict[str, dict[str, str]] = {}
        for event in self.events:
            stated = event.data.get("metrics") if event.kind == "start" else None
            for name, item in stated.items() if isinstance(stated, dict) else ():
                if isinstance(item, dict):
                    declared[name] = {key: str(item.get(key, "")) for key in ("title", "unit")}
        return declared

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Attempts, from events and records."""
        return attempts_of(self.events, self._signs)

    def _signs(self) -> list[Sign]:
        columns = [
            dict(zip(*(values.tolist() for values in self.get(name)), strict=True)) for name in ("time", "step_time_s", "data_wait_s")
        ]
        return [Sign(int(step), *(column[step] for column in columns)) for step in columns[0] if all(step in column for column in columns)]

    @property
    def last_step(self) -> int:
        steps = [int(series.steps_N[-1]) for series in self.series.values() if len(series.steps_N)]
        return max([*steps, *(event.step for event in self.events)], default=0)


def load_run(path: Path) -> Run:
    """Raises UserError when `path` is not a run directory or cannot be read."""
    run = RunDirectory(path, primary=False)
    files = (run.config, run.metrics, run.events)
    try:
        found = [file for file in files if file.is_file()]
    except (OSError, ValueError) as error:  # a name too long, a NUL
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not found:
        reason = "does not exist" if not path.exists() else "holds none of config.yml, metrics.jsonl, events.jsonl"
        raise UserError(f"{path} is not a run directory: it {reason}; give the folder that `maxlm train` wrote, such as runs/quickstart")
    notes: list[str] = []
    try:
        text, config = _read_config(run.config, notes)
        series = _read_metrics(run.metrics, notes)
        events = _read_events(run.events, notes)
        loads = _read_routing(run.routing, config, notes) if run.routing.is_file() else None
        modified = max(file.stat().st_mtime for file in found)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error
    return Run(path.resolve().name, path, series, events, config, text, notes, modified, loads)


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notes.append("config.yml is missing, so the settings are not shown.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        notes.append("config.yml is empty or damaged; it is shown as it was found.")
        return text, {}
    return text, config


def _objects(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of the file; says in `notes` that it is missing, or how many lines were no objects."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return
    bad = 0
    for item in read_objects(path):
        if item is None or not is_step(item.get("step")):
            bad += 1
        else:
            yield item
    if bad:
        notes.append(f"{path.name}: {bad} {'line' if bad == 1 else 'lines'} could not be read and {'is' if bad == 1 else 'are'} left out.")


def _read_metrics(path: Path, notes: list[str]) -> dict[str, Series]:
    columns: dict[str, tuple[array, array]] = {}
    for record in _objects(path, notes):
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(record["step"])
                values.append(value)
    if path.is_file() and not columns:
        notes.append("metrics.jsonl holds no records yet, so there are no charts.")
    return {name: _rising(np.array(steps), np.array(values)) for name, (steps, values) in columns.items()}


def _rising(steps_N: NDArray[np.float64], values_N: NDArray[np.float64]) -> Series:
    """Sorted by step; of several records of one step the last counts (the others are of an attempt that was killed)."""
    finite = np.isfinite(values_N)
    steps_N, values_N = steps_N[finite][::-1], values_N[finite][::-1]
    unique_N, first_N = np.unique(steps_N, return_index=True)
    return Series(unique_N, values_N[first_N])


def _read_routing(path: Path, config: dict[str, Any], notes: list[str]) -> Loads | None:
    """None when no line can be used. Of several lines of one step the last counts, and all have the shape of the first."""
    found: dict[int, NDArray[np.int64]] = {}
    odd = 0
    for item in _objects(path, notes):
        load_LE = _counts(item.get("load"))
        if load_LE is None or load_LE.shape != next(iter(found.values()), load_LE).shape:
            odd += 1
        else:
            found[item["step"]] = load_LE
    if odd:
        notes.append(f"{path.name}: {odd} {'line' if odd == 1 else 'lines'} without usable loads {'is' if odd == 1 else 'are'} left out.")
    if not found:
        return None
    steps = sorted(found)
    dense = flatten(config).get("model.moe.n_dense", 0)
    return Loads(np.array(steps, np.float64), np.stack([found[step] for step in steps]), dense if is_step(dense) else 0)


def _counts(load: Any) -> NDArray[np.int64] | None:
    """A rectangle of counts, or None for anything else."""
    try:
        load_LE = np.array(load)
    except ValueError:  # ragged
        return None
    usable = load_LE.dtype.kind == "i" and load_LE.ndim == 2 and load_LE.size > 0 and load_LE.min() >= 0 and load_LE.max() < 2**40
    return load_LE if usable else None


def _read_events(path: Path, notes: list[str]) -> list[Event]:
    return [event for item in _objects(path, notes) if (event := Event.of(item)) is not None]


def eval_loss(run: Run) -> Series:
    """Held-out loss over the steps, from the records and from the events."""
    recorded = run.get("eval_loss")
    told = [
        (e.step, e.data["eval_loss"]) for e in run.events if e.kind in ("eval", "stop") and isinstance(e.data.get("eval_loss"), int | float)
    ]
    steps_N = np.concatenate([recorded.steps_N, np.array([step for step, _ in told], dtype=np.float64)])
    values_N = np.concatenate([recorded.values_N, np.array([loss for _, loss in told], dtype=np.float64)])
    order_N = np.argsort(steps_N, kind="stable")
    return _rising(steps_N[order_N], values_N[order_N])


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat
