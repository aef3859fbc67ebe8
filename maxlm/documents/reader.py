"""Records of one file of any format, compression and encoding."""

import contextlib
import errno
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from maxlm.base.errors import UnavailableError, UserError, error_kind, shorten
from maxlm.base.transient import first_line, is_transient
from maxlm.config.choices import blamed, implementation, part
from maxlm.documents.files import open_input
from maxlm.documents.formats import HEAD, LFS_POINTER, PARQUET, UNKNOWN, facts_of, foreign_format, format_by_name, format_of, suffix_of
from maxlm.documents.html import of_html
from maxlm.documents.records import DEFAULTS, MIB, REASONS, DamagedError, Defect, Found, Record, Wanted, defect
from maxlm.documents.stream import ByteStream, Meter, as_utf8, compression, open_stream
from maxlm.documents.tables import local_copy
from maxlm.documents.warc import read_warc
from maxlm.documents.wikipedia import read_wikipedia

PASSING = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ETIMEDOUT)  # faults of this machine


def records(path: str, wanted: Wanted = Wanted(), tell: Callable[[int], None] | None = None) -> Iterator[Found]:
    """Records of a file or URL, in order, and a Defect for each one without a document and for the rest of a file that cannot be read.

    With `wanted.text_field` None, records are whole: JSON objects and rows of tables, such as conversations. A pure function of the bytes,
    the path and `wanted`. Holds one record and a few blocks in memory. `tell`: called before each result with the place in the file, in
    bytes as stored.

    Raises:
        UserError: `path` does not exist, is a pointer of Git LFS, or needs a package that is not installed.
        UnavailableError: remote storage, or the medium, failed in a way that may pass: a document must not be missing by chance.
    """
    count = 0
    try:
        with contextlib.closing(open_input(path)) as raw:
            for found in _records(path, raw, wanted):
                count += 1
                if tell is not None:
                    tell(raw.tell() if found.place is None else found.place)
                yield found
        if count == 0:  # lines that are all blank, a table without rows
            yield Defect(0, "", "empty")
    except FileNotFoundError as error:
        if count == 0 and "://" not in path and not Path(path).is_symlink():
            raise UserError(f"{path} does not exist.") from error
        yield defect(0, "", "vanished", first_line(error))
    except DamagedError as error:
        yield defect(0, "", error.reason, error.cause, records=count)
    except UserError:
        raise
    except Exception as error:  # of a server's own library, too
        if not isinstance(error, OSError) and "://" not in path:
            raise
        yield _refused(path, error, count)


def text_lines(path: str) -> Iterator[str]:
    """Lines of a file of plain text in UTF-8, unpacked. Raises UserError: it cannot be read, or is something else."""
    try:
        with contextlib.closing(open_input(path)) as raw:
            _refuse_pointer(path, raw.read(HEAD))
            raw.seek(0)
            stream = open_stream(raw, Meter(DEFAULTS))
            _refuse_pointer(path, stream.peek(HEAD))
            if foreign := foreign_format(stream.peek(HEAD)) or (stream.peek(len(PARQUET)) == PARQUET and "parquet"):
                raise UserError(f"{shorten(path)}: cannot be read: it is no plain text but {foreign}; name its fields if it is a table.")
            data = b"".join(as_utf8(stream).rest())
        yield from io.StringIO(data.decode(), newline="\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{shorten(path)}, line {data.count(10, 0, error.start) + 1}: not UTF-8; convert the file.") from None
    except (OSError, DamagedError) as error:
        reason = REASONS[error.reason] if isinstance(error, DamagedError) else error.strerror or error
        raise error_kind(error)(f"{shorten(path)}: cannot be read: {reason}.") from None


def _refused(path: str, error: Exception, count: int) -> Defect:
    """A file that the system or a server refused. Raises UnavailableError if that may pass."""
    if isinstance(error, IsADirectoryError):
        return defect(0, "", "not_a_file")
    code = error.errno if isinstance(error, OSError) else None
    if is_transient(error) if "://" in path else code in PASSING:
        raise UnavailableError(f"{path}: cannot be read: {first_line(error)}; try again when the cause is gone.") from error
    return defect(0, "", "vanished" if code in (errno.ESTALE, errno.ENODEV) else "unreadable", first_line(error), records=count)


