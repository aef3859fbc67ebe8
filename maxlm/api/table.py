"""A table of records: a sequence of dicts that also has columns."""

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from maxlm.base.errors import UserError, printable

SHOWN = 12  # rows and columns of a table in a notebook


class Table(Sequence[Mapping[str, Any]]):
    """Rows by number, columns by name: `table[0]`, `table[-1]["loss"]`, `table["loss"]`; `table.to_pandas()` if pandas is installed."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = list(rows)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    @overload
    def __getitem__(self, key: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Table": ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> "Mapping[str, Any] | Table | list[Any]":
        """A row, a table of some rows, or a column: None in rows without it. Raises KeyError for an unknown column."""
        if isinstance(key, str):
            if not any(key in row for row in self._rows):
                raise KeyError(f"{key}: the columns are {', '.join(self.columns) or 'none'}")
            return [row.get(key) for row in self._rows]
        return Table(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises UserError if pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise UserError("to_pandas needs pandas: pip install pandas; table[name] is a column without it.") from None
        return pandas.DataFrame(self._rows, columns=self.columns)

    def __repr__(self) -> str:
        names = printable(", ".join(self.columns[:SHOWN]))
        return f"Table({len(self):,} rows: {names}{' ...' if len(self.columns) > SHOWN else ''})"

    def _repr_html_(self) -> str:
        """The table in a notebook: its last rows."""
        names, rows = self.columns[:SHOWN], self._rows[-SHOWN:]
        cell = lambda value: f"{value:.5g}" if isinstance(value, float) else "" if value is None else html.escape(str(value)[:60])  # noqa: E731
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{cell(row.get(name))}</td>' for name in names)}</tr>" for row in rows)
        note = f"<p>the last {len(rows)} of {len(self):,} rows, {len(names)} of {len(self.columns)} columns</p>"
        return f"<table><tr>{head}</tr>{body}</table>{note}"
