"""Files that are there whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends well; otherwise `path` stays as it was. Raises OSError."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8, atomically. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


def _umask() -> int:
    # mkstemp makes files only their owner can read; a report is for others too. The umask can only be read by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
