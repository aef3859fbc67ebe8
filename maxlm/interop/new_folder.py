"""A folder that is there complete or not at all."""

import fcntl
import glob
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax

from maxlm.base.errors import UserError, error_kind
from maxlm.cluster.agree import from_process_0, on_all, require_equal

SHARED_SECONDS = 10.0  # that a network file system may take to show a new folder
REMOVAL_SECONDS = 5.0  # until threads that still write into it, such as a checkpoint's, have ended
_log = logging.getLogger(__name__)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder next to `out`, which becomes `out` if the block succeeds and is removed if it does not.

    Process 0 makes and renames it, and removes the folders of earlier commands for `out` that were killed. Raises UserError in all
    processes if `out` is there and not empty, before or after, if it cannot be written, or if one of them does not see the folder of
    process 0.
    """
    out = Path.cwd() / out if out.name else out.resolve()
    first = jax.process_index() == 0
    held = ExitStack()
    mine = on_all(lambda: _make(out, held) if first else None, lambda made: {"--out": str(out)})
    made = out.parent / from_process_0(mine.name if mine else "")
    try:
        on_all(lambda: _wait_for(made, out))
        yield made
        require_equal({})  # all have written their part
        on_all(lambda: _rename(made, out) if first else None)
    except UserError:
        if not first:  # the first process to leave ends the others, so process 0 needs time to remove it
            _wait_until(lambda: not made.is_dir())
        raise
    finally:
        if mine is not None:
            _wait_until(lambda: _removed(mine), REMOVAL_SECONDS)
        held.close()


def _make(out: Path, held: ExitStack) -> Path:
    """Make a folder next to `out`, locked until `held` closes or this process ends, so that another one knows whether it is in use."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is there already, and not empty: name a new folder.")
    if out.is_symlink() or os.path.ismount(out):
        kind = "a link" if out.is_symlink() else "where a file system is mounted"
        raise UserError(f"--out {out} is {kind}, which no folder can replace: name a folder inside it.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent, wait=True):  # else another command might take the new folder, not locked yet, for an abandoned one
            for left in out.parent.glob(f".{glob.escape(out.name)}-{'[a-z0-9_]' * 8}"):
                with _locked(left) as free:
                    if free:
                        _log.warning("%s is removed: a command that was killed has left it", left)
                        shutil.rmtree(left, ignore_errors=True)
            made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
            held.enter_context(_locked(made))
        made.chmod(0o755)
    except OSError as error:
        raise error_kind(error)(f"--out {out} cannot be made: {error.strerror}.") from error
    return made


@contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a folder; False if another process has, or the file system has no locks for folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        free = False
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            free = True
        yield free
    finally:
        os.close(descriptor)


def _removed(folder: Path) -> bool:
    """Remove the folder under another name, where threads that still write into it do not find it; True once it is gone."""
    if not folder.exists():
        return True
    gone = Path(tempfile.mkdtemp(prefix=folder.name[:-8], dir=folder.parent))  # as `_make` names it, so that a later command removes it
    with suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    return not folder.exists() and not gone.exists()


def _wait_for(made: Path, out: Path) -> None:
    if not _wait_until(made.is_dir):
        raise UserError(f"--out {out}: this host does not see what process 0 writes there; name a folder that all hosts share.")


def _wait_until(there: Callable[[], bool], seconds: float = SHARED_SECONDS) -> bool:
    """Wait until `there()`, for so many seconds at most. Returns whether it came true."""
    until = time.monotonic() + seconds
    while not (known := there()) and time.monotonic() < until:
        time.sleep(0.05)
    return known


def _rename(made: Path, out: Path) -> None:
    try:
        if out.exists():
            out.rmdir()
        made.rename(out)
    except OSError as error:
        raise error_kind(error)(f"--out {out} cannot be made: {error.strerror}; it was empty before.") from error
