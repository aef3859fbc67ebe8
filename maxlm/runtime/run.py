"""A training run from its config to its report: assembles the layers below."""

import contextlib
import functools
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh
from rich.console import Console

import maxlm
from maxlm.checkpoint import Checkpoints, multihost
from maxlm.checkpoint.errors import first_line
from maxlm.checkpoint.memory import MemoryCopies
from maxlm.config import Config, UserError, directory_lock
from maxlm.config.errors import ConfigError, ExitCode, UnavailableError, as_user_error
from maxlm.config.loader import dump, flatten
from maxlm.config.paths import is_remote
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.prepare import prepare as prepare_store
from maxlm.data.tokenizer import copy_tokenizer, open_tokenizer
from maxlm.models import count_parameters, count_trained
from maxlm.models.parameters import Parameters
from maxlm.objectives import CONTENT, build_objective, kind_of
from maxlm.parallel import build_mesh
from maxlm.runtime import cluster, deadline, elastic, progress_file
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.consistency import check_devices, check_shared, code_digest, digest, require_equal, require_same
from maxlm.runtime.jax_setup import enable_compilation_cache, select_platform
from maxlm.runtime.launch import NO_RESTART
from maxlm.runtime.metrics_port import metrics_server
from maxlm.runtime.ownership import Ownership
from maxlm.runtime.reference import attach_reference
from maxlm.runtime.resume_checks import changed_settings, lost_checkpoints
from maxlm.runtime.signals import StopSignal
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry.alert_delivery import check_alerts
from maxlm.telemetry.alerts import AlertObserver
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.ledger import read_ledger
from maxlm.telemetry.lifetime import Heartbeat
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.metric import charts_of
from maxlm.telemetry.observer import Event, Observer, Observers, StepRecord
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.prometheus import PrometheusObserver
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory, unwritable
from maxlm.telemetry.strict_json import read_objects
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.telemetry.wandb_observer import WandbObserver, check_wandb
from maxlm.training import bit_flips, findings, fits, integrity
from maxlm.training.integrity import Integrity, build_integrity
from maxlm.training.loop import restore_or_init, train
from maxlm.training.program import Program, build_program
from maxlm.training.rollback import Journal
from maxlm.training.session import Outcome, Session, Start, Tasks
from maxlm.training.start_from import begin_from, fingerprint
from maxlm.training.step import TrainState

EXIT_CODES = {
    "done": ExitCode.DONE,
    "nothing_left": ExitCode.DONE,
    "preempted": ExitCode.STOPPED,
    "unhealthy": ExitCode.UNHEALTHY,
    "corrupted": ExitCode.HOST_LOST,  # started again, best without the host that was named
}

# Settings that a checkpoint must share with the run that continues it, beside the model: those of the data order and the state's shape.
IDENTITY = (
    "train.seed",
    "train.global_batch",
    "data.seq_len",
    "data.shuffle",
    "data.mask_documents",
    "optimizer.name",
    "diloco.workers",
)

LOCK_FIX = "end that first, or choose another run.name or run.dir"
LOCK_MARGIN_SECONDS = 10.0  # beyond the grace time, in which a run that received a signal has ended for certain


class SamplePrinter(Protocol):
    """Prints samples of the parameters of a finished run; returns early once `stopped()`."""

    def __call__(
        self, config: Config, directory: Path, params: Parameters, model_state: Parameters, console: Console, *, stopped: Callable[[], bool]
    ) -> None: ...


class OpenTasks(Protocol):
    """Opens the tasks of `evaluation`. Raises UserError for one that is wrong; writes nothing before it runs them."""

    def __call__(self, config: Config, mesh: Mesh, folder: Path | None) -> Tasks: ...


class OpenedData(NamedTuple):
    """Batches for training, those that are held out if evaluation is on, and further held-out sets by name."""

    train: Pipeline
    held_out: Pipeline | None
    named: dict[str, Pipeline]

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """All of them: `train`, `eval` and `eval/NAME`."""
        held_out = {} if self.held_out is None else {"eval": self.held_out}
        return {"train": self.train, **held_out, **{f"eval/{name}": pipeline for name, pipeline in self.named.items()}}


class _ProgressObserver:
    """Records each logged step for the supervisor; nothing else, and keeps nothing open."""

    def on_step(self, record: StepRecord) -> None:
        progress_file.record(step=record.step)

    def on_event(self, event: Event) -> None: ...
    def close(self) -> None: ...


