"""log.txt of a run: records of all loggers, also those from before its folder exists; of maxlm's own from INFO on."""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from maxlm.base.atomic import AppendFile
from maxlm.base.background import Background
from maxlm.base.errors import UserError

_MAX_EARLY = 10_000  # records buffered before the file exists
_CLOSE_S = 2.0


class RunLog(logging.Handler):
    """Context manager within which no logger writes to the console. A full or hung disk delays nothing.

    Records are buffered until there is a file; a background thread writes it. Records that were never given a file are printed to stderr at
    the end, from WARNING on, unless it ends with a UserError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._early: deque[logging.LogRecord] | None = deque(maxlen=_MAX_EARLY)
        self._file: AppendFile | None = None
        self._background: Background | None = None
        self._console: list[tuple[logging.Logger, logging.Handler]] = []
        self._level = logging.NOTSET

    def __enter__(self) -> "RunLog":
        ours = logging.getLogger("maxlm")
        self._level = ours.level
        ours.setLevel(logging.INFO)  # such as the chosen implementation of an operation
        self._console = list(_console_handlers())
        for logger, handler in self._console:
            logger.removeHandler(handler)
        logging.getLogger().addHandler(self)  # if there is a handler, no library installs its own (absl does)
        logging.captureWarnings(True)
        return self

    def write_to(self, path: Path | None) -> None:
        """Write all records to `path`; None: discard them, because another process writes the file."""
        assert self.lock is not None, "logging.Handler made it"
        with self.lock:
            early, self._early = self._early or (), None
            if path is not None:
                self._file = AppendFile(path)
                self._background = Background("log.txt", self._file.close)
                for record in early:
                    self.emit(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the file."""
        if self._early is not None:
            self._early.append(record)
        elif self._background is not None and self._file is not None:
            self._background.put(self._file.append, (self.format(record) + "\n").encode(errors="replace"))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        logging.captureWarnings(False)
        logging.getLogger("maxlm").setLevel(self._level)  # a thread that is still compiling would log to the console
        logging.getLogger().removeHandler(self)
        for logger, handler in self._console:
            logger.addHandler(handler)
        if isinstance(error, UserError):  # its one line is printed anyway
            self._early = None
        self.close()

    def close(self) -> None:
        """Close the file."""
        for record in self._early or ():
            if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)
        self._early = None
        if self._background is not None:
            self._background.finish(time.monotonic() + _CLOSE_S)
            self._background.join()
            self._background = None
        super().close()


def _console_handlers() -> Iterator[tuple[logging.Logger, logging.Handler]]:
    """Loggers and their handlers that write to the console."""
    loggers = [logging.getLogger(), *(item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger))]
    for logger in loggers:
        for handler in tuple(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and _is_console(handler.stream):
                yield logger, handler


def _is_console(stream: Any) -> bool:
    if stream in (sys.stdout, sys.stderr):
        return True
    try:
        return stream.fileno() in (1, 2)  # also the replacement of stderr during a spinner
    except (OSError, AttributeError, ValueError):
        return False
