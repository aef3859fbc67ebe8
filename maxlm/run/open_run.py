"""All that a run opens before it trains: its machine, data, program, tasks, checkpoints and first state. What is wrong with any of them is
found here, on all hosts alike, before anything is written.
"""

import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.extend.backend import get_backend
from jax.sharding import Mesh

import maxlm
from maxlm.base.console import print_line
from maxlm.base.errors import ConfigError
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.memory import MemoryCopies
from maxlm.cluster import agree, progress_file
from maxlm.cluster.cluster import Cluster
from maxlm.config import Config, UserError, extensions
from maxlm.config.capability import without
from maxlm.config.loader import dump
from maxlm.config.table import blamed, built_with_records, identity, implementations
from maxlm.parallel import build_mesh
from maxlm.run import elastic, frozen
from maxlm.run.consistency import check_devices, check_shared, code_digest, digest, machine_facts
from maxlm.run.jax_setup import enable_compilation_cache
from maxlm.run.open_data import OpenedData, open_data_on_all_hosts
from maxlm.run.resume_checks import lacking_extensions, lost_checkpoints
from maxlm.supervision.watchdog import Watchdog
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Observer, Observers
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import fits
from maxlm.training.loop import restore_or_init
from maxlm.training.opening import Opening
from maxlm.training.program import Program, build_program
from maxlm.training.rollback import Journal
from maxlm.training.session import Init, Start, Tasks
from maxlm.training.step import TrainState

_log = logging.getLogger(__name__)


class OpenTasks(Protocol):
    """Opens the tasks of `evaluation`. `goes_on`: the run has a checkpoint. Raises UserError for one that is wrong; writes nothing before
    it runs them.
    """

    def __call__(self, config: Config, mesh: Mesh, folder: Path | None, *, goes_on: bool) -> Tasks: ...


@dataclass(frozen=True)
class Given:
    """Parts of a run that the calling program gives: further observers, and batches in place of token stores."""

    observers: tuple[Observer, ...] = ()
    open_data: Callable[[Config], OpenedData] | None = None


@dataclass(frozen=True)
class RunContext:
    """Shared by all parts of a run. `asked`: the config for all hosts; `config`: for those that are present; `observers`: once there are
    some; `compilations`: of this process; `given`: by the calling program.
    """

    asked: Config
    config: Config
    cluster: Cluster
    phases: Phases
    goodput: Goodput
    watchdog: Watchdog
    compilations: Compilations
    observers: Observers
    given: Given = Given()

    @property
    def primary(self) -> bool:
        """True for the process that writes the run directory, once the processes have joined."""
        return self.phases.primary

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(Path(self.config.run.dir) / self.config.run.name, self.primary)

    def say(self, line: str) -> None:
        """Print a line on the console."""
        print_line(self.phases.console, line)

    def follow(self) -> None:
        """Let the watchdog follow the run. Its operations take as long as in earlier attempts with the same config on the same devices."""
        device = jax.devices()[0].device_kind
        layout = digest(f"{jax.device_count()} {device} {jax.process_count()} {dump(self.config)}")
        self.watchdog.follow(self.goodput, self.directory, layout)


@dataclass(frozen=True)
class OpenRun:
    """Everything that a run works with. `init` makes the first state."""

    context: RunContext
    data: OpenedData
    program: Program
    tasks: Tasks | None
    checkpoints: Checkpoints
    held: Mapping[str, Any]  # what observers have opened, by the keys of their sections
    journal: Journal
    start: Start
    init: Init

    @property
    def config(self) -> Config:
        """The config for the hosts that are present."""
        return self.context.config

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return self.context.directory

    @property
    def trains(self) -> bool:
        """True if steps are left."""
        return self.start.step < self.config.total_steps


