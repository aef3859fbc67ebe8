"""Runs as tables of DuckDB: runs, configs, metrics, events, evaluations and checkpoints, each with the column `run`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from maxlm.base.strict_json import dumps, encodable, is_number
from maxlm.telemetry.course import surviving
from maxlm.telemetry.observer import StepRecord
from maxlm.telemetry.runs.listing import Row

if TYPE_CHECKING:
    import duckdb

BATCH = 20_000  # rows that are held in memory as Python objects
MOST_COLUMNS = 2000  # of a table: a damaged file could name any number of figures
_LARGEST_INTEGER = 2**63 - 1
_FIGURES = {one.name: "DOUBLE" for one in fields(StepRecord) if one.name not in ("step", "tokens", "extra", "balance", "declared")}
COLUMNS: dict[str, dict[str, str]] = {  # that each table has, whatever the runs hold
    "runs": {"run": "VARCHAR", "path": "VARCHAR", "state": "VARCHAR", "note": "VARCHAR", "step": "BIGINT", "steps": "BIGINT"},
    "configs": {"run": "VARCHAR", "path": "VARCHAR", "version": "VARCHAR"},
    "metrics": {"run": "VARCHAR", "step": "BIGINT", "tokens": "BIGINT", **_FIGURES},
    "events": {
        **{"run": "VARCHAR", "step": "BIGINT", "time": "DOUBLE", "kind": "VARCHAR", "reason": "VARCHAR", "cause": "VARCHAR"},
        **{"undone": "BOOLEAN", "data": "JSON"},
    },
    "evaluations": {"run": "VARCHAR", "step": "BIGINT", "name": "VARCHAR", "value": "DOUBLE", "time": "DOUBLE"},
    "checkpoints": {"run": "VARCHAR", "step": "BIGINT", "path": "VARCHAR"},
}
_RENAMED = {"run": "run_settings"}  # sections of a config that have the name of another column


class Tables:
    """Tables of a connection. Columns are added as rows bring them: numbers are DOUBLE, text is VARCHAR, everything else JSON as text."""

    def __init__(self, connection: "duckdb.DuckDBPyConnection") -> None:
        self._connection = connection
        self._columns: dict[str, dict[str, str]] = {}  # table -> column in lower case -> type
        for table, columns in COLUMNS.items():
            described = ", ".join(f"{_name(column)} {kind}" for column, kind in columns.items())
            connection.execute(f"CREATE TABLE {table} ({described})")
            self._columns[table] = dict(columns)

    def fill(self, rows: Sequence[Row], tables: Iterable[str]) -> None:
        """Read the runs into these tables. What cannot be read of a run becomes a note in its row."""
        for table in (name for name in tables if name != "configs"):
            for row in rows:
                row.tried(lambda row=row, table=table: self._add(table, row.label, _ROWS[table](row)), None)  # type: ignore[misc]
        if "configs" in tables:
            self._configs(rows)

    def _add(self, table: str, run: str, rows: Iterator[Mapping[str, Any]]) -> None:
        last, rises = -1, True
        while batch := list(islice(rows, BATCH)):
            columns: dict[str, list[Any]] = {}
            names = self._names(table, batch)
            for key, name in names.items():
                columns[name] = [row.get(key) for row in batch]
            columns["run"] = [run] * len(batch)
            self._insert(table, columns)
            if table == "metrics":
                for step in columns["step"]:
                    rises, last = rises and step > last, step
        if not rises:  # of several records of a step the last one counts
            self._connection.execute(
                "DELETE FROM metrics WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER "
                "(PARTITION BY step ORDER BY rowid DESC) AS place FROM metrics WHERE run = ?) WHERE place > 1)",
                [encodable(run)],
            )

    def _names(self, table: str, batch: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Key of the rows -> column, in lower case: DuckDB tells names apart by their letters alone. More than it takes are left out."""
        found: dict[str, str] = {}
        for key in dict.fromkeys(key for row in batch for key in row):
            name = encodable(str(key)).replace("\0", "").lower()
            known = name in self._columns[table] or len(self._columns[table]) + len(found) < MOST_COLUMNS
            if name and name != "run" and name not in found.values() and known:
                found[key] = name
        return found

    def _insert(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        arrays: dict[str, pa.Array] = {}
        for name, values in columns.items():
            kind = self._columns[table].get(name) or _kind(values)
            if kind is None:  # nothing but null so far
                continue
            arrays[name] = _array(values, kind)
            if name not in self._columns[table]:
                self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {_name(name)} {kind}")
                self._columns[table][name] = kind
        self._connection.register("batch", pa.table(arrays))
        self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")  # noqa: S608 -- a name of ours
        self._connection.unregister("batch")

    def _configs(self, rows: Sequence[Row]) -> None:
        """A column for each section, with its settings as fields: `select run, optimizer.peak_lr from configs`."""
        configs = [(row, {_RENAMED.get(key, key): value for key, value in row.config.items()}) for row in rows]
        shape: Any = {}
        for _, config in configs:
            shape = _joined(shape, _shape(config))
        table = {
            "run": [encodable(row.label) for row, _ in configs],
            "path": [encodable(str(row.folder.path)) for row, _ in configs],
            "version": [row.folder.version if config else None for row, config in configs],
            "settings": [dumps(config) for _, config in configs],
        }
        self._connection.register("batch", pa.table({name: pa.array(values, pa.string()) for name, values in table.items()}))
        sections = "unnest(json_transform(settings, ?))" if shape else "NULL AS settings"
        self._connection.execute("DROP TABLE configs")
        self._connection.execute(
            f"CREATE TABLE configs AS SELECT run, path, version, {sections} FROM batch",  # noqa: S608 -- nothing from outside
            [dumps(_written(shape))] if shape else [],
        )
        self._connection.unregister("batch")


def _metrics(row: Row) -> Iterator[Mapping[str, Any]]:
    return row.folder.records()


def _events(row: Row) -> Iterator[Mapping[str, Any]]:
    count = {id(event) for event in surviving(row.folder.events)}
    for event in row.folder.events:
        texts = {name: _text(event.data.get(name)) for name in ("reason", "cause")}
        known = {"step": event.step, "time": event.time, "kind": event.kind, "undone": id(event) not in count}
        yield {**known, **texts, "data": dumps(dict(event.data))}


def _evaluations(row: Row) -> Iterator[Mapping[str, Any]]:
    return (one._asdict() for one in row.folder.evaluations)


def _checkpoints(row: Row) -> Iterator[Mapping[str, Any]]:
    for step in row.folder.checkpoints:
        yield {"step": step, "path": str(row.folder.files.checkpoints / str(step))}


def _runs(row: Row) -> Iterator[Mapping[str, Any]]:
    yield {**row.figures, "note": row["note"]}


_ROWS = {"runs": _runs, "metrics": _metrics, "events": _events, "evaluations": _evaluations, "checkpoints": _checkpoints}


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else dumps(value)


def _kind(values: Sequence[Any]) -> str | None:
    """Type of a new column; None if all values are null."""
    known = [value for value in values if value is not None]
    return None if not known else "DOUBLE" if all(map(_is_numeric, known)) else "VARCHAR"


def _is_numeric(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _array(values: Sequence[Any], kind: str) -> pa.Array:
    """Values as a column of this type; a value of another type, and a number that is not finite, is null."""
    if kind == "BIGINT":
        whole = (value if isinstance(value, int) and abs(value) <= _LARGEST_INTEGER else None for value in values)
        return pa.array(whole, pa.int64())
    if kind == "DOUBLE":
        return pa.array((float(v) if _is_numeric(v) and math.isfinite(v) else None for v in values), pa.float64())
    if kind == "BOOLEAN":
        return pa.array((v if isinstance(v, bool) else None for v in values), pa.bool_())
    return pa.array((None if v is None else encodable(_text(v) or "") for v in values), pa.string())


_SCALARS = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR"}


def _shape(value: Any) -> Any:
    """Type of a value as `json_transform` writes it; None for null and for an empty section. Of names that differ by case alone the first
    is taken.
    """
    if isinstance(value, Mapping) and not value:
        return None
    if isinstance(value, Mapping):
        first: dict[str, str] = {}
        for key in value:
            first.setdefault(str(key).lower(), key)
        return {key: _shape(value[key]) for key in first.values()}
    return None if value is None else _SCALARS.get(type(value), "JSON")


def _joined(a: Any, b: Any) -> Any:
    """Type that holds values of both types."""
    if a is None or b is None or a == b:
        return b if a is None else a
    if isinstance(a, dict) and isinstance(b, dict):
        names = {key.lower(): key for key in a}
        joined = dict(a)
        for key, kind in b.items():
            name = names.setdefault(key.lower(), key)
            joined[name] = _joined(joined.get(name), kind)
        return joined
    if isinstance(a, dict) or isinstance(b, dict) or "JSON" in (a, b):
        return "JSON"
    return "DOUBLE" if {a, b} == {"BIGINT", "DOUBLE"} else "VARCHAR"


def _written(shape: Any) -> Any:
    """The type with JSON where all values are null."""
    return {key: _written(kind) for key, kind in shape.items()} if isinstance(shape, dict) else shape or "JSON"
