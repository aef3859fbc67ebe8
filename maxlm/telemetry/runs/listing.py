"""Many runs as one table: found below folders, filtered and sorted by any setting or figure, a row each."""

import json
import math
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from maxlm.base.errors import UserError, error_kind, printable, shorten, show, some
from maxlm.base.paths import open_regular
from maxlm.base.strict_json import dumps, is_finite, is_number
from maxlm.config.fields import flatten
from maxlm.telemetry.course import last_stop
from maxlm.telemetry.formatting import count, duration, figure, percent
from maxlm.telemetry.ledger import OVER, ledger_of
from maxlm.telemetry.runs.folder import RunFolder

DEFAULT = ("run", "state", "step", "loss", "eval_loss", "tokens", "tokens_per_s", "mfu", "seconds", "note")
DEEPEST = 8  # folders between a place that is searched and a run
LIVING_S = 120.0  # since the last write of a run that goes on
LOSSES = ("loss", "grad_norm", "eval_loss")  # figures of which null means: not finite
_RUN_FILES = frozenset({"metrics.jsonl", "events.jsonl", "model.yml"})
_TEXTS: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(("tokens", "tokens_per_s", "parameters"), count),
    **dict.fromkeys(("mfu", "goodput"), percent),
    "seconds": duration,
    "step": lambda step: f"{step:,}",
}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    **{"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq, "==": operator.eq},
    "!=": operator.ne,
}
_CONDITION = re.compile(r"\s*([^<>=!~\s]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")


def find_runs(places: Sequence[Path], notes: list[str]) -> list[Path]:
    """Folders of runs at these places and below them, in the order of their names. Links to folders are not followed.

    Raises UserError for a place that is none, or if there is no run at all. A folder that cannot be read is a note.
    """
    found: dict[str, Path] = {}
    for place in places:
        try:
            if not place.is_dir():
                missing = "is a file" if place.exists() else "does not exist"
                raise UserError(f"{shorten(str(place))} {missing}: give the folder of a run, or a folder with runs below it, such as runs.")
            os.scandir(place).close()
            for path in _below(place, notes):
                found.setdefault(os.path.realpath(path), path)
        except (OSError, ValueError) as error:  # a NUL, a loop of links, no permission
            reason = getattr(error, "strerror", None) or error
            raise error_kind(error)(f"{shorten(str(place))} cannot be read: {reason}.") from error
    if not found:
        named = some([shorten(str(place)) for place in places])
        raise UserError(f"no run was found in {named}: give a folder with runs below it, such as runs, which `maxlm train` writes.")
    return list(found.values())