def open_run(context: RunContext, open_tasks: OpenTasks | None) -> OpenRun:
    """Open the run on the hosts that are present. Raises UserError, in all processes alike."""
    here, phases = context.cluster, context.phases
    config = elastic.on_present(context.asked, here)
    context = replace(context, config=config)
    with elastic.waiting_if_too_large(here):
        _check_machine(context)
    if here.absent and phases.primary:
        context.say(elastic.summary(context.asked.mesh, config.mesh, (context.asked.train.microbatches, config.train.microbatches), here))
    data = open_data_on_all_hosts(config, phases) if context.given.open_data is None else context.given.open_data(config)
    if loaded := extensions.facts(config.extensions):
        agree.on_all(lambda: frozen.check_unchanged(loaded))
    context.follow()
    program = build_program(config, build_mesh(config))
    context, parts = _openings(context, program)
    config, directory = context.config, context.directory
    checkpoints = _checkpoints(context, parts, data.train.tokenizer_hash)
    tasks = None if open_tasks is None else _open_tasks_on_all_hosts(open_tasks, context, program, goes_on=checkpoints.latest() is not None)
    held = open_observers(context)
    leave_out = tuple(itertools.chain(*(one.leave_out for one in parts)))
    journal = Journal(directory.roll_backs, primary=phases.primary, leave_out=leave_out)
    with elastic.waiting_if_too_large(here), checkpoints.folder.one_listing():
        start, init = _start(context, parts, program, checkpoints, journal)
    if start.step < config.total_steps:
        for line in data.train.go_on(start.position, start.left_out):
            if phases.primary:
                _log.warning("%s", line)
        data.train.check_length(config.total_steps)
    return OpenRun(context, data, program, tasks, checkpoints, held, journal, start, init)


def open_observers(context: RunContext) -> dict[str, Any]:
    """Open the observers on the primary process: section -> its open state. Raises UserError on all processes if one cannot open it."""
    held, warn = dict[str, Any](), functools.partial(print_line, context.phases.console)
    found = list(implementations(context.config, "observers"))

    def open_here() -> None:
        for one, observer, section in found if context.primary else ():
            with blamed(one, f"open of observers {observer.__qualname__}"):
                held[one.key] = observer.open(section, context.directory, warn)

    if found:
        agree.on_all(open_here)
    return held


def _check_machine(context: RunContext) -> None:
    """Check versions, devices and memory before anything is built. Raises UserError, on all hosts alike where they differ."""
    config, phases, here = context.config, context.phases, context.cluster
    with phases("looking for devices"):
        enable_compilation_cache()
    if jax.process_count() > 1:
        facts = {
            **extensions.facts(config.extensions),
            "maxlm": f"{maxlm.__version__} ({code_digest()})",
            **machine_facts(),
            "config": digest(dump(config)),
        }
        agree.require_equal({**facts, "platform": " ".join(get_backend().platform_version.split())})
    phases.primary = jax.process_index() == 0
    progress_file.record(hosts=here.hosts)
    check_devices(config.cluster, config.mesh.slices, jax.devices())
    fits.check(config, dict(build_mesh(config).shape), jax.devices(), here.local_processes)


def _checkpoints(context: RunContext, parts: Sequence[Opening], tokenizer_hash: str) -> Checkpoints:
    """Open the checkpoints of this run. Raises UserError if hosts do not share their folder, or if saved ones are missing."""
    config, directory = context.config, context.directory
    folder = config.checkpoint.dir or str(directory.checkpoints)
    check_shared(folder, "checkpoint.dir" if config.checkpoint.dir else "run.dir")
    checkpoints = Checkpoints(folder, config.checkpoint, identity(config, tokenizer_hash))
    for one in parts:
        one.keep_copies(checkpoints, context.cluster.hosts, os.getppid() if progress_file.VARIABLE in os.environ else 0)
    if checkpoints.latest() is None:
        _refuse_if_lost(checkpoints, directory)
    else:
        _refuse_without_extensions(checkpoints, config.extensions)
    return checkpoints


def _refuse_without_extensions(checkpoints: Checkpoints, names: Sequence[str] | None) -> None:
    """Raise UserError in all processes if the newest checkpoint was written with an extension that is not among `names`."""

    def look() -> None:
        steps = checkpoints.steps() if jax.process_index() == 0 else []
        if steps and (text := lacking_extensions(checkpoints.position_here(steps[-1]) or {}, names)):
            raise UserError(f"{checkpoints.directory}: {text}, or use another run.name. Nothing was changed.")

    agree.on_all(look, explain=frozen.explained)


