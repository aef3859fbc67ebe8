"""log.txt of a run: what modules log, from before its folder is there; of maxlm's own from INFO on."""

import logging
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType

_KEPT = 10_000  # lines before there is a file


class RunLog:
    """Use it in a `with`. What was logged when that ends, and no file had come, is told on stderr from WARNING on."""

    def __init__(self) -> None:
        self._early = MemoryHandler(_KEPT, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._handler: logging.Handler = self._early

    def __enter__(self) -> "RunLog":
        logging.getLogger("maxlm").setLevel(logging.INFO)  # which implementation of an operation was chosen, and why
        logging.getLogger().addHandler(self._handler)
        return self

    def write_to(self, path: Path | None) -> None:
        """Write all of it to `path`; None: to nowhere, since another process does."""
        self._change(logging.FileHandler(path) if path else logging.NullHandler())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handler is self._early and logging.lastResort is not None:
            self._change(logging.lastResort)
        logging.getLogger().removeHandler(self._handler)
        if self._handler is not logging.lastResort:
            self._handler.close()

    def _change(self, handler: logging.Handler) -> None:
        if handler is not logging.lastResort:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for record in self._early.buffer:
            if record.levelno >= handler.level:
                handler.handle(record)
        logging.getLogger().removeHandler(self._early)
        logging.getLogger().addHandler(handler)
        self._early.close()
        self._handler = handler
