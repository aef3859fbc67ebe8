"""Recording a trace with `jax.profiler` into one file."""

import shutil
from contextlib import suppress
from pathlib import Path

import jax

from maxlm.base.errors import UserError
from maxlm.base.transient import message_line
from maxlm.telemetry.profile import PAGE, TRACE, VIEWER_FILE

_RAW = "raw"  # folder in which jax writes; removed


def start_trace(folder: Path) -> None:
    """Begin to record. One trace at a time; raises what jax and the file system raise."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(RuntimeError):  # jax holds on to a trace that it could not write, and refuses a second one
        jax.profiler.stop_trace()
    shutil.rmtree(folder / _RAW, ignore_errors=True)  # of a process that was killed
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a Python call costs more to trace than to make
    options.host_tracer_level = 2  # the CPU's operations are of that level
    jax.profiler.start_trace(str(folder / _RAW), profiler_options=options)


def stop_trace(folder: Path) -> Path:
    """Stop, and return the file `trace.xplane.pb` in `folder`. Raises UserError if it cannot be written."""
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        raise UserError(f"{folder}: the trace cannot be written ({message_line(error)}); free space there.") from error
    written = next((folder / _RAW).glob("plugins/profile/*/*.xplane.pb"), None)
    if written is None:
        raise UserError(f"{folder}: jax.profiler has written no trace there.")
    for old in (PAGE, VIEWER_FILE):  # of an earlier trace: they would stay if the new page failed
        (folder / old).unlink(missing_ok=True)
    trace = folder / TRACE
    shutil.move(written, trace)
    shutil.rmtree(folder / _RAW, ignore_errors=True)
    return trace


def abandon_trace(folder: Path) -> None:
    """Stop, whatever fails, and keep nothing of the trace."""
    with suppress(Exception):
        jax.profiler.stop_trace()
    shutil.rmtree(folder / _RAW, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()  # unless an earlier trace is there
