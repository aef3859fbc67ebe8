"""A run from its config to its report: joins what the layers below build separately."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import maxlm
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.cluster import worst
from maxlm.config import Config, UserError
from maxlm.config.errors import ExitCode, UnavailableError
from maxlm.config.loader import dump, flatten
from maxlm.data.kept import keep_tokenizer
from maxlm.data.pipeline import Pipeline
from maxlm.data.prepare import prepare
from maxlm.models import count_parameters
from maxlm.models.parameters import Parameters
from maxlm.parallel import build_mesh
from maxlm.runtime import attempt, cluster
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.digests import code_digest, digest
from maxlm.runtime.jax_setup import keep_compiled_programs, look_for_devices
from maxlm.runtime.signals import StopSignal
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.observer import Event, Observer, Observers
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.training.loop import Outcome, Session, restore_or_init, train
from maxlm.training.program import build_program

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


Showing = Callable[[Config, Path, Parameters, Console], None]


def run(config: Config, console: Console, show: Showing, named: Mapping[str, str] | None = None) -> int:
    """Train as `config` says; returns the process's exit code. `show` is called with the parameters of a finished run,
    `named` is what the command line says of the cluster.

    Raises UserError before anything is written if the config cannot be honoured.
    """
    goodput = Goodput()
    look_for_devices()
    with (
        cluster.joined(named or {}, functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)) as here,
        RunLog() as log,
    ):
        return _run(config, console, show, goodput, here, log)


def _run(config: Config, console: Console, show: Showing, goodput: Goodput, here: Cluster, log: RunLog) -> int:
    keep_compiled_programs()
    if jax.process_count() > 1:
        cluster.agree({"maxlm": f"{maxlm.__version__} ({code_digest()})", "jax": jax.__version__, "config": digest(dump(config))})
    primary = jax.process_index() == 0
    attempt.joined(here.hosts)
    mesh = build_mesh(config)
    data, held_out = _open_alike(config)
    program = build_program(config, mesh)
    directory = RunDirectory(Path(config.run.dir) / config.run.name, primary)
    saved = config.checkpoint.dir or str(directory.checkpoints)
    cluster.check_shared(saved, "checkpoint.dir" if config.checkpoint.dir else "run.dir")
    checkpoints = Checkpoints(saved, config.checkpoint, identity(config, data.tokenizer_hash))
    start = restore_or_init(program, checkpoints)  # a foreign checkpoint is refused before anything is written beside it
    if config.checkpoint.dir is not None:
        checkpoints.claim()
    RunDirectory.create(config.run.dir, config.run.name, primary=primary)
    log.write_to(directory.log if primary else None)
    with _observing(config, directory, console, primary) as observers, _stopping() as stop:
        directory.write_config(dump(config))
        if primary:
            keep_tokenizer(config.data.store or config.data.mixture[0].store, directory.path / "tokenizer")
        observers.on_event(Event("start", start.step, data=_facts(config, here.description)))
        outcome = train(Session(program, data, held_out, checkpoints, observers, goodput, stop), start)
        summary = {"reason": outcome.status, "message": outcome.message, "goodput": goodput.summary(), "eval_loss": outcome.eval_loss}
        observers.on_event(Event("stop", outcome.step, data=summary))
    checkpoints.close()
    if primary:
        _conclude(config, directory, console, outcome, show)
    return EXIT_CODES[outcome.status]


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


def _open_alike(config: Config) -> tuple[Pipeline, Pipeline | None]:
    """`open_data` on every host, prepared before if it may be. Raises UserError on all of them if one cannot, or reads other tokens."""
    opened, problem, may_pass = None, "", False
    try:
        if config.data.prepare is not None:
            _prepare(config)
        opened = open_data(config)
    except UserError as error:
        problem, may_pass = str(error), isinstance(error, UnavailableError)
    may_pass = bool(worst(may_pass))  # of all processes
    try:
        cluster.agree({"data store": opened[0].fingerprint[:12] if opened else ""}, problem)
    except UserError as error:
        raise (UnavailableError(str(error)) if may_pass else error) from None
    assert opened is not None, "what could not be opened was told"
    return opened


def _prepare(config: Config) -> None:
    if jax.process_count() == 1:
        prepare(config.data)
    elif not Path(config.data.store or "", "store.json").exists():
        raise UserError(
            f"data.store = {config.data.store} is not prepared: on several hosts run `maxlm data prepare` once before training."
        )


def _facts(config: Config, joined: str) -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "parameters": count_parameters(config.model),
        "devices": jax.device_count(),
        "device_kind": first.device_kind,
        "processes": jax.process_count(),
        "total_steps": config.total_steps,
        "version": maxlm.__version__,
        "cluster": joined,
    }


@contextlib.contextmanager
def _observing(config: Config, directory: RunDirectory, console: Console, primary: bool) -> Iterator[Observers]:
    """Observers that are closed, however the block ends."""
    active: list[Observer] = [FileObserver(directory), ConsoleObserver(config.total_steps, primary=primary, console=console)]
    if attempt.VARIABLE in os.environ:
        active.append(attempt.AttemptObserver(os.environ[attempt.VARIABLE]))
    if config.run.tensorboard:
        active.append(TensorBoardObserver(directory))
    observers = Observers(active)
    try:
        yield observers
    finally:
        observers.close()


@contextlib.contextmanager
def _stopping() -> Iterator[StopSignal]:
    stop = StopSignal()
    try:
        yield stop
    finally:
        stop.close()


def _conclude(config: Config, directory: RunDirectory, console: Console, outcome: Outcome, show: Showing) -> None:
    """Show what the model can do, write the report, and say where it is."""
    if outcome.status in ("done", "nothing_left") and outcome.state is not None and jax.process_count() == 1:
        show(config, directory.path, outcome.state.params, console)
    try:
        told = f"report: {write_report([directory.path], directory.report)}"
    except Exception as error:  # the run is done and saved, and other hosts wait for this one to end
        told = f"the report cannot be written ({error}); make it with `maxlm report {directory.path}`"
    console.rule(style="dim")
    console.print(told, markup=False, highlight=False, soft_wrap=True)