def _records(path: str, raw: BinaryIO, wanted: Wanted) -> Iterator[Found]:
    size = raw.seek(0, io.SEEK_END)
    raw.seek(0)
    head = raw.read(HEAD)
    raw.seek(0)
    _refuse_pointer(path, head)
    if size == 0:
        return iter([_empty(path)])
    if compression(head) is None and facts_of(kind := format_of(path, head)).access != "stream":
        return _table(path, kind, raw, wanted)
    stream = open_stream(raw, Meter(wanted.limits))
    head = stream.peek(HEAD)
    if not head:
        return iter([_empty(path)])
    _refuse_pointer(path, head)
    if facts_of(kind := format_of(path, head)).access != "stream":
        return _table(path, kind, raw, wanted, stream)
    stream = as_utf8(stream)
    return _forward(path, stream.peek(HEAD), stream, wanted)


def _refuse_pointer(path: str, head: bytes) -> None:
    if head.startswith(LFS_POINTER):
        rule = "is a pointer of Git LFS and not the file itself"
        raise UserError(f"{shorten(path)} {rule}; run `git lfs pull` in its folder, or download the file.")


def _empty(path: str) -> Defect:
    """A file of no bytes: an empty text, and a fault in any other format."""
    return Defect(0, "", "empty") if format_by_name(path) in ("text", "html") else defect(0, "", "empty", bytes=0)


def _forward(path: str, head: bytes, stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """Records of a format that is read from its beginning to its end."""
    foreign = foreign_format(head)
    if foreign is not None:
        return iter([defect(0, "", "binary", format=foreign)])
    kind = format_of(path, head)
    if kind == UNKNOWN:
        return iter([defect(0, "", "unknown_format", head.decode("utf-8", "replace"), suffix=suffix_of(path))])
    if wanted.text_field is None and not facts_of(kind).fields:
        return iter([defect(0, "", "no_fields", format=kind)])
    return _read(kind, stream, wanted)


def _read(kind: str, *arguments: Any) -> Iterator[Found]:
    """Documents and defects that the reader of a format gives. Raises UserError: the reader of another package fails."""
    one, passed = part("reader", kind), None
    with blamed(one, f"place {one.place}"):
        try:
            yield from implementation(one)(*arguments)
        except (DamagedError, OSError) as error:
            passed = error
    if passed is not None:
        raise passed


def read_archive(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """Records of a web archive."""
    if not stream.peek(HEAD).startswith(b"WARC/"):
        raise DamagedError("damaged", "no WARC record at its beginning")
    yield from read_warc(stream, wanted.limits)


def read_dump(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """Articles of a wiki."""
    return read_wikipedia(stream, wanted.limits)


def read_text(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """The one text of a file."""
    return _whole(stream, wanted, lambda data: Record(1, "", data, {}))


def read_html(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """The main content of a page."""
    return _whole(stream, wanted, lambda data: of_html(1, "", data, {}))


def _whole(stream: ByteStream, wanted: Wanted, made: Callable[[bytes], Found]) -> Iterator[Found]:
    """The one record of a file. A truncated file gives none, since its record would look whole."""
    limit = wanted.limits.max_record_bytes
    data = stream.take(limit + 1)
    if len(data) > limit:
        yield defect(1, "", "too_large", data[:HEAD].decode("utf-8", "replace"), limit=limit)
    else:
        yield made(data)


def _table(path: str, kind: str, raw: BinaryIO, wanted: Wanted, packed: ByteStream | None = None) -> Iterator[Found]:
    """Records of a table, which is read at any place. `packed`: content of a compressed file, which is unpacked on disk."""
    with contextlib.ExitStack() as stack:
        copy: Path | None = None
        if packed is not None or (facts_of(kind).access == "local" and "://" in path):
            copy = stack.enter_context(local_copy(iter(partial(raw.read, MIB), b"") if packed is None else packed.rest()))
        if facts_of(kind).access == "file":
            file = raw if copy is None else stack.enter_context(copy.open("rb"))
            found = _read(kind, path, file, file.seek(0, io.SEEK_END), wanted)
        else:
            local = copy or Path(path)
            found = _read(kind, local, local.stat().st_size, wanted)
        yield from found if packed is None else (one._replace(place=None) for one in found)
