"""Exclusive lock of a directory among the processes of a machine; the kernel frees it when its holder dies."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from maxlm.config.errors import UserError

log = logging.getLogger(__name__)

NAME = ".lock"
_POLL_SECONDS = 0.2
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # file systems without locks, such as some mounted buckets


@contextlib.contextmanager
def locked(folder: Path, field: str, seconds: float, say: Callable[[str], None], fix: str) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if need be and removed again if it is empty afterwards.

    On a file system without locks nothing is locked, with a warning in the log.

    Args:
        field: the setting that names the folder, for messages.
        seconds: how long to wait for a holder, which may be about to end.
        say: prints a line: who holds the lock, before the wait.
        fix: advice for the error message.

    Raises:
        UserError: another process holds the lock and does not end in time.
        OSError: the folder cannot be written.
    """
    created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    file = _acquire(folder, field, seconds, say, fix)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                (folder / NAME).unlink()
            file.close()
            with contextlib.suppress(OSError):  # deepest first, up to the first that is not empty
                for place in created:
                    place.rmdir()


def _acquire(folder: Path, field: str, seconds: float, say: Callable[[str], None], fix: str) -> IO[str] | None:
    """Return the locked file, or None on a file system without locks."""
    until, announced = time.monotonic() + seconds, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("%s: the file system has no locks (%s): concurrent use would not be detected", folder, error.strerror)
                file.close()
                return None
            holder = _holder(file)
            file.close()
            if time.monotonic() >= until:
                raise UserError(f"{field} = {folder}: {holder} uses it; {fix}.") from None
            if not announced:
                say(f"{folder}: {holder} uses it; waiting {seconds:g} s for its end")
                announced = True
            time.sleep(_POLL_SECONDS)
            continue
        if _is_current(file, folder / NAME):
            _write_holder(file)
            return file
        file.close()  # its holder removed it between our open and lock


def _is_current(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _write_holder(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk; the lock holds nevertheless
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}, file)
        file.flush()


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        holder = json.load(file)
        return f"process {int(holder['pid'])} on {holder['host']}, started {holder['started']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
