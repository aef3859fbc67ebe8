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

from maxlm.compiler.aot import CompiledStep, Job, Memory, cached_step, compile_job, in_memory, keep_step, prepare
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    from maxlm.training.program import Program

_POLL_S = 0.1
_LAST = "after_optimizations-memory-usage-report.txt"  # of the files that XLA writes together
_PROGRAM, _BUFFERS = "after_optimizations.txt", "after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*):$", re.MULTILINE)
_COLOR = re.compile(r" color (\d+),")
_HOST = "5"  # memory space of arrays in host memory; HBM is written without a number


def scheduled_step(program: "Program", topology: Topology) -> CompiledStep | None:
    """The scheduled step of `program` as it was kept; None if it was not."""
    return cached_step(_key(prepare(program, topology)))


def schedule_program(program: "Program", topology: Topology, folder: Path, then: Callable[[CompiledStep], None]) -> None:
    """Call `then` with the scheduled step of `program`, which is kept. If it was not kept before, the compiler goes on meanwhile: `then` is
    called in another thread, and has to end the process by `end_process`. XLA writes to `folder`, which is empty, until then. Raises what
    the compiler does.
    """
    job = prepare(program, topology)
    if (kept := cached_step(_key(job))) is not None:
        then(kept)
        return
    started, over = time.monotonic(), threading.Event()

    def watch() -> None:
        files = None
        while files is None and not over.wait(_POLL_S):
            files = _written(folder)
        if files is not None:
            step = _read(*files, job, time.monotonic() - started)
            keep_step(_key(job), step)
            then(step)

    watcher = threading.Thread(target=watch, daemon=True, name="maxlm-schedule")
    watcher.start()
    try:
        step = compile_job(replace(job, options={**job.options, "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}))
    finally:
        over.set()
        watcher.join()
    keep_step(_key(job), step)  # it does not fit, or was compiled before the files were seen
    then(step)


def _key(job: Job) -> str:
    return f"{job.key}-scheduled"


def _written(folder: Path) -> tuple[str, str] | None:
    """(program, buffers) once XLA has written both."""
    last = next(iter(folder.glob(f"*train_step*{_LAST}")), None)
    if last is None:
        return None
    module = last.name.removesuffix(_LAST)
    program, buffers = ((folder / f"{module}{name}").read_text(encoding="utf-8") for name in (_PROGRAM, _BUFFERS))
    return program, buffers


def _read(program: str, buffers: str, job: Job, seconds: float) -> CompiledStep:
    """The step in what XLA wrote. Its memory is what is allocated, with the gaps between arrays."""
    sizes: Counter[str] = Counter()
    for size, said in _ALLOCATION.findall(buffers):
        color = _COLOR.search(f"{said},")
        space = color.group(1) if color else ""
        kinds = [kind for kind in ("parameter", "maybe-live-out", "preallocated-temp") if kind in said]
        if space == _HOST:
            sizes["host"] += int(size)
        elif not space:
            sizes.update({kind: int(size) for kind in kinds} | ({"alias": int(size)} if len(kinds) > 1 else {}))
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
