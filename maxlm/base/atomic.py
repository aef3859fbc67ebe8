"""Atomic writes: files that are replaced as a whole, and files that grow by whole records."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from maxlm.base import directory_lock
from maxlm.base.paths import append_regular, irregular


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error; otherwise `path` stays as it was. Raises OSError, also for a
    pipe or a device, which would be lost; UserError if another process has taken the folder that this one had locked.
    """
    if kind := irregular(path):
        raise IsADirectoryError(errno.EISDIR, f"it is {kind}, and not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        directory_lock.check(path)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


class AppendFile:
    """Append records to `path`; the file and its folder are made by the first one.

    A record is written whole or not at all: the remains of a failed write are cut off before the next one. After a failure the file is
    opened again, as some network file systems require.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._end: int | None = None  # bytes of whole records; None: not known yet, all of the file

    def append(self, record: bytes) -> None:
        """Append one record. Raises OSError; the same call may then be made again. UserError if another process has taken the folder."""
        directory_lock.check(self.path)
        try:
            descriptor, end = self._opened()
            self._end, written = end, 0
            while written < len(record):
                written += os.write(descriptor, record[written:])
            self._end = end + len(record)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            with contextlib.suppress(OSError):
                self._cut()
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _opened(self) -> tuple[int, int]:
        """Descriptor, and the offset of the next record."""
        if self._descriptor is not None and self._end is not None:
            return self._descriptor, self._end
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = append_regular(self.path)
        self._cut()
        return self._descriptor, os.fstat(self._descriptor).st_size

    def _cut(self) -> None:
        if self._descriptor is not None and self._end is not None and os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
