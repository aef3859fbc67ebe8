"""Recording a trace with `jax.profiler` into one file."""

import shutil
from pathlib import Path

import jax

from maxlm.config.errors import UserError
from maxlm.telemetry.profile import TRACE

_RAW = "raw"  # folder in which jax writes; removed


def start_trace(folder: Path) -> None:
    """Begin to record. One trace at a time; raises what jax and the file system raise."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / _RAW, ignore_errors=True)  # of a process that was killed
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a Python call costs more to trace than to make
    options.host_tracer_level = 2  # the CPU's operations are of that level
    jax.profiler.start_trace(str(folder / _RAW), profiler_options=options)


def stop_trace(folder: Path) -> Path:
    """Stop, and return the file `trace.xplane.pb` in `folder`."""
    jax.profiler.stop_trace()
    written = next((folder / _RAW).glob("plugins/profile/*/*.xplane.pb"), None)
    if written is None:
        raise UserError(f"{folder}: jax.profiler has written no trace there.")
    trace = folder / TRACE
    shutil.move(written, trace)
    shutil.rmtree(folder / _RAW, ignore_errors=True)
    return trace
