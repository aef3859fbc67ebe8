"""Filters for Orbax's logging: it prints pages of tracebacks for one full disk, and then raises the error, which is enough."""

import functools
import logging
import sys
from types import CoroutineType
from typing import Any

_CHARS = 300  # of a line of another library
_LIBRARIES = ("orbax", "tensorstore", "uvloop")
_log = logging.getLogger(__name__)


@functools.cache
def install() -> None:
    """Filter the loggers that Orbax uses, and Python's warnings about its coroutines that were never awaited."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_filter)
    before = sys.unraisablehook

    def log_or_print(unraisable: Any) -> None:
        """Log exceptions of coroutines that Orbax drops when one of many reads fails, in place of printing them."""
        source = unraisable.object
        code = source.cr_code.co_filename if isinstance(source, CoroutineType) else ""
        text = f"{code} {type(source).__module__} {unraisable.err_msg} {unraisable.exc_value}"
        if any(library in text for library in _LIBRARIES) or "Event loop is closed" in text:
            _log.debug("ignored: %s", text[:_CHARS].split("\n", maxsplit=1)[0])
        else:
            before(unraisable)

    sys.unraisablehook = log_or_print


def _filter(record: logging.LogRecord) -> bool:
    """Shorten a record of Orbax to one line, and drop exceptions: one is raised to the caller, the others are of other leaves."""
    if not any(library in f"{record.pathname} {record.getMessage()}" for library in _LIBRARIES):
        return True
    if record.exc_info or "exception was never retrieved" in record.getMessage():
        return False
    message = record.getMessage().strip().split("\n")[0]
    record.msg, record.args = message[:_CHARS], ()
    return True
