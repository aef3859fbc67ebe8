"""The table of results: what tasks found, of one run or of several side by side."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from maxlm.base.strict_json import is_finite, read_objects
from maxlm.telemetry.course import Undone
from maxlm.telemetry.formatting import figure
from maxlm.telemetry.observer import is_step
from maxlm.telemetry.pages import Cell


class Outcome(NamedTuple):
    """A metric of a task after a step."""

    value: float
    stderr: float | None
    step: int
    n: int | None  # items

    def cell(self) -> Cell:
        """Cell of a table: value, standard error, step and number of items."""
        error = f" ± {figure(self.stderr, 2)}" if self.stderr is not None else ""
        items = f", {self.n:,} items" if self.n is not None else ""
        return Cell(f"{figure(self.value)}{error} <small>step {self.step:,}{items}</small>", self.value)


Outcomes = dict[tuple[str, str], list[Outcome]]  # by task and metric, by step


def read_results(folder: Path, notes: list[str], undone: Undone) -> Outcomes:
    """Results in the folder `evaluations` of a run. Files that are no results and results of undone steps are left out, with a note."""
    found: dict[tuple[str, str], dict[int, Outcome]] = {}
    left_out = 0
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        item = next(iter(read_objects(path)), {})
        task, metrics, step = item.get("task"), item.get("metrics"), item.get("step")
        if not isinstance(task, str) or not isinstance(metrics, dict) or not is_step(step):
            notes.append(f"evaluations/{path.name} could not be read and is left out.")
            continue
        made = item["time"] if is_finite(item.get("time")) else path.stat().st_mtime  # results of older versions say no time
        if undone(step, made):
            left_out += 1
            continue
        for metric, values in metrics.items():
            if isinstance(values, dict) and is_finite(values.get("value")):
                stderr, n = (float(values["stderr"]) if is_finite(values.get("stderr")) else None), item.get("n")
                found.setdefault((task, metric), {})[step] = Outcome(float(values["value"]), stderr, step, n if is_step(n) else None)
    if left_out:
        notes.append(f"evaluations: {left_out} {'file is' if left_out == 1 else 'files are'} of undone steps and left out.")
    return {key: [of_step[step] for step in sorted(of_step)] for key, of_step in found.items()}


def rows(results: Sequence[Outcomes]) -> list[tuple[str, list[str]]]:
    """HTML of each task and metric, with a cell for each of the runs: its newest result."""
    keys = dict.fromkeys(key for of_run in results for key in of_run)
    return [
        (
            f"{escape(task)} <small>{escape(metric.replace('_', ' '))}</small>",
            [of_run[task, metric][-1].cell() if of_run.get((task, metric)) else "–" for of_run in results],
        )
        for task, metric in keys
    ]