def run_training(
    config: Config,
    phases: Phases,
    print_samples: SamplePrinter,
    named: Mapping[str, str] | None = None,
    open_tasks: OpenTasks | None = None,
) -> int:
    """Train as configured; return the process's exit code. `named`: settings of the cluster on the command line. `open_tasks`: not None
    where `config.evaluation` is set.

    Raises UserError before anything is written if the config cannot be honoured.
    """
    if config.wandb is not None:
        check_wandb(config.wandb.project)
    if config.run.alerts is not None:
        check_alerts(config.run.alerts)
        progress_file.record(name=config.run.name, alerts=config.run.alerts.model_dump(mode="json"))
    select_platform()
    say = functools.partial(phases.console.print, markup=False, highlight=False, soft_wrap=True)
    goodput = Goodput(began=phases.began)
    with contextlib.ExitStack() as stack:
        with goodput.measure("wait_hosts"):
            joined = cluster.joined(named or {}, say, quorum_of=functools.partial(elastic.quorum_of, config, say))
            here = stack.enter_context(joined)
        watchdog = stack.enter_context(Watchdog(config.watchdog, here.group))
        log = stack.enter_context(RunLog())
        stack.enter_context(_locked(config, say))
        stack.enter_context(fits.explain_out_of_memory("training"))
        code = _run(config, phases, goodput, print_samples, open_tasks, here, log, watchdog)
        if code in NO_RESTART:
            here.finish(NO_RESTART[code])
        return code


def _run(
    asked: Config,
    phases: Phases,
    goodput: Goodput,
    print_samples: SamplePrinter,
    open_tasks: OpenTasks | None,
    here: Cluster,
    log: RunLog,
    watchdog: Watchdog,
) -> int:
    """`asked`: the config for all hosts, also if some are absent."""
    config = elastic.on_present(asked, here)
    with elastic.waiting_if_too_large(here):
        _check_machine(config, phases, here)
    if here.absent and phases.primary:
        phases.console.print(elastic.summary(asked, config, here), markup=False, highlight=False, soft_wrap=True)
    opened = _open_data_on_all_hosts(config, phases)
    data = opened.train
    watchdog.follow(goodput)
    program = build_program(config, build_mesh(config))
    config = _with_possible_checks(config, program, here, phases)
    directory = RunDirectory(Path(config.run.dir) / config.run.name, phases.primary)
    flips = bit_flips.from_environment(directory.path)
    tasks = None if open_tasks is None else _open_tasks_on_all_hosts(open_tasks, config, program, directory)
    checkpoints = _checkpoints(config, directory, data, here)
    server = metrics_server(config, directory, phases)
    leave_out = config.health.leave_out if config.health is not None else ()
    journal = Journal(directory.roll_backs, primary=phases.primary, leave_out=leave_out)
    with elastic.waiting_if_too_large(here):
        start, init = _start(config, phases, program, checkpoints, journal, here.local_processes, goodput)
    if config.checkpoint.dir is not None:
        checkpoints.claim()
    RunDirectory.create(config.run.dir, config.run.name, primary=phases.primary)
    log.write_to(directory.log if phases.primary else None)
    if checkpoints.memory is not None and start.step < config.total_steps:
        _prepare_memory(checkpoints.memory, program, here.local_processes)
    if config.objective is not None and config.objective.kind == "dpo" and start.step < config.total_steps:
        attach_reference(config, program, start, opened.pipelines, checkpoints.directory, phases, watchdog.progress.touch)
    owner = Ownership(checkpoints.directory) if asked.elastic is not None else None
    deadline.stacks_to(directory.path / f"stacks-{jax.process_index()}.txt")
    with contextlib.closing(StopSignal(here.regrouping)) as stop:  # until the end, so that a signal cannot prevent the report
        attempt = secrets.token_hex(8)
        beat = directory.heartbeat if phases.primary else None
        if phases.primary:
            progress_file.record(attempt=attempt, folder=str(directory.path.resolve()))
        beside = [PrometheusObserver(server, directory, goodput.summary)] if server is not None else []
        with observing(config, directory, phases.console, phases.primary, beside) as observers, Heartbeat(beat, attempt, goodput.summary):
            watchdog.observers, watchdog.folder = observers, directory.path
            here.when_larger(stop.request)
            start = _record_start(asked, directory, data, start)
            facts = _facts(config, here.description, directory.path) | {"startup_s": round(phases.seconds(), 3), "attempt": attempt}
            facts["restarts"] = sum(item.get("kind") == "start" for item in read_objects(directory.events)) if phases.primary else 0
            facts |= elastic.facts(config, here)
            facts["metrics"] = charts_of(program.metrics)
            observers.on_event(Event("start", start.step, data=facts))
            if flips is not None:
                bit_flips.inject(program, flips)
                reason = f"bits are flipped on purpose, as {bit_flips.VARIABLE} says"
                observers.on_event(Event("alarm", start.step, data={"cause": "bit_flips", "reason": reason}))
            checks = _integrity(config, program, directory, here, start, observers)
            watched = observers, goodput, stop, stop.abandon_batch
            session = Session(
                program, data, opened.held_out, checkpoints, *watched, opened.named, tasks, stop.received_anywhere,
                watchdog.progress, init, journal, directory.path if phases.primary else None, checks,
            )  # fmt: skip
            outcome = train(session if owner is None else replace(session, check_owner=owner.check), start)
            watchdog.stop()
            summary = {"reason": outcome.status, "message": outcome.message, "goodput": goodput.summary(), "eval_loss": outcome.eval_loss}
            hung = {"reason": "hung"} if watchdog.fired else {}
            regroup = outcome.status == "preempted" and bool(here.regrouping())
            observers.on_event(Event("stop", outcome.step, data=summary | hung | ({"regroup": True} if regroup else {})))
        checkpoints.close(remove_copies=outcome.status == "corrupted")
        progress_file.record(regroup=regroup)
        if phases.primary:
            stopped = functools.partial(print_samples, stopped=lambda: stop.received is not None)
            _conclude(config, program, directory, phases.console, outcome, stopped)
    return ExitCode.HUNG if watchdog.fired else EXIT_CODES[outcome.status]


