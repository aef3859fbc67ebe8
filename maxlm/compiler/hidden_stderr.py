"""Keep from the screen what libraries in C++ write to stderr: warnings of XLA and libtpu that no user can act on.

They write to file descriptor 2, past Python. A block hides it (`hidden_stderr`), the compiler's process writes it to a file (`Log`); what
was hidden is shown when the block or the process fails.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAST_LINES = 20  # of a log that are shown
_STDERR = 2


@contextmanager
def hidden_stderr() -> Iterator[None]:
    """Hide output to file descriptor 2 unless the block fails. Python's own `sys.stderr` stays visible."""
    sys.stderr.flush()
    shown, screen = sys.stderr, os.dup(_STDERR)
    python = os.fdopen(screen, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with tempfile.TemporaryFile() as hidden, python:
        os.dup2(hidden.fileno(), _STDERR)
        if _writes_there(shown):
            sys.stderr = python
        try:
            yield
        except BaseException:
            hidden.seek(0)
            os.write(screen, hidden.read())
            raise
        finally:
            if sys.stderr is python:
                sys.stderr = shown
            os.dup2(screen, _STDERR)


def _writes_there(stream: object) -> bool:
    """True for a stream of Python that writes to file descriptor 2."""
    try:
        return stream.fileno() == _STDERR  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # a stand-in, as a test has
        return False


class Log:
    """A file for the stderr of another process; it stays where that process failed."""

    def __init__(self) -> None:
        file, name = tempfile.mkstemp(prefix="maxlm-compiler-", suffix=".log")
        os.close(file)
        self.path = Path(name)

    def last_lines(self) -> str:
        """Its end, for the screen."""
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "".join(f"{line}\n" for line in lines)

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def write_stderr_to(path: str) -> None:
    """Write the stderr of this process, Python's as well, to the end of the file `path`."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, _STDERR)
    os.close(file)
