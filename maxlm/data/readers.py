"""The documents in one file: text, JSONL (both also .gz and .zst), Parquet, ArrayRecord."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from maxlm.config.errors import UserError

JSONL = (".jsonl", ".ndjson")
ARRAY_RECORD = (".arrayrecord", ".array_record")
RECORDS_AT_ONCE = 256
BLOCK = 2**20


class Document(NamedTuple):
    """One document, never empty."""

    text: str
    origin: str  # its file, with line, row or record: for error messages
    bytes_read: int  # of the sources, up to and including it, about


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file in order, empty ones left out; its name's ending says what it is, anything else being text.

    Raises:
        UserError: the file is not what its name says, is damaged, or lacks `text_field`.
    """
    kind = path.with_suffix("").suffix if path.suffix in (".gz", ".zst") else path.suffix
    if kind in JSONL:
        reader = _jsonl(path, text_field)
    elif path.suffix == ".parquet":
        reader = _parquet(path, text_field)
    elif path.suffix in ARRAY_RECORD:
        reader = _array_record(path, text_field)
    else:
        reader = _text(path)
    try:
        for document in reader:
            if document.text:
                yield document
    except OSError as error:  # gzip's complaints are OSErrors too
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged or cut short: {error}.") from error


def text_of(content: bytes, origin: str) -> str:
    """`content` as UTF-8 text; a UserError naming `origin` where it is something else."""
    if b"\0" in content:
        raise UserError(f"{origin} is not text: byte {content.index(0)} is NUL; leave it out of data.prepare.sources.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8 text: byte {error.start} is wrong; convert it or leave it out.") from error


def _text(path: Path) -> Iterator[Document]:
    with path.open("rb") as raw, _opened(path, raw) as stream:
        content = stream.read()
    yield Document(text_of(content, str(path)), str(path), path.stat().st_size)


def _jsonl(path: Path, text_field: str) -> Iterator[Document]:
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty.")
    with path.open("rb") as raw, _opened(path, raw) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                origin = f"{path}, line {number}"
                yield Document(_field_of_json(line, text_field, origin), origin, raw.tell())


def _field_of_json(content: bytes, text_field: str, origin: str) -> str:
    """The text in one JSON object."""
    try:
        record = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{origin} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise UserError(f"{origin} is a JSON {type(record).__name__}, not an object with the field {text_field}.")
    if text_field not in record:
        raise _missing(text_field, origin, list(record))
    return _checked(record[text_field], text_field, origin)


def _missing(text_field: str, origin: str, fields: list[str]) -> UserError:
    return UserError(f"{origin} has no field {text_field}; set data.prepare.text_field to one of its fields: {', '.join(fields[:12])}.")


def _checked(value: Any, text_field: str, origin: str) -> str:
    """`value` if it is a text that UTF-8 can hold."""
    if value is None:
        raise UserError(f"{origin}: the field {text_field} is null; take such rows out of the file, or give them an empty text.")
    if not isinstance(value, str):
        raise UserError(f"{origin}: the field {text_field} is a {type(value).__name__}, not text; set data.prepare.text_field.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: the field {text_field} holds half a surrogate pair at character {error.start}.") from error
    return value


def _parquet(path: Path, text_field: str) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            if text_field not in file.schema_arrow.names:
                raise _missing(text_field, str(path), file.schema_arrow.names)
            rows, size, row = file.metadata.num_rows, path.stat().st_size, 0
            for batch in file.iter_batches(RECORDS_AT_ONCE, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    origin = f"{path}, row {row}"
                    yield Document(_checked(value, text_field, origin), origin, size * row // rows)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is not a whole Parquet file: {str(error).rstrip('.')}.") from error


def _array_record(path: Path, text_field: str) -> Iterator[Document]:
    """Records are JSON objects with `text_field`, or else text as it stands."""
    from array_record.python.array_record_module import ArrayRecordReader

    size, row = path.stat().st_size, 0
    if size == 0:
        raise UserError(f"{path} is empty.")
    try:
        reader = ArrayRecordReader(str(path))
        try:
            if not reader.ok():
                raise UserError(f"{path} is not a whole ArrayRecord file.")
            rows = reader.num_records()
            for start in range(0, rows, RECORDS_AT_ONCE):
                for content in reader.read(start, min(start + RECORDS_AT_ONCE, rows)):
                    row += 1
                    origin = f"{path}, record {row}"
                    text = _field_of_json(content, text_field, origin) if content.startswith(b"{") else text_of(content, origin)
                    yield Document(text, origin, size * row // rows)
        finally:
            reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{path} is not a whole ArrayRecord file: {error}.") from error


def _opened(path: Path, raw: BinaryIO) -> BinaryIO:
    """What `raw`, the file at `path`, holds, decompressed as its name says."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(raw, path), BLOCK)
    return raw


class _Zstandard(io.RawIOBase):
    """A decompressing stream that notices a frame cut short (zstandard's own reader ends there without a word)."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        import zstandard

        self._raw, self._path, self._error = raw, path, zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame, self._input, self._output = self._new(), b"", memoryview(b"")
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(BLOCK)
            if not self._input:
                if self._begun:
                    raise UserError(f"{self._path} is damaged or cut short: its last zstd frame has no end.")
                return 0
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise UserError(f"{self._path} is not zstd data, or damaged: {error}.") from error
            self._begun = not self._frame.eof
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._new()
        size = min(len(self._output), len(buffer))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