def _check_machine(config: Config, phases: Phases, here: Cluster) -> None:
    """Check versions, devices and memory before anything is built. Raises UserError, on all hosts alike where they differ."""
    with phases("looking for devices"):
        enable_compilation_cache()
    if jax.process_count() > 1:
        require_equal({"maxlm": f"{maxlm.__version__} ({code_digest()})", "jax": jax.__version__, "config": digest(dump(config))})
    phases.primary = jax.process_index() == 0
    progress_file.record(hosts=here.hosts)
    check_devices(config, jax.devices())
    fits.check(config, dict(build_mesh(config).shape), jax.devices(), here.local_processes)


def _checkpoints(config: Config, directory: RunDirectory, data: Pipeline, here: Cluster) -> Checkpoints:
    """Open the checkpoints of this run. Raises UserError if hosts do not share their folder, or if saved ones are missing."""
    folder = config.checkpoint.dir or str(directory.checkpoints)
    check_shared(folder, "checkpoint.dir" if config.checkpoint.dir else "run.dir")
    checkpoints = Checkpoints(folder, config.checkpoint, identity(config, data.tokenizer_hash))
    if config.memory_checkpoints is not None:
        supervisor = os.getppid() if progress_file.VARIABLE in os.environ else 0
        checkpoints.add_memory(config.memory_checkpoints, here.hosts, supervisor)
    missing = checkpoints.latest() is None and directory.primary
    problem = lost_checkpoints(directory, folder, checkpoints.strays()) if missing else ""
    require_equal({}, UserError(problem) if problem else None)
    return checkpoints


def _prepare_memory(memory: MemoryCopies, program: Program, local_processes: int) -> None:
    """Raise UserError on all hosts if one has no room for its copies, or cannot write them."""
    problem = None
    try:
        memory.prepare(program.abstract_state, local_processes)
    except UserError as error:
        problem = error
    require_equal({}, problem)


def _start(
    config: Config,
    phases: Phases,
    program: Program,
    checkpoints: Checkpoints,
    journal: Journal,
    local_processes: int,
    goodput: Goodput,
) -> tuple[Start, Callable[[], TrainState]]:
    """Compile the step, and restore or initialize the state; with the function that initializes it. A foreign checkpoint is refused before
    anything is written beside it.
    """
    source = config.train.start_from
    fresh = "" if source is None else f"reading the parameters of {source.path} and "
    latest = checkpoints.latest()
    restoring = "restoring the newest checkpoint and " if latest is not None else fresh
    if source is not None and latest is None:
        require_same("train.start_from", functools.partial(fingerprint, source))  # before anyone waits for a host that lacks it
    with phases(f"{restoring}compiling the step"), goodput.measure("compile"):
        stored = None if source is None else open_tokenizer(config.data.store or config.data.mixture[0].store)
        init = program.init if source is None else functools.partial(begin_from, program, source, stored)
        start = restore_or_init(program, checkpoints, init, journal, goodput)
        if start.step < config.total_steps:
            fits.check_compiled(program.step, jax.local_devices()[0], local_processes)
            integrity.check_memory(program, fits.memory_of_a_device(jax.local_devices()[0], local_processes))
    return start, init


