"""One SELECT over runs by DuckDB, in memory: it reads no files, reaches no network, loads nothing, and its time and memory are bounded."""

import csv
import importlib.util
import io
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from maxlm.base.errors import UserError, printable, shorten
from maxlm.base.host import host_memory
from maxlm.base.installing import install_command
from maxlm.telemetry.runs.listing import Row, aligned, ascii_json

if TYPE_CHECKING:
    import duckdb

MEMORY_SHARE = 0.5  # of this machine's
LONGEST = 100_000  # characters of a query
SHOWN_ROWS = 1000  # of a table on the terminal
MOST_NOTES = 5
MOST_CELL = 200  # characters of a cell there
_FETCH = 1000
_ALL = re.compile(r"query|information_schema|duckdb_|show|pragma", re.IGNORECASE)  # may need tables that it does not name
_START = {  # before the tables are made
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",  # a name in SQL is no variable of this program
    "temp_directory": "",  # nothing is written to disk
}
_THEN = ("SET enable_external_access=false", "SET lock_configuration=true")


def check_installed() -> None:
    """Raise UserError without the package."""
    spec = importlib.util.find_spec("duckdb")
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise UserError(f"maxlm query needs DuckDB, which is not installed: run {install_command('query')}.")


def answer(sql: str, rows: Sequence[Row], notes: list[str], *, form: str, timeout_s: float) -> Iterator[str]:
    """Lines of the result of `sql` as `text`, `json` or `csv`. Adds to `notes` what could not be read. Raises UserError."""
    import duckdb

    from maxlm.telemetry.runs.tables import COLUMNS, Tables

    if len(sql) > LONGEST or "\0" in sql:
        raise UserError(f"the query is longer than {LONGEST:,} characters, or holds a NUL: shorten it.")
    memory = int((host_memory() or 2**34) * MEMORY_SHARE)
    with duckdb.connect(":memory:", config={**_START, "memory_limit": f"{memory}B"}) as connection:
        _check_single(connection, sql)
        try:
            named = [table for table in COLUMNS if _ALL.search(sql) or re.search(rf"\b{table}\b", sql, re.IGNORECASE)]
            Tables(connection).fill(rows, named)
            for statement in _THEN:
                connection.execute(statement)
            notes += some_notes([f"{printable(row.label)}: {note}" for row in rows for note in row.failed + row.folder.damaged])
            connection.execute("BEGIN TRANSACTION READ ONLY")
            with _Limit(connection, timeout_s):
                connection.execute(sql)
                yield from _FORMS[form](_names(connection), _fetched(connection), notes)
        except duckdb.OutOfMemoryException:
            raise UserError(
                f"the query or the tables it names need more than {memory / 2**30:.3g} GiB, half of this machine's memory: name fewer runs."
            ) from None
        except duckdb.InterruptException:
            raise UserError(
                f"the query took longer than {timeout_s:g} s and was stopped: narrow it, or give more with --timeout."
            ) from None
        except duckdb.PermissionException:
            raise UserError(
                f"a query reads no file, reaches no network and loads nothing; it has the tables {', '.join(COLUMNS)}."
            ) from None
        except (duckdb.Error, ImportError, ValueError, OverflowError) as error:
            raise UserError(_sentence(error)) from None


def some_notes(notes: list[str]) -> list[str]:
    """The first few notes, and the number of others."""
    more = len(notes) - MOST_NOTES
    return notes if more <= 0 else [*notes[:MOST_NOTES], f"{more:,} more notes: `maxlm runs` has them."]


def _check_single(connection: "duckdb.DuckDBPyConnection", sql: str) -> None:
    """Raise UserError unless `sql` is one SELECT."""
    import duckdb

    try:
        found = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise UserError(_sentence(error)) from None
    kinds = [str(statement.type).rpartition(".")[2] for statement in found]
    if kinds != ["SELECT"]:
        holds = "no statement" if not kinds else f"{len(kinds)} statements" if len(kinds) > 1 else f"a statement {kinds[0]}"
        example = 'one such as "select run, min(loss) from metrics group by run"'
        raise UserError(f"a query is one SELECT, and this is {holds}: write {example}.")


class _Limit:
    """Interrupts the connection's statement after some seconds."""

    def __init__(self, connection: "duckdb.DuckDBPyConnection", seconds: float) -> None:
        self._timer = threading.Timer(seconds, connection.interrupt)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _sentence(error: Exception) -> str:
    """First line of an error of DuckDB, and where to look."""
    import duckdb

    first = " ".join(line for line in str(error).split("\n\n")[0].splitlines() if line.strip())
    unknown = isinstance(error, duckdb.BinderException | duckdb.CatalogException)
    return f"query: {shorten(first)}" + (' (`maxlm query "describe metrics"` lists the columns of a table).' if unknown else "")


def _names(connection: "duckdb.DuckDBPyConnection") -> list[str]:
    """Names of the result's columns; a second one of the same name gets a number."""
    names: list[str] = []
    for column in connection.description or ():
        name, number = str(column[0]), 2
        while name in names:
            name, number = f"{column[0]}_{number}", number + 1
        names.append(name)
    return names


def _fetched(connection: "duckdb.DuckDBPyConnection") -> Iterator[tuple[Any, ...]]:
    while batch := connection.fetchmany(_FETCH):
        yield from batch


def _as_text(names: Sequence[str], rows: Iterator[tuple[Any, ...]], notes: list[str]) -> Iterator[str]:
    shown = [[_cell(value) for value in row] for row in islice(rows, SHOWN_ROWS)]
    yield aligned([[printable(name) for name in names], *shown])
    more = next(rows, None) is not None
    if more:
        notes.append(f"only the first {SHOWN_ROWS:,} rows are shown: --csv and --json print all.")


def _as_csv(names: Sequence[str], rows: Iterator[tuple[Any, ...]], notes: list[str]) -> Iterator[str]:
    yield _csv_line(names)
    for row in rows:
        yield _csv_line(["" if value is None else _text(_plain(value)) for value in row])


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(printable, cells))
    return text.getvalue()


def _as_json(names: Sequence[str], rows: Iterator[tuple[Any, ...]], notes: list[str]) -> Iterator[str]:
    yield '{"rows": ['
    before = ""
    for row in rows:
        yield before + ascii_json(dict(zip(names, map(_plain, row), strict=True)))
        before = ","
    yield f'], "notes": {ascii_json(notes)}}}'


_FORMS = {"text": _as_text, "csv": _as_csv, "json": _as_json}


def _plain(value: Any) -> Any:
    """A value as JSON has it; dates, times, bytes and the like as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ascii_json(value)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(_text(_plain(value)))
    return text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 3]}..."
