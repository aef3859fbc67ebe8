"""Compile the training step for a TPU as far as its schedule and its memory, which XLA decides before it writes any machine code.

Llama 3.1 8B is scheduled in 4 s and compiled in 460 s (v6e, one core): the rest is machine code, which no estimate of a step reads; with it
XLA only states the cycles of matmuls. XLA cannot be told to stop there. It writes the scheduled program to a folder on the way, and then
has to be ended with its process.
"""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from maxlm.base.errors import UserError
from maxlm.compiler.aot import CompiledStep, Job, Memory, cached_step, compile_job, in_memory, keep_step, prepare
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    from maxlm.training.program import Program

_POLL_S = 0.1
_WRITES_S = 20.0  # at most, from the creation of a file to its end
_LAST = "after_optimizations-memory-usage-report.txt"  # of the files that XLA writes together
_PROGRAM, _BUFFERS = "after_optimizations.txt", "after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*):$", re.MULTILINE)
_COLOR = re.compile(r" color (\d+),")
_TOTAL = re.compile(r"^Memory Space: default .*\nTotal bytes: (\d+)", re.MULTILINE)
_FORMAT = 2  # of what is kept: raise it when `_read` changes
_HOST = "5"  # memory space of arrays in host memory; HBM is written without a number


class _IncompleteError(UserError):
    """A file of XLA's ends too early."""


def scheduled_step(program: "Program", topology: Topology) -> CompiledStep | None:
    """The scheduled step of `program` as it was kept; None if it was not."""
    return cached_step(_key(prepare(program, topology)))


def schedule_program(program: "Program", topology: Topology, folder: Path, then: Callable[[CompiledStep | Exception, bool], None]) -> None:
    """Call `then` with the scheduled step of `program`, which is kept, or with why there is none, and with whether the compiler goes on
    meanwhile: then it is another thread that calls, and `then` has to end the process by `end_process`. XLA writes to `folder`, which is
    empty, until it is ended. Raises what the compiler does.
    """
    job = prepare(program, topology)
    if (kept := cached_step(_key(job))) is not None:
        then(kept, False)
        return
    started, over = time.monotonic(), threading.Event()

    def found() -> CompiledStep | None:
        files = written(folder)
        if files is None:
            return None
        step = _read(*files, job, time.monotonic() - started)
        keep_step(_key(job), step)
        return step

    def watch() -> None:
        answer: CompiledStep | Exception | None = None
        waits = round(_WRITES_S / _POLL_S)
        while answer is None and not over.wait(_POLL_S):
            try:
                answer = found()
            except _IncompleteError as error:  # is being written, or the disk is full
                waits -= 1
                answer = None if waits else error
            except Exception as error:  # raised in this thread, it would be lost while the compiler goes on for minutes
                answer = error
        if answer is not None:
            then(answer, True)

    watcher = threading.Thread(target=watch, daemon=True, name="maxlm-schedule")
    watcher.start()
    try:
        step = compile_job(replace(job, options={**job.options, **options_to_write(folder)}))
    finally:
        over.set()
        watcher.join()
    read = found()  # it does not fit, or was compiled before the files were seen
    if read is None and not step.fits:  # what XLA refuses early it writes nothing of
        keep_step(_key(job), step)
    then(read or step, False)


def options_to_write(folder: Path) -> dict[str, str | bool]:
    """Options by which XLA writes to `folder` there what is read here, and no more, whatever the user's XLA_FLAGS say."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_module_re": ".*train_step.*",
        "xla_dump_hlo_pass_re": "",
    }


def _key(job: Job) -> str:
    return f"{job.key}-scheduled-{_FORMAT}"


def written(folder: Path) -> tuple[str, str, str] | None:
    """(program, buffers, total) once XLA has written all three, by its last attempt."""
    last = max(folder.glob(f"*train_step*{_LAST}"), default=None)
    if last is None:
        return None
    files = [last.with_name(last.name.removesuffix(_LAST) + name) for name in (_PROGRAM, _BUFFERS, _LAST)]
    if not all(file.exists() for file in files):  # libtpu 0.0.52 writes the program after the report
        return None
    program, buffers, total = (file.read_text(encoding="utf-8") for file in files)
    return program, buffers, total


def total_bytes(report: str) -> int | None:
    """Bytes of HBM that XLA allocates, as its memory-usage report says; None while it is incomplete."""
    stated = _TOTAL.search(report)
    return int(stated.group(1)) if stated else None


def _read(program: str, buffers: str, total: str, job: Job, seconds: float) -> CompiledStep:
    """The step in what XLA wrote. Its memory is what is allocated, with the gaps between arrays. Raises _IncompleteError if it is cut
    short.
    """
    sizes: Counter[str] = Counter()
    for size, said in _ALLOCATION.findall(buffers):
        color = _COLOR.search(f"{said},")
        space = color.group(1) if color else ""
        kinds = [kind for kind in ("parameter", "maybe-live-out", "preallocated-temp") if kind in said]
        if space == _HOST:
            sizes["host"] += int(size)
        elif not space:
            sizes["all"] += int(size)
            sizes.update({kind: int(size) for kind in kinds} | ({"alias": int(size)} if len(kinds) > 1 else {}))
    whole = "\nENTRY " in program and program.rstrip().endswith("}")
    if not whole or total_bytes(total) != sizes["all"]:
        raise _IncompleteError("What XLA writes of the schedule is incomplete; give TMPDIR a folder with 100 MB free.")
    memory = Memory(
        argument=sizes["parameter"] + job.resident,
        output=sizes["maybe-live-out"],
        alias=sizes["alias"],
        temp=sizes["preallocated-temp"],
        code=0,
        peak=0,
        host=sizes["host"],
    )
    return in_memory(program, memory, job.available, seconds, machine_code=False)


def end_process() -> None:
    """End this process at once, and the compiler in it."""
    os._exit(0)
