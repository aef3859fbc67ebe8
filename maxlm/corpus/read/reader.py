"""Documents of one file of any format. The content decides which one it is; the name is a hint where the content leaves it open."""

import contextlib
import errno
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.transient import first_line, is_transient
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.read.fields import of_bytes
from maxlm.corpus.read.html import is_html, of_html
from maxlm.corpus.read.inputs import open_input
from maxlm.corpus.read.jsonl import read_json, read_jsonl
from maxlm.corpus.read.problems import DEFAULTS, DamagedError, ReadSettings, removed
from maxlm.corpus.read.stream import BLOCK, ByteStream, Meter, as_utf8, open_stream
from maxlm.corpus.read.tables import ARRAY_RECORD, PARQUET, local_copy, read_array_record, read_parquet
from maxlm.corpus.read.warc import read_warc
from maxlm.corpus.read.wikipedia import is_dump, read_wikipedia

HEAD = 4096  # bytes that a format is told by
JSONL = (".jsonl", ".ndjson")
# First bytes of formats that hold text, if at all, in a way that nothing here reads: the file is named with its format, not called text.
FOREIGN = {
    b"PK\x03\x04": "zip",
    b"%PDF-": "pdf",
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"\x7fELF": "elf",
    b"SQLite format 3\0": "sqlite",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
    b"ARROW1": "arrow",
    b"ORC": "orc",
    b"Obj\x01": "avro",
}
PASSING = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ETIMEDOUT)  # faults of this machine
Found = Iterator[Document | Removed]


def read(path: str, settings: ReadSettings = DEFAULTS, tell: Callable[[int], None] | None = None) -> Found:
    """Documents of a file or URL, in order, and a Removed for each record that is none and for the rest of a file that cannot be read.

    A pure function of the bytes, the path and `settings`. Holds one record and a few blocks in memory. `tell`: called before each result
    with the place in the file, in bytes as stored.

    Raises:
        UserError: `path` does not exist.
        UnavailableError: remote storage, or the medium, failed in a way that may pass: a document must not be missing by chance.
    """
    count = 0
    try:
        with contextlib.closing(open_input(path)) as raw:
            for found in _documents(path, raw, settings):
                count += 1
                if tell is not None:
                    tell(raw.tell())
                yield found
        if count == 0:  # lines that are all blank, a table without rows
            yield removed(path, "empty")
    except FileNotFoundError as error:
        if count == 0 and "://" not in path and not Path(path).is_symlink():
            raise UserError(f"{path} does not exist.") from error
        yield removed(path, "vanished", first_line(error))
    except DamagedError as error:
        yield removed(path, error.reason, error.cause, records=count)
    except UserError:
        raise
    except Exception as error:  # of a server's own library, too
        if not isinstance(error, OSError) and "://" not in path:
            raise
        yield _refused(path, error, count)


def _refused(path: str, error: Exception, count: int) -> Removed:
    """A file that the system or a server refused. Raises UnavailableError if that may pass."""
    if isinstance(error, IsADirectoryError):
        return removed(path, "not_a_file")
    code = error.errno if isinstance(error, OSError) else None
    if is_transient(error) if "://" in path else code in PASSING:
        raise UnavailableError(f"{path}: cannot be read: {first_line(error)}; try again when the cause is gone.") from error
    return removed(path, "vanished" if code in (errno.ESTALE, errno.ENODEV) else "unreadable", first_line(error), records=count)


def _documents(path: str, raw: BinaryIO, settings: ReadSettings) -> Found:
    size = raw.seek(0, io.SEEK_END)
    raw.seek(0)
    if size == 0:
        return iter([removed(path, "empty")])
    head = raw.read(HEAD)
    raw.seek(0)
    if head.startswith((PARQUET, ARRAY_RECORD)):
        return _table(path, head, raw, size, settings)
    stream = open_stream(raw, Meter(settings))
    head = stream.peek(HEAD)
    if not head:
        return iter([removed(path, "empty")])
    if head.startswith((PARQUET, ARRAY_RECORD)):
        return _packed_table(path, head, stream, settings)
    stream = as_utf8(stream)
    return _reader(path, stream.peek(HEAD))(path, stream, settings)


def _reader(path: str, head: bytes) -> Callable[[str, ByteStream, ReadSettings], Found]:
    """The function that reads data that begins with `head`, which is no table."""
    foreign = next((name for magic, name in FOREIGN.items() if head.startswith(magic)), "tar" if head[257:262] == b"ustar" else None)
    if foreign is not None:
        return lambda path, stream, settings: iter([removed(path, "binary", format=foreign)])
    if head.startswith(b"WARC/"):
        return read_warc
    if is_dump(head):
        return read_wikipedia
    if is_html(head):
        return _whole(of_html)
    first = head.lstrip()[:1]
    if _is_named(path, JSONL) or (first == b"{" and _is_object(head)):
        return read_jsonl
    if _is_named(path, (".json",)) and first in (b"{", b"["):
        return read_json
    return _whole(of_bytes)


def _is_named(path: str, suffixes: tuple[str, ...]) -> bool:
    name = urlsplit(path).path if "://" in path else path
    return any(suffix in suffixes for suffix in [part.lower() for part in Path(name).suffixes][-3:])


def _is_object(head: bytes) -> bool:
    """True if the first line is a JSON object, or begins as one that is longer than `head`."""
    import orjson

    line, _, rest = head.lstrip().partition(b"\n")
    if not rest and len(head) == HEAD:
        return line[1:].lstrip()[:1] == b'"'
    try:
        return type(orjson.loads(line)) is dict
    except ValueError:
        return False


def _whole(document: Callable[..., Document | Removed]) -> Callable[[str, ByteStream, ReadSettings], Found]:
    """A reader of files that are one document. One that is cut short is none: nothing would show that its end is missing."""

    def read_whole(path: str, stream: ByteStream, settings: ReadSettings) -> Found:
        data = stream.take(settings.max_record_bytes + 1)
        if len(data) > settings.max_record_bytes:
            yield removed(f"{path}#1", "too_large", data[:HEAD].decode("utf-8", "replace"), limit=settings.max_record_bytes)
        else:
            yield document(f"{path}#1", data, {})

    return read_whole


def _table(path: str, head: bytes, raw: BinaryIO, size: int, settings: ReadSettings) -> Found:
    if head.startswith(PARQUET):
        yield from read_parquet(path, raw, size, settings)
    elif "://" in path:  # the library reads local files only
        with local_copy(raw) as local:
            yield from read_array_record(path, local, settings)
    else:
        yield from read_array_record(path, Path(path), settings)


def _packed_table(path: str, head: bytes, stream: ByteStream, settings: ReadSettings) -> Found:
    """A table inside a compressed file, unpacked on disk: tables are read at any place."""
    with local_copy(cast(BinaryIO, io.BufferedReader(_Raw(stream), BLOCK))) as local, local.open("rb") as raw:
        if head.startswith(PARQUET):
            yield from read_parquet(path, raw, local.stat().st_size, settings)
        else:
            yield from read_array_record(path, local, settings)


class _Raw(io.RawIOBase):
    """A ByteStream as a file."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.take(len(buffer))
        buffer[: len(data)] = data
        return len(data)
