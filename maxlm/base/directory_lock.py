"""Exclusive lock of a directory. The kernel frees it when its holder dies, and its file holds a token that tells the holder from others.

The token is for file systems without locks, and for a file that somebody has removed: the last process to take the folder owns it, and an
earlier one notices before it writes there again. What writes into locked folders calls `check` first.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from maxlm.base.errors import BITS, UserError, printable, shorten
from maxlm.base.host import process_namespace, process_started

NAME = ".lock"
_POLL_SECONDS = 0.2
_CHECK_SECONDS = 1.0  # between checks of a loop that goes round more often
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # file systems without locks, such as some mounted buckets


class Lock:
    """A folder that this process holds, or works in for the process that does."""

    def __init__(self, folder: Path, field: str, taken: type[UserError] = UserError) -> None:
        """`taken`: kind of the error once another process has taken the folder."""
        self.folder, self._field, self._taken = Path(os.path.realpath(folder)), field, taken
        self._given = Path(folder).absolute()  # writers use this name, also after it is linked to another folder
        self._path = self._given / NAME
        self._token = secrets.token_hex(16)
        self._file: IO[str] | None = None  # None without locks
        self._process = os.getpid()
        self._checked = 0.0
        self._watched = self._released = False
        self._lost: UserError | None = None  # found by the thread of `watch`

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None, "_watched": False}  # a worker process asks by the token

    def acquire(self, seconds: float, say: Callable[[str], None], fix: str) -> None:
        """Wait until no other process holds the folder, for so many seconds at most. Raises UserError, OSError."""
        until, announced = time.monotonic() + seconds, False
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
            holder = ""
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _named(_read(file))
            except OSError as error:
                with file:
                    before = _read(file)
                if error.errno not in _UNSUPPORTED:
                    raise
                if not _is_alive(before):
                    others = f"; {_named(before)} ends once it notices" if before else ""
                    device = self.folder.stat().st_dev
                    if others or not any(lock._file is None and lock.folder.stat().st_dev == device for lock in _held):
                        warning = f"the file system has no locks ({error.strerror}): let no other process write there{others}"
                        say(f"warning: {self.folder}: {warning}")
                    self._replace()
                    return
                holder = _named(before)
            if holder:
                file.close()
                if time.monotonic() >= until:
                    raise UserError(f"{self._field} = {self.folder}: {holder} uses it; {fix}.")
                if not announced:
                    say(f"{self.folder}: {holder} uses it; waiting {seconds:g} s for its end")
                    announced = True
                time.sleep(_POLL_SECONDS)
                continue
            if _is_current(file, self._path):
                self._write(file)
                self._file = file
                return
            file.close()  # its holder removed it between our open and lock

    def check(self, every_s: float = 0.0) -> None:
        """Raise an error of the kind `taken` if another process has taken the folder. An unreadable file proves nothing; a
        removed file is made again. `every_s`: seconds for which the last check is good.
        """
        if self._watched and every_s:
            if self._lost is not None:
                raise self._lost
            return
        if not self.is_due(every_s):
            return
        if not os.path.exists(self._path):  # noqa: PTH110 - of a storage that fails, Path.exists raises
            self._restore()
        holder = {}
        with contextlib.suppress(OSError), self._path.open(encoding="utf-8") as file:
            holder = _read(file)
        if holder.get("token", self._token) != self._token and not self._mended(holder):
            raise self._taken(
                f"{self._field} = {self.folder}: {_named(holder)} has taken over: this process ends, and writes nothing more there; "
                "let one process at a time use it."
            )

    def holds(self, path: Path) -> bool:
        """True if `path` lies in the folder, by its name or in fact."""
        return Path(path).absolute().is_relative_to(self._given) or Path(os.path.realpath(path)).is_relative_to(self.folder)

    def watch(self) -> None:
        """Check in a thread from now on: where storage hangs, a loop that checks every second must not wait for it."""
        self._watched = True
        threading.Thread(target=self._watch, name="directory-lock", daemon=True).start()

    def _watch(self) -> None:
        while not self._released and self._lost is None:
            try:
                self.check()
            except UserError as error:
                self._lost = error
            time.sleep(_CHECK_SECONDS)

    def is_due(self, every_s: float) -> bool:
        """True unless the last check was less than `every_s` seconds ago."""
        due = not every_s or time.monotonic() >= self._checked + every_s
        self._checked = time.monotonic() if due else self._checked
        return due

    def release(self) -> None:
        """Give up the folder."""
        with _changing, contextlib.suppress(OSError):
            self._released = True
            with self._path.open(encoding="utf-8") as file:
                ours = _read(file).get("token", self._token if self._file is not None else "") == self._token
            if ours:
                self._path.unlink()
        if self._file is not None:
            self._file.close()

    def _restore(self) -> None:
        """Make the file again, unless another process is first or the folder is gone."""
        if os.getpid() != self._process:
            return
        with _changing, contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if self._released:  # since the thread of `watch` looked
                return
            file = stack.enter_context(self._path.open("x+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    self._replace()
                return
            stack.pop_all()
            self._write(file)
            before, self._file = self._file, file
            if before is not None:
                before.close()

    def _mended(self, holder: dict[str, Any]) -> bool:
        """True if the file names this process, which holds its lock, and only the token is damaged. Writes it again."""
        ours = self._file is not None and os.getpid() == self._process and _is_current(self._file, self._path)
        if not ours or holder | _own_name() != holder:
            return False
        assert self._file is not None, "it was asked first"
        self._write(self._file)
        return True

    def _replace(self) -> None:
        """Replace the file atomically, so that two processes that start together never mix their tokens. Raises OSError."""
        draft = self._path.with_name(f"{NAME}.{self._token}")
        draft.write_text(self._text(), encoding="utf-8")
        draft.replace(self._path)

    def _write(self, file: IO[str]) -> None:
        with contextlib.suppress(OSError):  # a full disk; the lock holds nevertheless
            file.truncate(0)
            file.write(self._text())
            file.flush()

    def _text(self) -> str:
        return json.dumps({**_own_name(), "started": time.strftime("%Y-%m-%d %H:%M:%S"), "token": self._token})


_changing = threading.Lock()  # held while a file is made again or removed
_held: list[Lock] = []  # locks of this process, or of the parent process that a worker works for


@contextlib.contextmanager
def locked(
    folder: Path, field: str, seconds: float, say: Callable[[str], None], fix: str, taken: type[UserError] = UserError
) -> Iterator[Lock]:
    """Hold the lock of `folder`, which is created if need be and removed again if it is empty afterwards.

    On a file system without locks, a process of this machine that uses the folder is seen; one elsewhere ends at its next `check`.

    Args:
        field: the setting that names the folder, for messages.
        seconds: how long to wait for a holder, which may be about to end.
        say: prints a line: who holds the lock, before the wait; that there are no locks.
        fix: advice for the error message.
        taken: kind of the error of `check` once another process has taken the folder.

    Raises:
        UserError: another process holds the lock and does not end in time.
        OSError: the folder cannot be written.
    """
    created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    lock = Lock(folder, field, taken)
    lock.acquire(seconds, say, fix)
    _held.append(lock)
    try:
        yield lock
    finally:
        _held.remove(lock)
        lock.release()
        with contextlib.suppress(OSError):  # deepest first, up to the first that is not empty
            for place in created:
                place.rmdir()


@contextlib.contextmanager
def working_for(lock: Lock | None) -> Iterator[None]:
    """Let `check` in this process ask for the folder of another process, which holds `lock`."""
    _held.extend([lock] if lock is not None else [])
    try:
        yield
    finally:
        if lock is not None:
            _held.remove(lock)


def check(path: Path | None = None) -> None:
    """Raise UserError if a folder of this process, which `path` lies in, was taken by another process. Without `path`: any of its folders,
    once a second.
    """
    for lock in tuple(_held):
        if path is None:
            lock.check(_CHECK_SECONDS)
        elif lock.holds(path):
            lock.check()


def _read(file: IO[str]) -> dict[str, Any]:
    try:
        file.seek(0)
        holder = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _own_name() -> dict[str, Any]:
    """Identity of this process: pid, host, start time and pid namespace."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "began": process_started(pid), "namespace": process_namespace()}


def _named(holder: dict[str, Any]) -> str:
    pid, host, started = (holder.get(key) for key in ("pid", "host", "started"))
    if not isinstance(pid, int) or not isinstance(host, str) or not isinstance(started, str) or pid.bit_length() > BITS:
        return "another process"
    return f"process {pid} on {printable(shorten(host))}, started {printable(shorten(started))},"


def _is_alive(holder: dict[str, Any]) -> bool:
    """True if the holder is seen to run on this machine; False where that is not known."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid.bit_length() > BITS or not holder.get("began") or holder.get("namespace") != process_namespace():
        return False
    return process_started(pid) == holder["began"]


def _is_current(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
