"""Roll backs of a run, and the batches that they leave out: in a file of the run directory, which is written before training goes back.

So a kill at any moment loses neither the list nor the step to go back to. Each checkpoint records how many roll backs came before it, and
which batches were left out when it was saved. One that is older than a roll back is fit to continue from if it was saved early enough.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlm.base.atomic import write_text
from maxlm.base.errors import ConfigError, UserError
from maxlm.base.paths import read_file
from maxlm.base.transient import retried
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.folder import HEALTHY
from maxlm.cluster import agree
from maxlm.config.sections.health import HealthConfig
from maxlm.data.order import batch_number

LEFT_OUT, COUNT = "left_out", "roll_backs"  # entries of a data position


@dataclasses.dataclass(frozen=True)
class Record:
    """Roll back `number`, counted from 1: from `from_step` to a checkpoint of step `before` or earlier, leaving out `batches`."""

    number: int
    from_step: int
    before: int
    batches: tuple[int, ...]
    cause: str
    reason: str
    time: float  # seconds since 1970


class Journal:
    """All roll backs of a run. In a cluster every process has the same; the primary one writes."""

    def __init__(self, path: Path | None = None, *, primary: bool = True, leave_out: Sequence[int] = ()) -> None:
        """Read `path` if it exists; None: nothing is kept. `leave_out`: batches that the config leaves out.

        Raises UserError in all processes: UnavailableError if the file cannot be read now.
        """
        self._path, self._primary, self._leave_out = path, primary, tuple(leave_out)
        self.records: list[Record] = []
        if path is not None:
            self.records = _parse(agree.on_process_0(lambda: retried(lambda: _text(path), f"reading {path}"), f"reading {path}"), path)
        self._count = max((record.number for record in self.records), default=0)

    @classmethod
    def seen_here(cls, path: Path) -> "Journal":
        """The journal at `path` as this process sees it, to read only. It waits for no other process. Raises UserError."""
        journal = cls()
        journal.records = _parse(retried(lambda: _text(path), f"reading {path}"), path)
        return journal

    def add(self, from_step: int, before: int, batches: Sequence[int], cause: str, reason: str) -> str:
        """Record a roll back; returns why it cannot be written, or ""."""
        record = Record(self._count + 1, from_step, before, tuple(batches), cause, reason, round(time.time(), 3))
        records, problem = [*self.records, record], ""
        if self._path is not None and self._primary:
            try:
                write_text(self._path, json.dumps({COUNT: [dataclasses.asdict(one) for one in records]}, indent=1) + "\n")
            except OSError as error:
                problem = f"{self._path} cannot be written ({error.strerror or error})"
        if agree.max_over_processes(int(bool(problem))):
            return problem or "another process cannot record it"
        self.records, self._count = records, record.number
        return ""

    def unfit(self, checkpoints: Checkpoints, *, healthy_only: bool, here: bool = False) -> dict[int, str]:
        """Step -> reason, of the checkpoints that must not be continued: of steps that were taken back, and with `healthy_only` all
        that are newer than the newest healthy one. Copies in memory of steps that were taken back are passed over: one may share its step
        with a checkpoint of another lineage. `here`: of those that this process sees, without waiting for the others.
        """
        if not self.records and not healthy_only:
            return {}
        checkpoints.pass_over_copies(self._taken_back)
        positions = checkpoints.positions_here() if here else checkpoints.positions()
        reasons = {step: reason for step, position in positions.items() if (reason := self._taken_back(step, position))}
        healthy = [step for step, position in positions.items() if step not in reasons and position.get(HEALTHY, True)]
        if healthy and healthy_only:
            later = [step for step in positions if step not in reasons and step > max(healthy)]
            reasons |= dict.fromkeys(later, "training was in trouble when it was saved")
        return reasons

    def left_out(self, position: Mapping[str, Any]) -> tuple[int, ...]:
        """Numbers of the batches to leave out from a checkpoint with this data position on; {}: from the beginning. Raises ConfigError if
        the config leaves out one that the checkpoint was trained on.
        """
        self._count = max(self._count, position.get(COUNT, 0))
        before = tuple(position.get(LEFT_OUT, ()))
        step = position.get("next_step", 0)
        reached = batch_number(step, before)
        for number in self._leave_out:
            if number < reached and number not in before:
                rule = f"batch {number} is among those that the checkpoint of step {step:,} was trained on"
                raise ConfigError("health.leave_out", list(self._leave_out), rule, "remove it, or remove the checkpoints after it")
        since = [record for record in self.records if record.number > position.get(COUNT, 0)]
        return tuple(sorted({*before, *self._leave_out, *(number for record in since for number in record.batches)}))

    def position(self, left_out: Sequence[int]) -> dict[str, Any]:
        """Entries for the data position of a checkpoint, as far as there are any."""
        return {**({LEFT_OUT: list(left_out)} if left_out else {}), **({COUNT: self._count} if self._count else {})}

    def refusal(self, settings: HealthConfig, step: int) -> str:
        """Reason that training must not go back from `step`, since it did so too often, or ""."""
        recent = [record for record in self.records if record.from_step > step - settings.recent_steps]
        if self._count >= settings.roll_backs:
            return f"the run was rolled back {self._count} times, and health.roll_backs = {settings.roll_backs}"
        if len(recent) >= settings.recent_roll_backs:
            limit = f"health.recent_roll_backs = {settings.recent_roll_backs}"
            return f"the run was rolled back {len(recent)} times in {settings.recent_steps:,} steps, and {limit}"
        return ""

    def _taken_back(self, step: int, position: Mapping[str, Any]) -> str:
        for record in self.records:
            if record.number > position.get(COUNT, 0) and step > record.before:
                return f"training went back from step {record.from_step:,} to {record.before:,} or earlier ({record.cause})"
        return ""


def _text(path: Path) -> str:
    """The text of a file, "" if there is none; bytes that are not UTF-8 are escapes, which JSON refuses."""
    try:
        return read_file(path).decode(errors="backslashreplace")
    except FileNotFoundError:
        return ""


def _parse(text: str, path: Path) -> list[Record]:
    if not text:
        return []
    try:
        return [Record(**{**one, "batches": tuple(one["batches"])}) for one in json.loads(text)[COUNT]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "bring back a copy, or delete it; then batches that were left out since the newest checkpoint are trained on"
        raise UserError(f"{path} does not list the roll backs of this run, as it was written: {fix}.") from error
