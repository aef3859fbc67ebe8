"""A run from its config to its report: joins what the layers below build separately."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
from rich.console import Console

import maxlm
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.errors import first_line
from maxlm.config import Config, UserError
from maxlm.config.errors import ExitCode
from maxlm.config.loader import dump, flatten
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.prepare import prepare
from maxlm.data.tokenizer_store import keep_tokenizer
from maxlm.models import count_parameters
from maxlm.models.parameters import Parameters
from maxlm.parallel import build_mesh
from maxlm.runtime import cluster, deadline, lock, progress_file
from maxlm.runtime.changes import changes, lost_checkpoints
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.digests import code_digest, digest
from maxlm.runtime.expected import check_cluster
from maxlm.runtime.jax_setup import keep_compiled_programs, look_for_devices
from maxlm.runtime.signals import StopSignal
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.observer import Event, Observer, Observers
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory, unwritable
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.telemetry.wandb_observer import WandbObserver, check_wandb
from maxlm.training import fits
from maxlm.training.loop import Outcome, Session, Start, restore_or_init, train
from maxlm.training.program import Program, build_program

EXIT_CODES = {"done": ExitCode.DONE, "nothing_left": ExitCode.DONE, "preempted": ExitCode.STOPPED, "unhealthy": ExitCode.UNHEALTHY}

# What a checkpoint must share with the run that continues it: the model, what defines the data order, and the shape of the state.
IDENTITY = (
    "train.seed",
    "train.global_batch",
    "data.seq_len",
    "data.shuffle",
    "data.mask_documents",
    "optimizer.name",
    "optimizer.outer.workers",
)

ENDS_SECONDS = 10.0  # beyond its grace time, in which a run that was asked to end is gone for certain


class Showing(Protocol):
    """Shows what the parameters of a finished run can do; ends early once `asked()`."""

    def __call__(
        self, config: Config, directory: Path, params: Parameters, model_state: Parameters, console: Console, *, asked: Callable[[], bool]
    ) -> None: ...


def run(config: Config, phases: Phases, show: Showing, named: Mapping[str, str] | None = None) -> int:
    """Train as `config` says; returns the process's exit code. `show` is called at the end of a finished run, `named` is what the command
    line says of the cluster.

    Raises UserError before anything is written if the config cannot be honoured.
    """
    if config.wandb is not None:
        check_wandb(config.wandb.project)
    look_for_devices()
    say = functools.partial(phases.console.print, markup=False, highlight=False, soft_wrap=True)
    with cluster.joined(named or {}, say) as here, RunLog() as log, _locked(config, say), fits.explain_out_of_memory("training"):
        return _run(config, phases, show, here, log)


def _run(config: Config, phases: Phases, show: Showing, here: Cluster, log: RunLog) -> int:
    goodput = Goodput(began=phases.began)
    _check_machine(config, phases, here)
    data, held_out = _open_alike(config, phases)
    program = build_program(config, build_mesh(config))
    directory = RunDirectory(Path(config.run.dir) / config.run.name, phases.primary)
    checkpoints = _checkpoints(config, directory, data)
    start = _start(config, phases, program, checkpoints, _processes_here(here))
    if config.checkpoint.dir is not None:
        checkpoints.claim()
    RunDirectory.create(config.run.dir, config.run.name, primary=phases.primary)
    log.write_to(directory.log if phases.primary else None)
    deadline.stacks_to(directory.path / f"stacks-{jax.process_index()}.txt")
    with _stopping() as stop:  # to the very end, so that a signal cannot cost the report
        with _observing(config, directory, phases.console, phases.primary) as observers:
            start = _record_start(config, directory, data, start)
            facts = _facts(config, here.description, directory.path) | {"startup_s": round(phases.seconds(), 3)}
            observers.on_event(Event("start", start.step, data=facts))
            outcome = train(Session(program, data, held_out, checkpoints, observers, goodput, stop, stop.gives_up), start)
            summary = {"reason": outcome.status, "message": outcome.message, "goodput": goodput.summary(), "eval_loss": outcome.eval_loss}
            observers.on_event(Event("stop", outcome.step, data=summary))
        checkpoints.close()
        if phases.primary:
            _conclude(config, directory, phases.console, outcome, functools.partial(show, asked=lambda: stop.asked is not None))
    return EXIT_CODES[outcome.status]


def _check_machine(config: Config, phases: Phases, here: Cluster) -> None:
    """Refuse what the devices that are here cannot do, before anything is built. Raises UserError, on all hosts alike where they differ."""
    with phases("looking for devices"):
        keep_compiled_programs()
    if jax.process_count() > 1:
        cluster.agree({"maxlm": f"{maxlm.__version__} ({code_digest()})", "jax": jax.__version__, "config": digest(dump(config))})
    phases.primary = jax.process_index() == 0
    progress_file.joined(here.hosts)
    check_cluster(config, jax.devices())
    fits.check(config, dict(build_mesh(config).shape), jax.devices(), _processes_here(here))


def _processes_here(here: Cluster) -> int:
    """Processes of this host, which share its memory."""
    return max(here.hosts.count(here.hosts[jax.process_index()]), 1)


def _checkpoints(config: Config, directory: RunDirectory, data: Pipeline) -> Checkpoints:
    """The checkpoints of this run. Raises UserError if hosts do not share their folder, or if those that were saved are gone."""
    folder = config.checkpoint.dir or str(directory.checkpoints)
    cluster.check_shared(folder, "checkpoint.dir" if config.checkpoint.dir else "run.dir")
    checkpoints = Checkpoints(folder, config.checkpoint, identity(config, data.tokenizer_hash))
    gone = checkpoints.latest() is None and directory.primary
    problem = lost_checkpoints(directory, folder, checkpoints.strays()) if gone else ""
    cluster.agree({}, UserError(problem) if problem else None)
    return checkpoints


def _start(config: Config, phases: Phases, program: Program, checkpoints: Checkpoints, processes_here: int) -> Start:
    """Restore or initialize the state, with the step compiled. A foreign checkpoint is refused before anything is written beside it."""
    restoring = "restoring the newest checkpoint and " if checkpoints.latest() is not None else ""
    with phases(f"{restoring}compiling the step"):
        start = restore_or_init(program, checkpoints)
        if start.step < config.total_steps:
            fits.check_compiled(program.step, jax.local_devices()[0], processes_here)
    return start


def _record_start(config: Config, directory: RunDirectory, data: Pipeline, start: Start) -> Start:
    """Keep config and tokenizer with the run. Returns `start`, with what has changed since the attempt that wrote its checkpoint.

    With nothing left to train, the config stays that of the steps that were trained.
    """
    if start.step >= config.total_steps and directory.config.is_file():
        return start
    if directory.primary and start.restored is not None:
        changed = changes(directory, config, start, data.fingerprint)
        start = replace(start, restored={**start.restored, "changed": changed} if changed else start.restored)
    directory.write_config(dump(config))
    if directory.primary:
        keep_tokenizer(config.data.store or config.data.mixture[0].store, directory.path / "tokenizer")
    return start


def open_data(config: Config) -> tuple[Pipeline, Pipeline | None]:
    """The training batches, and the held-out ones if evaluation is on. Raises UserError for a store that cannot be used."""
    create = functools.partial(
        Pipeline.create, config.data, global_batch=config.train.global_batch, seed=config.train.seed, vocab_size=config.model.vocab_size
    )
    return create(), create(split="eval") if config.train.eval_batches > 0 else None


def identity(config: Config, tokenizer_hash: str) -> dict[str, str]:
    """Field -> value of what must not change under a checkpoint."""
    values = {f"model.{key}": value for key, value in flatten(config.model.model_dump(mode="json"))}
    values |= {key: value for key, value in flatten(config.model_dump(mode="json")) if key in IDENTITY}
    return {**{key: str(value) for key, value in values.items()}, "tokenizer": tokenizer_hash}


def _open_alike(config: Config, phases: Phases) -> tuple[Pipeline, Pipeline | None]:
    """`open_data` on every host, prepared before if it may be. Raises UserError on all of them if one cannot, or reads other tokens."""
    opened, problem = None, None
    try:
        if config.data.prepare is not None:
            phases.say("preparing the data")
            _prepare(config)
        with phases("reading the data"):
            opened = open_data(config)
    except UserError as error:
        problem = error
    cluster.agree({"data store": opened[0].fingerprint[:12] if opened else ""}, problem)
    assert opened is not None, "what could not be opened was told"
    return opened


def _prepare(config: Config) -> None:
    if jax.process_count() == 1:
        prepare(config.data)
    elif not Path(config.data.store or "", "store.json").exists():
        raise UserError(
            f"data.store = {config.data.store} is not prepared: on several hosts run `maxlm data prepare` once before training."
        )


def _facts(config: Config, joined: str, folder: Path) -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "parameters": count_parameters(config.model),
        "devices": jax.device_count(),
        "device_kind": first.device_kind,
        "processes": jax.process_count(),
        "total_steps": config.total_steps,
        "total_tokens": config.total_steps * config.tokens_per_step,
        "folder": str(folder),
        "version": maxlm.__version__,
        "cluster": joined,
    }


@contextlib.contextmanager
def _observing(config: Config, directory: RunDirectory, console: Console, primary: bool) -> Iterator[Observers]:
    """Observers that are closed, however the block ends; what they could not write is told."""
    active: list[Observer] = [FileObserver(directory), ConsoleObserver(config.total_steps, primary=primary, console=console)]
    if progress_file.VARIABLE in os.environ:
        active.append(progress_file.AttemptObserver(os.environ[progress_file.VARIABLE]))
    if config.run.tensorboard:
        active.append(TensorBoardObserver(directory))
    if config.wandb is not None and primary:
        active.append(WandbObserver(config.wandb.project, directory, config.model_dump(mode="json")))
    observers = Observers(active)
    try:
        yield observers
    finally:
        for problem in observers.close():
            console.print(problem, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _stopping() -> Iterator[StopSignal]:
    stop = StopSignal()
    try:
        yield stop
    finally:
        stop.close()


@contextlib.contextmanager
def _locked(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """No other run writes in the directories of this one, which can be written. A run that was asked to end is given its grace time.

    Raises UserError in all processes alike.
    """
    places = {(Path(config.run.dir) / config.run.name).resolve(): "run.dir"}
    if config.checkpoint.dir is not None and "://" not in config.checkpoint.dir:
        places.setdefault(Path(config.checkpoint.dir).resolve(), "checkpoint.dir")  # by two names it would wait for itself
    with contextlib.ExitStack() as locks:
        problem = None
        try:
            for place, field in places.items() if jax.process_index() == 0 else ():
                locks.enter_context(lock.held(place, field, deadline.grace_seconds() + ENDS_SECONDS, say))
        except UserError as error:
            problem = error
        except OSError as error:
            problem = unwritable(error, field, config.run.dir if field == "run.dir" else str(place))
        cluster.agree({}, problem)
        yield


def _conclude(config: Config, directory: RunDirectory, console: Console, outcome: Outcome, show: Callable[..., None]) -> None:
    """Write the report, show what the model can do, and say where the report is. Training is over: no failure here changes its outcome."""
    try:
        told = f"report: {write_report([directory.path], directory.report)}"
    except Exception as error:
        told = f"the report cannot be written ({error}); make it with `maxlm report {directory.path}`"
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if outcome.status in ("done", "nothing_left") and outcome.state is not None and jax.process_count() == 1:
        try:
            show(config, directory.path, outcome.state.params, outcome.state.model_state, console)
        except Exception as error:
            logging.getLogger(__name__).info("the samples failed", exc_info=True)
            say(f"no samples of the model: {error if isinstance(error, UserError) else first_line(error)}")
        if config.run.sample_prompts:
            console.rule(style="dim")
    say(told)
