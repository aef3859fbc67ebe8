"""The command `maxlm profile`: run a few steps of a run under the profiler, and write where their time goes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxlm.base.errors import error_kind
from maxlm.checkpoint import Checkpoints
from maxlm.config import Config, UserError
from maxlm.config.sections.profile import ProfileConfig
from maxlm.config.table import identity
from maxlm.parallel import build_mesh
from maxlm.run.consistency import check_devices
from maxlm.run.jax_setup import enable_compilation_cache
from maxlm.run.open_data import open_data
from maxlm.telemetry.profile import PAGE, TRACE, Facts, Profile, reduce_trace
from maxlm.telemetry.profile.attribution import HOST_MARK
from maxlm.telemetry.profile.page import Predicted
from maxlm.telemetry.profile.record import start_trace, stop_trace
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.loop import restore_or_init
from maxlm.training.profiling import profile_folder
from maxlm.training.program import Program, build_program
from maxlm.training.saved_run import open_run
from maxlm.training.session import Start

WARM_UP = 2  # steps before the trace: the first loads the program and allocates

# (config, text of the compiled step) -> (seconds by part and phase or None, the factor that corrects the seconds, a note for the page)
Predict = Callable[[Config, str], tuple[Predicted | None, float, str]]


@dataclass(frozen=True)
class Profiled:
    """The page of a trace of `steps` steps of a run, from `step` on."""

    page: Path
    step: int
    profile: Profile


def profile_run(run_dir: Path, steps: int, predict: Predict) -> Profiled:
    """Trace `steps` steps of the run in `run_dir` from its newest checkpoint, or from its first state, and write the page and the viewer's
    file to `profile/STEP/` there, or to `profile/STEP-2/` and so on if that step has a trace. Nothing else in the run directory changes:
    the updated state is thrown away.

    Raises UserError: it is no run, these are not its devices, or its data cannot be read.
    """
    config = open_run(run_dir).trained
    enable_compilation_cache()
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)  # or a program of an older source would name its own places
    if config.memory.offload_state is not None and config.memory.offload_state.on_nvme:
        raise UserError(f"{run_dir} keeps its state in files, which steps would overwrite: profile it as it runs, with run.profile.")
    check_devices(config.cluster, config.mesh.slices, jax.devices())
    data = open_data(config, held_out=False).train
    traced = config.model_copy(update={"run": config.run.model_copy(update={"profile": ProfileConfig()})})
    program = build_program(traced, build_mesh(config))
    place = config.checkpoint.dir or RunDirectory(run_dir, primary=False).checkpoints
    start = restore_or_init(program, Checkpoints(place, config.checkpoint, identity(config, data.tokenizer_hash)))
    first = max(0, min(start.step, config.total_steps - WARM_UP - steps))  # of a finished run the last batches
    profiles = RunDirectory(run_dir, primary=False).profiles
    folder = _unused_folder(profiles, start.step)  # before a step: no process has written a trace yet
    program.compile_from(first)
    batches = data.batches(first, program.batch_sharding, first + WARM_UP + steps)
    try:
        _record(program, start, batches, steps, folder)
    finally:
        batches.close()
    text = program.step.as_text() if isinstance(program.step, jax.stages.Compiled) else ""
    predicted, factor, note = predict(config, text or "")
    facts = Facts(
        title=f"{run_dir.resolve().name}, step {start.step:,}",
        steps=steps,
        step=start.step,
        hardware=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        predicted=predicted,
        factor=factor,
        prediction_note=note,
        notes=(f"{WARM_UP} steps ran before the trace. The state was thrown away: no checkpoint has changed.",),
    )
    profile = reduce_trace(folder / TRACE, folder, facts)
    return Profiled(folder / PAGE, start.step, profile)


def _unused_folder(profiles: Path, step: int) -> Path:
    """Folder for a trace of that step, next to the traces of the running job and of earlier commands."""
    names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
    return profile_folder(profiles, next(name for name in names if not any((profiles / name).rglob(TRACE))))


def _record(program: Program, start: Start, batches: Any, steps: int, folder: Path) -> None:
    """Run the steps, the last `steps` of them in a trace. Devices are idle at both of its ends."""
    state = start.state
    with jax.set_mesh(program.mesh):
        for _ in range(WARM_UP):
            state, _ = program.step(state, batches.get())
        jax.block_until_ready(state)
        try:
            start_trace(folder)
        except OSError as error:
            raise error_kind(error)(f"{folder} cannot be written ({error.strerror or error}): the profile belongs there.") from error
        before = None  # metrics of the update before
        try:
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(f"{HOST_MARK}data_wait"):
                    batch = batches.get()
                with jax.profiler.TraceAnnotation(f"{HOST_MARK}step"):
                    state, metrics = program.step(state, batch)
                    jax.block_until_ready(before)  # while this one runs, as in training: devices are not idle meanwhile
                    before = metrics
            jax.block_until_ready(state)
        finally:
            stop_trace(folder)