def _refuse_if_lost(checkpoints: Checkpoints, directory: RunDirectory) -> None:
    """Raise UserError in all processes if the run has saved before and there is no checkpoint any more: it would begin anew."""

    def look() -> None:
        if directory.primary and not checkpoints.steps():
            text = lost_checkpoints(directory, str(checkpoints.directory), checkpoints.strays())
            if text:
                raise frozen.may_pass(UserError(text))

    agree.on_all(look, explain=frozen.explained)


def prepare_memory(memory: MemoryCopies, program: Program, local_processes: int) -> None:
    """Raises UserError on all hosts if one has no room for its copies, or cannot write them."""
    agree.on_all(lambda: memory.prepare(program.abstract_state, local_processes))


def _start(
    context: RunContext, parts: Sequence[Opening], program: Program, checkpoints: Checkpoints, journal: Journal
) -> tuple[Start, Init]:
    """Compile the step, and restore or initialize the state; with the function that initializes it. A foreign checkpoint is refused before
    anything is written next to it.
    """
    config, goodput, local_processes = context.config, context.goodput, context.cluster.local_processes
    init, reading = _first_state(parts, program, checkpoints)
    restoring = "restoring the newest checkpoint and " if checkpoints.latest() is not None else reading
    with context.phases(f"{restoring}compiling the step"), goodput.measure("compile"):
        anew = functools.partial(begin_anew, init, checkpoints, context.directory)
        start = restore_or_init(program, checkpoints, anew, journal, goodput)
        for one in parts:
            one.check_start(start)
        if start.step < config.total_steps:
            program.compile_from(start.step)
            fits.check_compiled(program.step, jax.local_devices()[0], local_processes)
            for one in parts:
                one.check_compiled(program, fits.memory_of_a_device(jax.local_devices()[0], local_processes))
    return start, init


def begin_anew(init: Init, checkpoints: Checkpoints, directory: RunDirectory) -> TrainState | Start:
    """The first state of a run that has no checkpoint, or only of steps that were taken back. Raises UserError in all processes if the run
    has saved before: a copy in memory can hide that until it turns out not to be usable.
    """
    _refuse_if_lost(checkpoints, directory)
    return init()


def _first_state(parts: Sequence[Opening], program: Program, checkpoints: Checkpoints) -> tuple[Init, str]:
    """The function that makes the state this run begins with, and what it reads, in words. Raises UserError, on all hosts alike, if they
    need the source and one lacks it.
    """
    source = next(filter(None, (one.first_state() for one in parts)), None)
    if source is None:
        return program.init, ""
    if checkpoints.latest() is None:
        agree.on_all(source.fingerprint, lambda found: {source.setting: found})  # before anyone waits for it
    return source.init(program, checkpoints.identity), f"reading {source.reads} and "


def _openings(context: RunContext, program: Program) -> tuple[RunContext, list[Opening]]:
    """The parts that sections take in opening the run; `context` without sections that a mesh of fewer hosts cannot honour. Raises
    ConfigError for those that the mesh of all hosts cannot.
    """
    parts, config = list[Opening](), context.config
    for one, part in built_with_records(config, "opening"):
        try:
            part.check_mesh(program)
            parts.append(part)
        except ConfigError as error:
            if not context.cluster.absent or not one.full_mesh_rules:
                raise
            context.phases.say(f"no {part.title} until all hosts are back ({error})")
            config = without(config, one.key)
    return replace(context, config=config), parts


def _open_tasks_on_all_hosts(open_tasks: OpenTasks, context: RunContext, program: Program, *, goes_on: bool) -> Tasks:
    """The tasks of `config.evaluation`. Raises UserError on all hosts if one cannot read them, or reads others."""
    asked = lambda opened: {f"task {name}": digest for name, digest in opened.asked.items()}  # noqa: E731

    def open_here() -> Tasks:
        folder = context.directory.evaluations if context.primary else None
        opened = open_tasks(context.config, program.mesh, folder, goes_on=goes_on)
        frozen.check_unchanged(asked(opened))
        return opened

    return agree.on_all(open_here, asked, frozen.explained)
