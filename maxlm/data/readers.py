"""Documents of source files: text, JSONL (both also .gz and .zst), Parquet, ArrayRecord."""

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from maxlm.config.errors import UserError
from maxlm.config.transient import is_transient
from maxlm.data.metadata import NESTED, About, about
from maxlm.data.sources import FIELD, SourceFile, reading, text_of

JSONL = (".jsonl", ".ndjson")
ARRAY_RECORD = (".arrayrecord", ".array_record")
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
RECORDS_AT_ONCE = 256
BLOCK = 2**20
_log = logging.getLogger(__name__)


class Document(NamedTuple):
    """One document, never empty."""

    text: str
    origin: str  # its file, with line, row or record: for error messages
    bytes_read: int  # of the sources, up to and including it, about
    about: About


class Fields(NamedTuple):
    """Fields of a record. `text`: None for conversations, which are whole lines of JSONL; `content`: those that are not metadata."""

    text: str | None
    content: frozenset[str]

    @classmethod
    def of_text(cls, name: str) -> "Fields":
        """Those of texts in the field `name`."""
        return cls(name, frozenset({name}))


def documents_in(files: Sequence[SourceFile], fields: Fields) -> Iterator[Document]:
    """Every document of `files` with text in it, in order. A file of text is one document.

    Raises UserError: a file is missing, foreign or damaged (named, with its line or record), or a source has no text.
    """
    done, count = 0, 0
    for number, file in enumerate(files):
        for document in read_documents(file, fields):
            count += 1
            yield document._replace(bytes_read=done + document.bytes_read)
        done += file.size
        if number + 1 == len(files) or files[number + 1].source != file.source:
            if count == 0:
                raise UserError(f"{FIELD}: {file.source} has no text in it; give it some or take it out.")
            count = 0


def read_documents(file: SourceFile, fields: Fields) -> Iterator[Document]:
    """The documents of one file in order, empty ones left out. The ending of its name states the format; any other is text.

    Raises UserError: the file is not what its name says, is damaged, lacks the field of the text, or is no JSONL where that is None.
    """
    suffix, *before = [*reversed(file.suffixes), ""]
    kind = before[0] if suffix in COMPRESSION and before else suffix
    if kind in JSONL:
        documents = _jsonl(file, fields)
    elif fields.text is None:
        raise UserError(f"{file.path}: conversations are read from JSONL (.jsonl, .ndjson; also .gz, .zst); convert it, or leave it out.")
    elif suffix == ".parquet":
        documents = _parquet(file, fields)
    elif suffix in ARRAY_RECORD:
        documents = _array_record(file, fields)
    else:
        documents = _text(file)
    with reading(file.path):
        try:
            yield from (document for document in documents if document.text)
        except OSError as error:
            if suffix not in COMPRESSION or error.errno is not None:
                raise
            raise UserError(f"{file.path} is not whole {COMPRESSION[suffix]} data: {error}.") from error


def _text(file: SourceFile) -> Iterator[Document]:
    with file.open() as raw, _decompressed(file, raw) as stream:
        content = stream.read()
    yield Document(text_of(content, file.path), file.path, file.size, About(file.name, {}))


def _decompressed(file: SourceFile, raw: BinaryIO) -> BinaryIO:
    """`raw`, the content of `file`, decompressed if its name says so. A stream that is cut short raises OSError."""
    suffix = file.suffixes[-1] if file.suffixes else ""
    if suffix not in COMPRESSION:
        return raw
    import pyarrow  # zstandard's own reader takes a frame that is cut short for whole

    return io.BufferedReader(cast(io.RawIOBase, pyarrow.CompressedInputStream(raw, COMPRESSION[suffix])), BLOCK)


def _jsonl(file: SourceFile, fields: Fields) -> Iterator[Document]:
    with file.open() as raw, _decompressed(file, raw) as stream:
        number = 0
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                origin = f"{file.path}, line {number}"
                whole = text_of(line, origin) if fields.text is None else ""
                record = fields_of(whole or line, origin)
                text = whole or _field(record, str(fields.text), origin)
                yield Document(text, origin, raw.tell(), about(f"{file.name}#{number}", record, fields.content))
        if number == 0:
            raise UserError(f"{file.path} is empty.")