def _with_possible_checks(config: Config, program: Program, here: Cluster, phases: Phases) -> Config:
    """`config`, without checks that a mesh of fewer hosts cannot do. Raises ConfigError if the mesh of all hosts cannot."""
    try:
        integrity.check_mesh(config, program.mesh)
    except ConfigError as error:
        if not here.absent:
            raise
        phases.say(f"no checks for silent corruption until all hosts are back ({error})")
        return config.model_copy(update={"integrity": None})
    return config


def _integrity(
    config: Config, program: Program, directory: RunDirectory, here: Cluster, start: Start, observers: Observers
) -> Integrity | None:
    """The checks for silent corruption, compiled, if the config asks for them. All processes go on from what process 0 finds on record."""
    if config.integrity is None or start.step >= config.total_steps:
        return None
    record = multihost.text_from_process_0(json.dumps(findings.read(directory) if directory.primary else {}))
    found = findings.Findings(json.loads(record), directory)
    return build_integrity(program, here.hosts, found, start.step, observers.on_event)


def _record_start(config: Config, directory: RunDirectory, data: Pipeline, start: Start) -> Start:
    """Write config and tokenizer to the run directory. Return `start` with the settings changed since its checkpoint was written.

    With no steps left to train, the old config stays.
    """
    if start.step >= config.total_steps and directory.config.is_file():
        return start
    if directory.primary and start.restored is not None:
        changed = changed_settings(directory, config, start, data.fingerprint)
        start = replace(start, restored={**start.restored, "changed": changed} if changed else start.restored)
    directory.write_config(dump(config))
    if directory.primary:
        source = config.train.start_from
        beside = Path(source.path) / "tokenizer" if source is not None else None
        copy_tokenizer(config.data.store or config.data.mixture[0].store, directory.path / "tokenizer", beside)
    return start


def open_data(config: Config) -> OpenedData:
    """Open the training batches, and the held-out ones if evaluation is on. Raises UserError for an unusable store."""
    create = functools.partial(
        Pipeline,
        global_batch=config.train.global_batch,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        make_batch=build_objective(config).make_batch,
        content=CONTENT[kind_of(config)],
    )
    data, named = create(config.data), {}
    for name, store in config.data.eval.stores.items() if config.data.eval is not None else ():
        named[name] = create(config.data.model_copy(update={"store": store, "mixture": ()}), split="eval", field=f"data.eval.{name}")
        if named[name].tokenizer_hash != data.tokenizer_hash:
            fix = "prepare it with data.prepare.tokenizer.path of that tokenizer"
            raise ConfigError(f"data.eval.{name}", store, "has another tokenizer than the training data", fix)
    return OpenedData(data, create(config.data, split="eval") if config.train.eval_batches > 0 else None, named)


def identity(config: Config, tokenizer_hash: str) -> dict[str, str]:
    """Return field -> value of the settings that a checkpoint must match."""
    values = {f"model.{key}": value for key, value in flatten(config.model.model_dump(mode="json"))}
    values |= {key: value for key, value in flatten(config.model_dump(mode="json")) if key in IDENTITY}
    values |= {"ema": "set"} if config.ema is not None else {}  # its decay may change
    values |= {"objective.kind": kind_of(config)} if kind_of(config) != "next_token" else {}  # which is the same with no section
    fixed = {key: str(value) for key, value in values.items() if value is not None and key != "model.mtp.loss_weight"}
    return {**fixed, "tokenizer": tokenizer_hash}


def _open_tasks_on_all_hosts(open_tasks: OpenTasks, config: Config, program: Program, directory: RunDirectory) -> Tasks:
    """The tasks of `config.evaluation`. Raises UserError on all hosts if one cannot read them, or reads others."""
    opened, problem = None, None
    try:
        opened = open_tasks(config, program.mesh, directory.evaluations if directory.primary else None)
    except (UserError, OSError) as error:
        problem = as_user_error(error)
    require_equal({f"task {name}": asked for name, asked in opened.asked.items()} if opened else {}, problem)
    assert opened is not None, "a failure was raised above"
    return opened


