"""Orbax reports a failure several times over before it raises it: pages of tracebacks on stderr for one full disk. Here only what it raises
is kept, which `errors` puts in one line.
"""

import logging
import sys
from collections.abc import Callable
from types import CoroutineType
from typing import Any

_CHARS = 300  # of a line of another library
_LIBRARIES = ("orbax", "tensorstore", "uvloop")
_log = logging.getLogger(__name__)


def install() -> None:
    """Filter the loggers that Orbax reports to, and what Python says of its coroutines that nobody awaits. Again: changes nothing."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_worth_saying)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Keep a record or not, in one line. An exception is raised to the caller as well, or belongs to a leaf beside the one that was."""
    if not any(library in f"{record.pathname} {record.getMessage()}" for library in _LIBRARIES):
        return True
    if record.exc_info or "exception was never retrieved" in record.getMessage():
        return False
    message = record.getMessage().strip().split("\n")[0]
    record.msg, record.args = message[:_CHARS], ()
    return True


class _UnraisableHook:
    """Keeps to the log what is raised where nobody can catch it: coroutines that Orbax drops when one of many reads fails."""

    def __init__(self, before: Callable[[Any], Any]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        source = unraisable.object
        code = source.cr_code.co_filename if isinstance(source, CoroutineType) else ""
        text = f"{code} {type(source).__module__} {unraisable.err_msg} {unraisable.exc_value}"
        if any(library in text for library in _LIBRARIES) or "Event loop is closed" in text:
            _log.debug("ignored: %s", text[:_CHARS].split("\n", maxsplit=1)[0])
        else:
            self._before(unraisable)
