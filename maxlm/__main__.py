"""Entry point of `maxlm` and `python -m maxlm`: the command line, with an orderly end on signals."""

import contextlib
import gc
import os
import signal
import sys
from typing import NoReturn

from maxlm.base.errors import UserError
from maxlm.cluster import deadline, progress_file
from maxlm.cluster.deadline import Stopped

_INTERRUPTED = 130  # typer's exit code after KeyboardInterrupt
# Imports and tracing make many small objects that stay: with Python's own thresholds, collections take a sixth of the CPU time of imports.
_GC_THRESHOLDS = (10_000, 10, 10)


def main() -> None:
    """Run the command line. If a signal ends it before it is done, that is one line and exit code 3, without a traceback."""
    try:
        gc.set_threshold(*_GC_THRESHOLDS)
        deadline.start()
        from maxlm.cli import main as command_line

        command_line()
    except UserError as error:
        sys.stderr.write(f"maxlm: {error}\n")
        sys.exit(error.exit_code)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        code = code if isinstance(code, int) else int(code is not None)
        stopped = deadline.finish(code)
        if not isinstance(error, SystemExit):
            progress_file.record_error(error)
        if stopped is not None and code:  # also where a library has replaced the exception by its own
            _end(stopped)
        if code == _INTERRUPTED:
            _end(Stopped(signal.SIGINT))
        raise


def _end(stopped: Stopped) -> NoReturn:
    """Exit without finalizing the interpreter, which waits for threads and crashes under those that compute."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"maxlm: {stopped}\n")
        sys.stderr.flush()
    os._exit(stopped.exit_code)


if __name__ == "__main__":
    main()