def _below(place: Path, notes: list[str]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        notes.append(f"{printable(shorten(str(error.filename)))} cannot be read: {error.strerror}.")

    for folder, folders, files in os.walk(place, onerror=unreadable):
        path = Path(folder)
        if _RUN_FILES.intersection(files) or ("config.yml" in files and _is_saved(path / "config.yml")):
            folders.clear()
            yield path
        elif len(path.parts) - len(place.parts) >= DEEPEST:
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _is_saved(config: Path) -> bool:
    try:
        with open_regular(config) as file:
            return file.read(10) == b"# Written "
    except OSError:
        return True  # a row with a note


@dataclass
class Row:
    """A run in the table. Nothing about a damaged run raises: `notes` name the missing files."""

    folder: RunFolder
    label: str  # its name; its path where another run has that name
    failed: list[str] = field(default_factory=list)  # sentences about files that could not be read

    @property
    def notes(self) -> list[str]:
        """Sentences about missing, damaged and foreign files, as far as they have been read."""
        self.figures  # noqa: B018 -- reads them
        return list(dict.fromkeys([*self.folder.notes, *self.failed]))

    def __getitem__(self, name: str) -> Any:
        """A figure or a setting; None if the run has none of that name."""
        if name == "note":
            return "; ".join(self.notes) or None
        return self.figures[name] if name in self.figures else self.settings.get(name)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config, nested; {} if it cannot be read."""
        return self.tried(lambda: self.folder.config, {})

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config by dotted key."""
        return dict(flatten(self.config)) if self.config else {}

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Figures by name: facts of the run, its last record, and its newest evaluations."""
        found: dict[str, Any] = {"run": self.label, "path": str(self.folder.path), "state": "unreadable"}
        self.tried(self.folder.describe, None)
        for part in (_facts, _evaluated, _record):
            found |= self.tried(lambda part=part: part(self.folder), {})  # type: ignore[misc]
        return found

    def tried(self, read: Callable[[], Any], otherwise: Any) -> Any:
        """The result of `read`, or `otherwise` with a note: whatever a run's files hold, the other runs are listed."""
        try:
            return read()
        except Exception as error:
            reason = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            name = Path(error.filename).name if isinstance(error, OSError) and error.filename else "its files"
            self.failed.append(f"{name} cannot be read ({shorten(' '.join(str(reason).split()))})")
            return otherwise


def _facts(folder: RunFolder) -> dict[str, Any]:
    start, stop = folder.start, last_stop(folder.events)
    ledger = ledger_of(folder.attempts, folder.processes)
    bills = [event.data["bill"] for event in folder.events if isinstance(event.data.get("bill"), Mapping)]
    costs = [bill["cost"] for bill in bills if is_finite(bill.get("cost"))]
    return {
        "state": _state(folder, None if stop is None else str(stop.data.get("reason") or "done")),
        "step": folder.last_step,
        "steps": _total(start.get("total_steps")),
        "version": folder.version,
        "started": next((event.time for event in folder.events if event.kind == "start"), None),
        "seconds": ledger.wall_s or None,
        "goodput": ledger.goodput,
        "cost": max(costs, default=None),
        **{name: start[name] for name in ("parameters", "devices", "device_kind", "processes") if name in start},
    }


def _state(folder: RunFolder, reason: str | None) -> str:
    if reason is not None:
        return "finished" if reason in OVER else reason
    if not folder.events and folder.files.model.is_file():
        return "model"
    written = [file.stat().st_mtime for file in (folder.files.heartbeat, folder.files.metrics, folder.files.events) if file.is_file()]
    return "running" if time.time() - max(written, default=0.0) < LIVING_S else "no end recorded"


def _total(steps: Any) -> int | None:
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


def _evaluated(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    newest: dict[str, int] = {}
    for step, name, value, _ in folder.evaluations:
        if step >= newest.get(name, -1):
            found[name], newest[name] = _value(name, value), step
    held_out = [value for _, name, value, _ in folder.evaluations if name == "eval_loss" and is_finite(value)]
    return {**found, "best_eval_loss": min(held_out)} if held_out else found


def _record(folder: RunFolder) -> dict[str, Any]:
    hidden = ("step", "time", "cost", "eval_loss", "run", "path", "state", "note")
    return {name: _value(name, value) for name, value in folder.last_record.items() if name not in hidden}


def _value(name: str, value: Any) -> Any:
    return math.nan if value is None and name.partition("/")[0] in LOSSES else value


def rows_of(paths: Sequence[Path]) -> list[Row]:
    """Rows of runs, each with a label that no other has: its name, with as many of the folders above it as that takes."""
    places = [path.resolve().parts for path in paths]
    labels = [""] * len(paths)
    for length in range(1, max(map(len, places), default=0) + 1):
        ends = Counter("/".join(place[-length:]) for place in places)
        for i, place in enumerate(places):
            end = "/".join(place[-length:])
            labels[i] = labels[i] or (end if ends[end] == 1 else "")
    return [Row(RunFolder(path), label or str(path)) for path, label in zip(paths, labels, strict=True)]


def check_names(rows: Iterable[Row], names: Iterable[str], option: str) -> None:
    """Raise UserError for a name that is no figure and no setting of any run; settings are read only where no figure has that name."""
    rows = list(rows)
    for name in names:
        if name in DEFAULT or any(name in row.figures for row in rows) or any(name in row.settings for row in rows):
            continue
        known = list(dict.fromkeys([*DEFAULT, *(key for row in rows for key in (*row.figures, *row.settings))]))
        near = get_close_matches(name[:100], known, n=3, cutoff=0.5)
        fix = f"the nearest: {', '.join(near)}" if near else "`--json` prints all names"
        raise UserError(f"{option} {shorten(name)}: no run here has a figure or a setting of that name; {fix}.")


@dataclass(frozen=True)
class Condition:
    """A filter, such as `optimizer.peak_lr>=1e-3`; `~` is true of text that contains the value."""

    name: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Raises UserError."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UserError(f"--where {shorten(text)} is no condition: write NAME, one of = != < <= > >= ~, and a value, as in loss<3.")
        return cls(match[1], match[2], match[3])

    def __call__(self, row: Row) -> bool:
        """True of a run that is listed. A run without the figure or setting is not, except for `!=`."""
        value = row[self.name]
        if value is None:
            return self.sign == "!="
        if self.sign == "~":
            return self.value.casefold() in _plain(value).casefold()
        if is_number(value):
            try:
                return _COMPARED[self.sign](value, float(self.value))
            except ValueError:
                raise UserError(f"--where {shorten(self.name)}: {show(self.value)} is no number, and {self.name} is one.") from None
        return _COMPARED[self.sign](_plain(value), self.value)


def sort_rows(rows: list[Row], name: str, *, descending: bool) -> list[Row]:
    """Numbers before text; last the runs without a value, or with one that is not finite."""

    def known(row: Row) -> bool:
        value = row[name]
        return value is not None and not (isinstance(value, float) and not math.isfinite(value))

    def key(row: Row) -> tuple[bool, float, str]:
        value = row[name]
        return (False, float(value), "") if is_number(value) else (True, 0.0, _plain(value))

    first = sorted(filter(known, rows), key=key, reverse=descending)
    return first + [row for row in rows if not known(row)]


def as_text(rows: Sequence[Row], columns: Sequence[str], *, asked: bool) -> str:
    """Aligned columns, a line a run. Of the default columns (`asked` is false) columns that no run fills are left out."""
    shown = [name for name in columns if asked or any(row[name] is not None for row in rows)]
    return aligned([list(shown), *([_cell(name, row[name]) for name in shown] for row in rows)])


def as_json(rows: Sequence[Row], columns: Sequence[str] | None, notes: Sequence[str]) -> str:
    """One object: `runs`, each with these columns, or with all figures and `settings`; and `notes` about folders."""
    runs = [
        {**row.figures, "settings": row.settings, "notes": row.notes} if columns is None else {name: row[name] for name in columns}
        for row in rows
    ]
    return ascii_json({"runs": runs, "notes": list(notes)})


def ascii_json(value: Any) -> str:
    """Strict JSON in which every character that a terminal could obey is an escape."""
    return json.dumps(json.loads(dumps(value)))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if is_number(value):
        if math.isnan(value):
            return "not finite"
        text = _TEXTS.get(name)
        return text(value) if text is not None else str(value) if isinstance(value, int) else figure(value)
    return shorten(printable(_plain(value)))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
