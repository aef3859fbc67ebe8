"""`maxlm.Run`: the folder of a run, finished or not."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxlm.api.errors import plain_errors
from maxlm.api.model import Model
from maxlm.api.table import Table
from maxlm.base.errors import error_kind
from maxlm.base.paths import user_path
from maxlm.base.strict_json import is_finite
from maxlm.config.schema import Config
from maxlm.data.tokenizer import Tokenizer
from maxlm.telemetry.course import surviving
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.runs.folder import RunFolder
from maxlm.training.saved_run import SavedRun, open_run


@dataclass(frozen=True)
class Run:
    """A run on disk. Its files are read when they are asked for, so a run that still trains shows its records so far."""

    path: Path

    @classmethod
    @plain_errors
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Open the folder of a run. Raises UserError if it is none."""
        run = cls(user_path(os.fspath(path)))
        run._saved  # noqa: B018 -- it must be readable
        return run

    @cached_property
    def _saved(self) -> SavedRun:
        return open_run(self.path)

    @property
    def config(self) -> Config:
        """Its config, as it was trained last."""
        return self._saved.trained

    @property
    def metrics(self) -> Table:
        """Records of updates, a row each: `step`, `loss`, `grad_norm`, `lr`, `tokens`, `tokens_per_s`, ... of the updates that count: those
        that a roll back or a restart has undone are left out.
        """
        rows = {record["step"]: record for record in RunFolder(self.path).records()}
        return Table([rows[step] for step in sorted(rows)])

    @property
    def evaluations(self) -> Table:
        """Evaluations, a row each: `step` with `eval_loss`, `eval_loss/NAME` and `tasks/TASK/METRIC`."""
        rows: dict[int, dict[str, Any]] = {}
        for one in RunFolder(self.path).evaluations:
            if is_finite(one.value):
                rows.setdefault(one.step, {"step": one.step})[one.name] = one.value
        return Table([rows[step] for step in sorted(rows)])

    @property
    def events(self) -> list[Event]:
        """Events in their order: start, save, eval, alarm, stop ..., without events of undone updates."""
        return surviving(RunFolder(self.path).events)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints that are fit to use, oldest first."""
        return self._saved.steps()

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Texts that the model has written, by step and prompt."""
        return [one._asdict() for one in load_run(self.path).samples]

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises UserError if it has none."""
        return self._saved.text_tokenizer()

    @plain_errors
    def model(self, step: int | None = None, *overrides: str, weights: str = "raw", context: int | None = None) -> Model:
        """The model of a checkpoint; None: the newest. The other arguments go to `Model.load`."""
        return Model.load(self.path, *overrides, step=step, weights=weights, context=context)

    @plain_errors
    def report(self) -> Path:
        """Write its report.html anew; returns the path."""
        directory = RunDirectory(self.path, primary=True)
        try:
            return write_report([self.path], directory.report)
        except OSError as error:
            raise error_kind(error)(f"{directory.report} cannot be written: {error.strerror}.") from error

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"
