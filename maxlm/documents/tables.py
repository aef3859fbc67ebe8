"""Parquet and ArrayRecord: files that are read at any place, by libraries of their own."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow
from pyarrow import parquet, types

from maxlm.base.transient import is_transient
from maxlm.documents.formats import PARQUET
from maxlm.documents.json_records import of_json
from maxlm.documents.records import MIB, NESTED, DamagedError, Found, Record, Wanted, defect, record_of
from maxlm.documents.stream import Meter

BATCH_BYTES = 4 * MIB
MOST_ROWS = 64  # read at once: 64 records of the largest size fit in memory
T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Watched:
    """A file for pyarrow that remembers the error of its own last failed call: the storage's, not the library's about the bytes."""

    closed = False

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.error: Exception | None = None

    def read(self, count: int = -1) -> bytes:
        """Read `count` bytes, all that are left by default."""
        return self._remembering(self._raw.read, count)

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a place in the file."""
        return self._remembering(self._raw.seek, at, whence)

    def tell(self) -> int:
        """Place in the file."""
        return self._raw.tell()

    def close(self) -> None:
        """Leave the file open: whoever opened it closes it."""

    def _remembering(self, call: Callable[..., T], *arguments: int) -> T:
        try:
            return call(*arguments)
        except Exception as error:
            self.error = error
            raise

    def raise_storage_error(self) -> None:
        """Raise what storage failed with, unchanged. A ValueError that cannot pass is of the bytes, such as a place before the start."""
        if self.error is not None and (isinstance(self.error, OSError) or is_transient(self.error)):
            raise self.error


