"""CSV and TSV with a header (RFC 4180): a record a row; a malformed row costs no other row."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

from maxlm.documents.json_records import lines_of
from maxlm.documents.records import DamagedError, Defect, Found, Wanted, defect, record_of
from maxlm.documents.stream import ByteStream

UNIT = "line"
_SURROGATE = re.compile("[\ud800-\udfff]")


class _TooLargeError(Exception):
    """A row is longer than the limit: one without its closing quote takes what follows for its text."""


class _Lines:
    """Lines of a file for csv.reader, which may go on after an error. `number`: of the last one, from 1; `size`: bytes since it was 0."""

    def __init__(self, stream: ByteStream, limit: int) -> None:
        self._lines = (line for lines in lines_of(stream, limit) for line in lines)
        self._limit, self.number, self.size = limit, 0, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.size += len(line) if line is not None else self._limit
        if line is None or self.size > self._limit:
            raise _TooLargeError
        return line.decode("utf-8", "surrogateescape") + "\n"


def read_csv(stream: ByteStream, wanted: Wanted, delimiter: str) -> Iterator[Found]:
    """The record of every row that is not blank, numbered by its first line; the first row names the fields. All values are texts, and
    empty ones are absent, but for the text. A file without the text's column is one Defect with its `rows`; so is a row with a wrong
    quote or another number of fields, by itself.
    """
    name, rows = wanted.text_field, _rows(stream, wanted.limits.max_record_bytes, delimiter)
    header = next(rows, (0, []))
    if isinstance(header, Defect):
        raise DamagedError("damaged", f"its first row names no fields: {header.example or header.reason}")
    names = header[1]
    twice = sorted(one for one, count in Counter(names).items() if count > 1)
    missing = name is not None and name not in names
    if missing or (twice if name is None else name in twice):
        count = sum(not isinstance(row, Defect) for row in rows)
        fault, shown = ("missing_field", names) if missing else ("ambiguous_field", twice)
        yield defect(0, "", fault, ", ".join(shown), field=name or "", rows=count)
        return
    for row in rows:
        if isinstance(row, Defect):
            yield row
        elif len(row[1]) != len(names):
            problem = f"{len(row[1])} fields, and the first row names {len(names)}"
            yield defect(row[0], UNIT, "malformed", problem, error=problem)
        else:
            yield _record(row[0], {key: text for key, text in zip(names, row[1], strict=True) if key not in twice}, wanted)


def _record(number: int, values: dict[str, str], wanted: Wanted) -> Found:
    """The record of a row. Values that are not UTF-8 hold their bytes as surrogates: a text goes on as bytes, of which others decode it."""
    fields: dict[str, str | bytes] = {}
    for name, value in values.items():
        if not value.isascii() and _SURROGATE.search(value):
            if wanted.text_field is None:
                return defect(number, UNIT, "encoding", value)
            data = value.encode("utf-8", "surrogateescape")
            fields[name] = data if name == wanted.text_field else data.decode("utf-8", "replace")
        elif value or name == wanted.text_field:
            fields[name] = value
    return record_of(number, UNIT, fields, wanted)


def _rows(stream: ByteStream, limit: int, delimiter: str) -> Iterator[tuple[int, list[str]] | Defect]:
    """First line and values of each row that is not blank. Raises DamagedError: the file ends within quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), limit + 1))  # of this process; _Lines ends a longer row before
    lines = _Lines(stream, limit)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        first, lines.size = lines.number + 1, 0
        try:
            values = next(rows)
        except StopIteration:
            return
        except _TooLargeError:
            yield defect(first, UNIT, "too_large", limit=limit)
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                raise DamagedError("truncated", f"within the quotes of the row at line {first}") from error
            yield defect(first, UNIT, "malformed", str(error), error=str(error))
        else:
            if values:
                yield first, values


read_commas = partial(read_csv, delimiter=",")
read_tabs = partial(read_csv, delimiter="\t")
