"""A folder that is there complete or not at all."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from maxlm.checkpoint.multihost import from_process_0
from maxlm.config.errors import UserError
from maxlm.interop.hosts import Agree, alone, on_all

SHARED_SECONDS = 10.0  # that a network file system may take to show a new folder


@contextmanager
def new_folder(out: Path, agree: Agree = alone) -> Iterator[Path]:
    """Yield a folder beside `out`, which becomes `out` if the block succeeds and is removed if it does not.

    Process 0 makes and renames it. Raises UserError in all processes if `out` is there and not empty, before or after, if it cannot be
    written, or if one of them does not see what process 0 has made.
    """
    out = Path.cwd() / out if out.name else out.resolve()
    first = jax.process_index() == 0
    mine = on_all(agree, lambda: _make(out) if first else None, lambda made: {"--out": str(out)})
    made = out.parent / "".join(map(chr, from_process_0([ord(letter) for letter in mine.name] if mine else [])))
    try:
        on_all(agree, lambda: _wait_for(made, out))
        yield made
        agree({}, None)  # all have written what they write
        on_all(agree, lambda: _rename(made, out) if first else None)
    except UserError:
        if not first:  # the first process to leave ends the others, so process 0 needs time to remove it
            _wait_until(lambda: not made.is_dir())
        raise
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def _make(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is there already, and not empty: name a new folder.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        made.chmod(0o755)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}.") from error
    return made


def _wait_for(made: Path, out: Path) -> None:
    if not _wait_until(made.is_dir):
        raise UserError(f"--out {out}: this host does not see what process 0 writes there; name a folder that all hosts share.")


def _wait_until(there: Callable[[], bool]) -> bool:
    """Whether it is, within `SHARED_SECONDS`."""
    until = time.monotonic() + SHARED_SECONDS
    while not (known := there()) and time.monotonic() < until:
        time.sleep(0.05)
    return known


def _rename(made: Path, out: Path) -> None:
    try:
        if out.exists():
            out.rmdir()
        made.rename(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; it was empty before.") from error