@contextlib.contextmanager
def local_copy(blocks: Iterable[bytes]) -> Iterator[Path]:
    """Write `blocks` to a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "copy")
        with path.open("wb") as copy:
            copy.writelines(blocks)
        yield path


def read_parquet(path: str, raw: BinaryIO, size: int, wanted: Wanted) -> Iterator[Found]:
    """The record of each row, counted from 1. A file without the text column, or with one of another type, is one Defect with its `rows`.

    Columns: the text, and what may be metadata; all where whole records are asked for.
    """
    raw.seek(max(0, size - 4))
    if raw.read(4) != PARQUET:
        raise DamagedError("truncated", "no footer of a Parquet file")
    raw.seek(0)
    watched, name = _Watched(raw), wanted.text_field
    try:
        with parquet.ParquetFile(watched, page_checksum_verification=True, buffer_size=MIB, pre_buffer=False) as table:
            schema, rows = table.schema_arrow, table.metadata.num_rows
            twice = sorted({one for one in schema.names if schema.names.count(one) > 1})
            if twice if name is None else name in twice:
                yield defect(0, "", "ambiguous_field", ", ".join(twice), rows=rows)
                return
            if name is not None and name not in schema.names:
                yield defect(0, "", "missing_field", ", ".join(schema.names), field=name, rows=rows)
                return
            if name is not None and not _is_text(kind := schema.field(name).type):
                yield defect(0, "", "not_text", str(kind), field=name, type=str(kind), rows=rows)
                return
            columns = [field.name for field in schema if name in (None, field.name) or (_is_metadata(field) and field.name not in twice)]
            yield from _rows(path, table, columns, size, wanted)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # ValueError: also names that are not UTF-8
        watched.raise_storage_error()
        raise DamagedError("damaged", f"Parquet: {error}") from error
    except OSError as error:
        watched.raise_storage_error()
        if error.errno is not None or is_transient(error):
            raise
        raise DamagedError("damaged", f"Parquet: {error}") from error  # of pyarrow: pages that break their format


def read_array_record(local: Path, size: int, wanted: Wanted) -> Iterator[Found]:
    """The record of each entry, counted from 1: JSON objects, which begin with `{`, or plain text. `size`: bytes as stored."""
    from array_record.python.array_record_module import ArrayRecordReader

    limit = wanted.limits.max_record_bytes
    try:
        reader = ArrayRecordReader(str(local), "readahead_buffer_size:0,max_parallelism:0")
        try:
            if not reader.ok():
                raise DamagedError("damaged", "no whole ArrayRecord file")
            count = reader.num_records()
            for start in range(0, count, MOST_ROWS):
                for number, data in enumerate(reader.read(start, min(start + MOST_ROWS, count)), start=start + 1):
                    if len(data) > limit:
                        yield defect(number, "record", "too_large", limit=limit)
                    else:
                        is_json = data[:1] == b"{" or wanted.text_field is None
                        found = of_json(number, "record", data, wanted) if is_json else Record(number, "record", data, {})
                        yield found._replace(place=size * number // count)
        finally:
            reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise DamagedError("damaged", f"ArrayRecord: {error}") from error


def _rows(path: str, table: Any, columns: list[str], size: int, wanted: Wanted) -> Iterator[Found]:
    meter = Meter(wanted.limits)
    meter.raw = size
    number = produced = 0
    for group in range(table.metadata.num_row_groups):
        info = table.metadata.row_group(group)
        rows = max(1, min(MOST_ROWS, BATCH_BYTES * info.num_rows // max(1, info.total_byte_size)))
        for batch in table.iter_batches(rows, row_groups=[group], columns=columns):
            produced += batch.nbytes
            meter.check(produced)
            for fields in _as_fields(path, batch, wanted.text_field):
                number += 1
                yield record_of(number, "row", fields, wanted)._replace(place=size * number // table.metadata.num_rows)


def _as_fields(path: str, batch: Any, text_field: str | None) -> list[dict[str, Any]]:
    """Rows of a batch. Text that is not UTF-8, which Parquet does not check, comes as bytes. A column of values that Python lacks, such as
    dates after the year 9999, is left out and named. Raises DamagedError if it may hold a conversation.
    """
    faults = (pyarrow.ArrowException, ValueError, OverflowError, KeyError)  # KeyError: a map with a key twice
    try:
        columns = {field.name: _values(batch.select([number]), text_field) for number, field in enumerate(batch.schema)}
    except faults:
        columns = {}
        for number, field in enumerate(batch.schema):
            part = batch.select([number])
            try:
                columns[field.name] = _values(part, text_field)
            except UnicodeDecodeError:
                if not (types.is_string(field.type) or types.is_large_string(field.type)):
                    raise
                data = part.column(0).cast(pyarrow.large_binary()).to_pylist()
                columns[field.name] = data if field.name == text_field else [value and value.decode("utf-8", "replace") for value in data]
            except faults as error:
                if field.name == text_field:
                    raise
                if text_field is None and not types.is_temporal(field.type):
                    raise DamagedError("foreign_value", f"column {field.name}: {error}") from error
                rule = "%s: the column %s is left out of the metadata of %d documents: %s"
                _log.warning(rule, path, field.name, batch.num_rows, error)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(part: Any, text_field: str | None) -> list[Any]:
    """Values of the one column of `part` as JSON has them: maps are objects. Of whole records, objects have no null fields, since a struct
    of Parquet has the fields of all rows.
    """
    kind = part.schema.field(0).type
    column = part.column(0).cast(pyarrow.timestamp("us", kind.tz), safe=False) if types.is_timestamp(kind) else part.column(0)
    values = cast("list[Any]", column.to_pylist(maps_as_pydicts="strict"))
    if text_field is not None or not types.is_nested(column.type):
        return values
    return [_without_nulls(column.type, value) for value in values]


def _without_nulls(kind: Any, value: Any) -> Any:
    """`value` of the type `kind` without the fields of structs that are null. A message keeps its content: templates test for it."""
    if value is None or not types.is_nested(kind):
        return value
    if types.is_struct(kind):
        kept = {"content"} if "role" in value else set()
        return {one.name: _without_nulls(one.type, value[one.name]) for one in kind if value[one.name] is not None or one.name in kept}
    if types.is_map(kind):
        return {key: _without_nulls(kind.item_type, item) for key, item in value.items()}
    return [_without_nulls(kind.value_type, item) for item in value] if isinstance(value, list) else value


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    strings = (types.is_string, types.is_large_string, types.is_string_view)
    tests = (*strings, types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null)
    return any(test(kind) for test in tests)


def _is_metadata(field: Any) -> bool:
    """True for columns of one value a row, and of objects named as metadata."""
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    times = (types.is_date, types.is_timestamp, types.is_time)
    return any(test(kind) for test in (*tests, *times)) or (field.name in NESTED and types.is_struct(kind))