def fields_of(content: bytes | str, origin: str) -> dict[str, Any]:
    """One JSON object. Raises UserError naming `origin` if it is none."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or an integer of thousands of digits
        raise UserError(f"{origin} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise UserError(f"{origin} is a JSON {type(record).__name__}, not an object.")
    return record


def _field(record: dict[str, Any], text_field: str, origin: str) -> str:
    """The text of a JSON object."""
    if text_field not in record:
        raise _missing(text_field, origin, list(record))
    return _checked(record[text_field], text_field, origin)


def _missing(text_field: str, origin: str, fields: list[str]) -> UserError:
    return UserError(f"{origin} has no field {text_field}; set data.prepare.text_field to one of its fields: {', '.join(fields[:12])}.")


def _checked(value: Any, text_field: str, origin: str) -> str:
    """`value` if it is text that UTF-8 can encode."""
    if value is None:
        raise UserError(f"{origin}: the field {text_field} is null; take such rows out of the file, or give them an empty text.")
    if not isinstance(value, str):
        raise UserError(f"{origin}: the field {text_field} is a {type(value).__name__}, not text; set data.prepare.text_field.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: the field {text_field} holds half a surrogate pair at character {error.start}.") from error
    return value


def _parquet(file: SourceFile, fields: Fields) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    assert fields.text is not None, "conversations are JSONL"
    try:
        with file.open() as raw, parquet.ParquetFile(raw, page_checksum_verification=True) as table:
            if fields.text not in table.schema_arrow.names:
                raise _missing(fields.text, file.path, table.schema_arrow.names)
            rows, row = table.metadata.num_rows, 0
            for batch in table.iter_batches(RECORDS_AT_ONCE, columns=_columns(table.schema_arrow, fields.text)):
                for record in _records(batch, fields.text, file.path):
                    row += 1
                    origin = f"{file.path}, row {row}"
                    text = _checked(record[fields.text], fields.text, origin)
                    yield Document(text, origin, file.size * row // rows, about(f"{file.name}#{row}", record, fields.content))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if is_transient(error):
            raise
        raise UserError(f"{file.path} is not a whole Parquet file: {str(error).rstrip('.')}.") from error


def _records(batch: Any, text_field: str, path: str) -> list[dict[str, Any]]:
    """The rows of a batch. A column beside the text that Python has no values for, as a date after the year 9999, is left out and named."""
    import pyarrow

    try:
        return batch.cast(_in_microseconds(batch.schema), safe=False).to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError):
        columns: dict[str, list[Any]] = {}
        for number, field in enumerate(batch.schema):
            part = batch.select([number])
            try:
                columns[field.name] = [row[field.name] for row in part.cast(_in_microseconds(part.schema), safe=False).to_pylist()]
            except (pyarrow.ArrowException, ValueError, OverflowError) as error:
                if field.name == text_field:
                    raise
                text = "%s: the column %s is left out of the metadata of %d documents: %s"
                _log.warning(text, path, field.name, batch.num_rows, error)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns(schema: Any, text_field: str) -> list[str]:
    """The columns of a Parquet file that are the text, or may be metadata: those of one value a row, and `metadata`."""
    from pyarrow import types

    numbers = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    one_value = (*numbers, types.is_string, types.is_large_string, types.is_dictionary, types.is_timestamp, types.is_date)
    return [
        field.name
        for field in schema
        if field.name == text_field
        or any(is_so(field.type) for is_so in one_value)
        or (field.name in NESTED and types.is_struct(field.type))
    ]


def _in_microseconds(schema: Any) -> Any:
    """`schema` with times as fine as Python's."""
    import pyarrow

    for number, field in enumerate(schema):
        if pyarrow.types.is_timestamp(field.type):
            schema = schema.set(number, field.with_type(pyarrow.timestamp("us", field.type.tz)))
    return schema


def _array_record(file: SourceFile, fields: Fields) -> Iterator[Document]:
    """Records are JSON objects with a field of text, else plain text. The library reads local files only: a remote one is copied."""
    if file.filesystem is None:
        yield from _local_array_record(file.path, file, fields)
        return
    with tempfile.TemporaryDirectory() as folder:
        with file.open() as raw, Path(folder, "copy").open("wb") as copy:
            shutil.copyfileobj(raw, copy, BLOCK)
        yield from _local_array_record(f"{folder}/copy", file, fields)


def _local_array_record(path: str, file: SourceFile, fields: Fields) -> Iterator[Document]:
    from array_record.python.array_record_module import ArrayRecordReader

    assert fields.text is not None, "conversations are JSONL"
    size, row = Path(path).stat().st_size, 0
    if size == 0:
        raise UserError(f"{file.path} is empty.")
    try:
        reader = ArrayRecordReader(path)
        try:
            if not reader.ok():
                raise UserError(f"{file.path} is not a whole ArrayRecord file.")
            rows = reader.num_records()
            for start in range(0, rows, RECORDS_AT_ONCE):
                for content in reader.read(start, min(start + RECORDS_AT_ONCE, rows)):
                    row += 1
                    origin = f"{file.path}, record {row}"
                    record = fields_of(content, origin) if content.startswith(b"{") else {}
                    text = _field(record, fields.text, origin) if content.startswith(b"{") else text_of(content, origin)
                    yield Document(text, origin, size * row // rows, about(f"{file.name}#{row}", record, fields.content))
        finally:
            reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{file.path} is not a whole ArrayRecord file: {error}.") from error
