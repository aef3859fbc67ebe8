"""Parquet and ArrayRecord: files that are read at any place, by libraries of their own."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from maxlm.config.transient import is_transient
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.read.fields import of_fields
from maxlm.corpus.read.jsonl import of_json_or_text
from maxlm.corpus.read.problems import MIB, DamagedError, ReadSettings, removed
from maxlm.corpus.read.stream import Meter

BATCH_BYTES = 4 * MIB
MOST_ROWS = 64  # read at once: 64 records of the largest size fit in memory
T = TypeVar("T")
PARQUET = b"PAR1"
# Block header and chunk header at the start of every file (Riegeli's specification, "Records file format").
ARRAY_RECORD = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"


class _Watched:
    """A file for pyarrow that remembers the error of its own last failed call: the storage's, not the library's about the bytes."""

    closed = False

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.error: Exception | None = None

    def read(self, count: int = -1) -> bytes:
        return self._remembering(self._raw.read, count)

    def seek(self, at: int, whence: int = 0) -> int:
        return self._remembering(self._raw.seek, at, whence)

    def tell(self) -> int:
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
def local_copy(raw: BinaryIO) -> Iterator[Path]:
    """A temporary file with all that `raw` still holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "copy")
        with path.open("wb") as copy:
            shutil.copyfileobj(raw, copy, MIB)
        yield path


def read_parquet(path: str, raw: BinaryIO, size: int, settings: ReadSettings) -> Iterator[Document | Removed]:
    """The document of each row, counted from 1. A file without the text column, or with one of another type, is one Removed."""
    import pyarrow
    from pyarrow import parquet

    raw.seek(max(0, size - 4))
    if raw.read(4) != PARQUET:
        raise DamagedError("truncated", "no footer")
    raw.seek(0)
    watched = _Watched(raw)
    try:
        with parquet.ParquetFile(watched, page_checksum_verification=True, buffer_size=MIB, pre_buffer=False) as table:
            schema, rows = table.schema_arrow, table.metadata.num_rows
            if settings.text_field not in schema.names:
                yield removed(path, "missing_field", ", ".join(schema.names), field=settings.text_field, rows=rows)
                return
            kind = schema.field(settings.text_field).type
            if not _is_text(kind):
                yield removed(path, "not_text", str(kind), field=settings.text_field, rows=rows)
                return
            columns = [
                name for name, found in zip(schema.names, schema.types, strict=True) if _is_scalar(found) or name == settings.text_field
            ]
            yield from _rows(path, table, columns, size, settings)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # ValueError: also names that are not UTF-8
        watched.raise_storage_error()
        raise DamagedError("damaged", error) from error
    except OSError as error:
        watched.raise_storage_error()
        if error.errno is not None or is_transient(error):
            raise
        raise DamagedError("damaged", error) from error  # of pyarrow: pages that break their format


def read_array_record(path: str, local: Path, settings: ReadSettings) -> Iterator[Document | Removed]:
    """The document of each record, counted from 1: JSON objects with the text field, or plain text."""
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(local), "readahead_buffer_size:0,max_parallelism:0")
        try:
            if not reader.ok():
                raise DamagedError("damaged", "no whole ArrayRecord file")
            count = reader.num_records()
            for start in range(0, count, MOST_ROWS):
                for number, data in enumerate(reader.read(start, min(start + MOST_ROWS, count)), start=start + 1):
                    if len(data) > settings.max_record_bytes:
                        yield removed(f"{path}#{number}", "too_large", limit=settings.max_record_bytes)
                    else:
                        yield of_json_or_text(f"{path}#{number}", data, settings)
        finally:
            reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise DamagedError("damaged", error) from error


def _rows(path: str, table: Any, columns: list[str], size: int, settings: ReadSettings) -> Iterator[Document | Removed]:
    meter = Meter(settings)
    meter.raw = size
    number = produced = 0
    for group in range(table.metadata.num_row_groups):
        info = table.metadata.row_group(group)
        rows = max(1, min(MOST_ROWS, BATCH_BYTES * info.num_rows // max(1, info.total_byte_size)))
        for batch in table.iter_batches(rows, row_groups=[group], columns=columns):
            produced += batch.nbytes
            meter.check(produced)
            for fields in _as_fields(batch, settings.text_field):
                number += 1
                text = fields[settings.text_field]
                if text is not None and len(text) > settings.max_record_bytes:
                    yield removed(f"{path}#{number}", "too_large", limit=settings.max_record_bytes)
                else:
                    yield of_fields(f"{path}#{number}", fields, settings)


def _as_fields(batch: Any, text_field: str) -> list[dict[str, Any]]:
    """Rows of a batch. Text that is not UTF-8, which Parquet does not check, comes as bytes."""
    import pyarrow

    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        columns = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                data = column.cast(pyarrow.large_binary()).to_pylist()
                columns[name] = data if name == text_field else [_decoded(value) for value in data]
            else:
                columns[name] = column.to_pylist()
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary, types.is_null)
    return any(test(kind) for test in tests)


def _is_scalar(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in (*tests, types.is_date, types.is_timestamp, types.is_time))
