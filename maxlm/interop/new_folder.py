"""A folder that is there complete or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxlm.config.errors import UserError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out`, which becomes `out` if the block succeeds and is removed if it does not.

    Raises UserError if `out` is there and not empty, before or after, or cannot be written.
    """
    out = Path.cwd() / out if out.name else out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is there already, and not empty: name a new folder.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        made.chmod(0o755)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}.") from error
    try:
        yield made
        try:
            if out.exists():
                out.rmdir()
            made.rename(out)
        except OSError as error:
            raise UserError(f"--out {out} cannot be made: {error.strerror}; it was empty before.") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
