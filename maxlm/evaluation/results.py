"""Results of tasks: figures, their files and their table."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError
from maxlm.base.strict_json import dumps, read_objects

RESAMPLES, SEED = 1000, 0
DRAWN = 2**22  # indices at a time


class Figure(NamedTuple):
    """A value, and its standard error by bootstrap over items; None for a single item."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Result:
    """Result of one task."""

    task: str
    kind: str
    n: int  # items
    figures: Mapping[str, Figure]
    settings: Mapping[str, Any]  # that the figures depend on
    truncated: int = 0  # requests that lost the beginning of their context
    truncated_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """The result as an object of JSON."""
        metrics = {name: {"value": figure.value, "stderr": figure.stderr} for name, figure in self.figures.items()}
        notices = {"truncated_requests": self.truncated, "truncated_tokens": self.truncated_tokens}
        return {"task": self.task, "kind": self.kind, "n": self.n, "metrics": metrics, **notices, "settings": dict(self.settings)}

    @property
    def notice(self) -> str:
        """Sentence about what was cut; "" if nothing was."""
        if not self.truncated:
            return ""
        return (
            f"{self.task}: {self.truncated:,} requests are longer than the context; {self.truncated_tokens:,} tokens were cut off the left."
        )


def result_file(folder: Path, step: int | None, task: str) -> Path:
    """STEP-TASK.json, or TASK.json without a step."""
    return folder / f"{task if step is None else f'{step}-{task}'}.json"


def check_unused(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError if the file of a result holds one that was computed with other settings or weights, or something else."""
    if not path.exists():
        return
    if next(iter(read_objects(path)), {}).get("settings") != json.loads(dumps(settings)):
        raise UserError(f"{path} holds a result of other weights or settings: delete it, or choose another folder with --out.")


def write_result(folder: Path, model: str, step: int | None, result: Result) -> Path:
    """Write the result of `model`, as its user names it, atomically to its file. Raises OSError."""
    path = result_file(folder, step, result.task)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, dumps({"model": model, "step": step, "time": round(time.time(), 3), **result.to_json()}) + "\n")
    return path


def table(results: Sequence[Result]) -> Table:
    """Task, metric, value, standard error and items."""
    made = Table("task", "metric")
    for name in ("value", "stderr", "n"):
        made.add_column(name, justify="right")
    for result in results:
        for metric, figure in result.figures.items():
            error = "–" if figure.stderr is None else f"{figure.stderr:.4f}"
            made.add_row(result.task, metric.replace("_", " "), f"{figure.value:.4f}", error, f"{result.n:,}")
    return made


def standard_error(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], resamples: int = RESAMPLES) -> float | None:
    """Deviation of a statistic over samples of the items, drawn with replacement (Efron 1979), by a fixed seed. None for fewer than two.

    Args:
        values: [items] or [items, figures].
        statistic: from means over items, [samples] or [samples, figures], to one number a sample.
        resamples: number of samples.
    """
    n = len(values)
    if n < 2:
        return None
    rng = np.random.default_rng(SEED)
    means, at_a_time = [], max(DRAWN // n, 1)
    for start in range(0, resamples, at_a_time):
        drawn = rng.integers(0, n, (min(at_a_time, resamples - start), n))
        means.append(values[drawn].mean(axis=1))
    return float(np.std(statistic(np.concatenate(means)), ddof=1))
