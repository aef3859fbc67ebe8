"""One run at a time in a directory: a lock that the kernel frees when its holder dies, however it dies."""

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
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # of file systems that have none, such as some mounted buckets


@contextlib.contextmanager
def held(folder: Path, field: str, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Within it no other process of maxlm holds `folder`, which is made if need be and removed again if it is still empty then.

    One on a file system without locks is not locked.

    Args:
        field: the setting that names the folder, for messages.
        seconds: to wait for a holder, which may be about to end.
        say: is told, before waiting, who holds it.

    Raises:
        UserError: another process holds it and does not end.
        OSError: it cannot be written.
    """
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    file = _take(folder, field, seconds, say)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                (folder / NAME).unlink()
            file.close()
            with contextlib.suppress(OSError):  # deepest first; the first that holds something ends it
                for place in made:
                    place.rmdir()


def _take(folder: Path, field: str, seconds: float, say: Callable[[str], None]) -> IO[str] | None:
    """The locked file, or None on a file system without locks."""
    until, told = time.monotonic() + seconds, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                log.warning("%s: the file system has no locks (%s), so two runs in it would not be noticed", folder, error.strerror)
                file.close()
                return None
            holder = _holder(file)
            file.close()
            if time.monotonic() >= until:
                raise UserError(f"{field} = {folder}: {holder} uses it; end that first, or choose another run.name or run.dir.") from None
            if not told:
                say(f"{folder}: {holder} uses it; waiting {seconds:g} s for its end")
                told = True
            time.sleep(_POLL_SECONDS)
            continue
        if _is_there(file, folder / NAME):
            _sign(file)
            return file
        file.close()  # its holder removed it between our opening and locking it


def _is_there(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sign(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}, file)
        file.flush()


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        signed = json.load(file)
        return f"process {int(signed['pid'])} on {signed['host']}, started {signed['started']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
