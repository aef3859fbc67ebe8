"""A file that grows by whole records."""

import contextlib
import os
from pathlib import Path


class AppendFile:
    """Appends at the end of `path`, which is made with its folder when there is something to append.

    A record is there whole or not at all: what a write that failed has left is cut before the next one. After a failure the file is
    opened anew, as a network file system may ask for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._end: int | None = None  # bytes of whole records; None: not known, all there is

    def append(self, record: bytes) -> None:
        """Raises OSError; the same call may be made again."""
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
        """The next record opens the file again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _opened(self) -> tuple[int, int]:
        """(descriptor, where the next record begins)."""
        if self._descriptor is not None and self._end is not None:
            return self._descriptor, self._end
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._cut()
        return self._descriptor, os.fstat(self._descriptor).st_size

    def _cut(self) -> None:
        if self._descriptor is not None and self._end is not None and os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