def _open_data_on_all_hosts(config: Config, phases: Phases) -> OpenedData:
    """Prepare the data if configured, and open it. Raises UserError on all hosts if one cannot, or if their stores differ."""
    opened, problem = None, None
    try:
        if config.data.prepare is not None:
            phases.say("preparing the data")
            _prepare(config)
        with phases("reading the data"):
            opened = open_data(config)
    except (UserError, OSError) as error:
        problem = as_user_error(error)
    require_equal({f"{name} data": one.fingerprint[:12] for name, one in opened.pipelines.items()} if opened else {}, problem)
    assert opened is not None, "a failure was raised above"
    return opened


def _prepare(config: Config) -> None:
    if jax.process_count() == 1:
        prepare_store(config.data)
    elif not Path(config.data.store or "", "store.json").exists():
        raise UserError(
            f"data.store = {config.data.store} is not prepared: on several hosts run `maxlm data prepare` once before training."
        )


def _facts(config: Config, cluster_description: str, folder: Path) -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "parameters": count_parameters(config.model),
        "trained_parameters": count_trained(config.model),
        "devices": jax.device_count(),
        "device_kind": first.device_kind,
        "processes": jax.process_count(),
        "total_steps": config.total_steps,
        "total_tokens": config.total_steps * config.tokens_per_step,
        "folder": str(folder),
        "version": maxlm.__version__,
        "cluster": cluster_description,
    }


@contextlib.contextmanager
def observing(
    config: Config, directory: RunDirectory, console: Console, primary: bool, beside: Sequence[Observer] = ()
) -> Iterator[Observers]:
    """Observers, with those `beside`, closed however the block ends; prints the problems of those that failed."""
    active: list[Observer] = [ConsoleObserver(config.total_steps, primary=primary, console=console), *beside]
    if primary:
        active.append(FileObserver(directory))
    if progress_file.VARIABLE in os.environ:
        active.append(_ProgressObserver())
    if config.run.tensorboard and primary:
        active.append(TensorBoardObserver(directory))
    if config.run.alerts is not None and primary:
        active.append(
            AlertObserver(
                config.run.alerts,
                directory,
                report=lambda event: observers.on_event(event),
                ended=lambda cause: progress_file.record(alerted=cause),
            )
        )
    if config.wandb is not None and primary:
        active.append(WandbObserver(config.wandb.project, directory, config.model_dump(mode="json")))
    observers = Observers(active)
    try:
        yield observers
    finally:
        for problem in observers.close():
            console.print(problem, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _locked(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the directories that this run writes. A run that holds them and received a signal is given its grace time.

    Raises UserError in all processes alike: another run holds one, or one is not writable.
    """
    folders = {(Path(config.run.dir) / config.run.name).resolve(): "run.dir"}
    if config.checkpoint.dir is not None and not is_remote(config.checkpoint.dir):
        folders.setdefault(Path(config.checkpoint.dir).resolve(), "checkpoint.dir")  # under two names it would wait for itself
    with contextlib.ExitStack() as locks:
        problem = None
        try:
            for folder, field in folders.items() if jax.process_index() == 0 else ():
                locks.enter_context(directory_lock.locked(folder, field, deadline.grace_seconds() + LOCK_MARGIN_SECONDS, say, LOCK_FIX))
        except UserError as error:
            problem = error if config.elastic is None else UnavailableError(str(error))  # a host that is about to be found lost may hold it
        except OSError as error:
            problem = unwritable(error, field, config.run.dir if field == "run.dir" else str(folder))
        require_equal({}, problem)
        yield


def _conclude(
    config: Config, program: Program, directory: RunDirectory, console: Console, outcome: Outcome, print_samples: Callable[..., None]
) -> None:
    """Write the report, print samples and the report's path. Training is over: no failure here changes its outcome."""
    try:
        message = f"report: {write_report([directory.path], directory.report)}"
    except Exception as error:
        message = f"the report cannot be written ({error}); make it with `maxlm report {directory.path}`"
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if outcome.status in ("done", "nothing_left") and outcome.state is not None and jax.process_count() == 1:
        try:
            with deadline.allow(deadline.PROMPT):  # all is saved: a signal need not wait for a long sample
                state = program.readable(outcome.state)
                print_samples(config, directory.path, state.params, state.model_state, console)
        except Exception as error:
            logging.getLogger(__name__).info("the samples failed", exc_info=True)
            say(f"no samples of the model: {error if isinstance(error, UserError) else first_line(error)}")
        if config.samples is not None:
            console.rule(style="dim")
    with contextlib.suppress(OSError):
        say(str(read_ledger(directory)))
    say(message)
