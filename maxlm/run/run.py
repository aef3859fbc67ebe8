"""A training run from its config to its report: assembles the layers below."""

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

import maxlm
from maxlm.base.console import Console, print_line
from maxlm.base.errors import ExitCode, shell_command
from maxlm.base.metric import charts_of
from maxlm.base.strict_json import read_objects
from maxlm.checkpoint.errors import first_line
from maxlm.cluster import agree, cluster, deadline, progress_file
from maxlm.cluster.cluster import Cluster
from maxlm.cluster.signals import StopSignal
from maxlm.config import Config, UserError, extensions
from maxlm.config.loader import saved_text
from maxlm.config.table import blamed, build, implementations
from maxlm.data.given import GivenBatches
from maxlm.data.stops import turn_ends
from maxlm.data.tokenizer import copy_tokenizer, write_tokenizer
from maxlm.hardware.chips import PEAK_NAMES, MatmulFormat, chip_of
from maxlm.memory.spaces import needed_by
from maxlm.models import count_parameters, count_trained, mfu_format
from maxlm.models.parameters import Parameters
from maxlm.run import elastic, frozen
from maxlm.run.jax_setup import select_platform
from maxlm.run.open_run import Given, OpenRun, OpenTasks, RunContext, open_run, prepare_memory
from maxlm.run.ownership import locked, owning
from maxlm.run.reference import attach_reference
from maxlm.run.resume_checks import changed_settings
from maxlm.supervision.launch import NO_RESTART
from maxlm.supervision.watchdog import Watchdog
from maxlm.telemetry import predicted
from maxlm.telemetry.bill import JOULES_PER_TOKEN, Bill, Totals, rates_of, spent_before
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.console import ConsoleObserver
from maxlm.telemetry.course import surviving
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.gpus import visible_gpus
from maxlm.telemetry.ledger import read_ledger
from maxlm.telemetry.lifetime import Heartbeat
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.observer import Event, Observer, Observers, StepRecord
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.samples import append_samples
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.telemetry.unhealthy_hosts import to_replace
from maxlm.training import findings, fits
from maxlm.training.integrity import Integrity, build_integrity
from maxlm.training.loop import train
from maxlm.training.profiling import RunProfiler
from maxlm.training.program import Program
from maxlm.training.saved_run import TOKENIZER, SavedRun, copy_published, source_tokenizer
from maxlm.training.session import STOPPED, Outcome, Session, Start

EXIT_CODES = {
    "done": ExitCode.DONE,
    "nothing_left": ExitCode.DONE,
    "preempted": ExitCode.STOPPED,
    "interrupted": ExitCode.STOPPED,
    "unhealthy": ExitCode.UNHEALTHY,
    "corrupted": ExitCode.HOST_LOST,  # started again, best without the host that was named
}


class SamplePrinter(Protocol):
    """Prints and returns samples of the parameters of a finished run, by prompt; returns early once `stopped()`."""

    def __call__(
        self, saved: SavedRun, params: Parameters, model_state: Parameters, console: Console, *, stopped: Callable[[], bool]
    ) -> dict[str, str | None]: ...


class Ended(NamedTuple):
    """End of `run_training`: the exit code of a process that does nothing else, and how training ended."""

    code: int
    outcome: Outcome


StepPredictor = Callable[[Program], dict[str, Any]]  # figures as `telemetry.predicted` has them
Predictor = Callable[[Config, Sequence[str]], StepPredictor]  # of the host of each process, too


def run_training(
    config: Config,
    phases: Phases,
    print_samples: SamplePrinter,
    named: Mapping[str, str] | None = None,
    open_tasks: OpenTasks | None = None,
    predictor: Predictor | None = None,
    given: Given = Given(),
) -> Ended:
    """Train as configured. `named`: settings of the cluster on the command line. `open_tasks`: not None where `config.evaluation` is set;
    `predictor`: where `cost.calibration` is; `given`: by the calling program.

    Raises UserError before anything is written if the config cannot be honoured.
    """
    for one, observer, section in implementations(config, "observers"):
        with blamed(one, f"check of observers {observer.__qualname__}"):
            observer.check(section)
    if config.run.alerts is not None:
        progress_file.record(name=config.run.name, alerts=config.run.alerts.model_dump(mode="json"))
    select_platform()
    say = functools.partial(print_line, phases.console)
    goodput = Goodput(began=phases.began, mark=jax.profiler.TraceAnnotation)
    with contextlib.ExitStack() as stack:
        with goodput.measure(elastic.waiting_part(config.elastic)):
            joined = cluster.joined(named or {}, say, quorum_of=functools.partial(elastic.quorum_of, config, say))
            here = stack.enter_context(joined)
        watchdog = stack.enter_context(Watchdog(config.watchdog, here.group))
        log = stack.enter_context(RunLog())
        compilations = stack.enter_context(Compilations())
        stack.enter_context(locked(config.run, config.checkpoint, config.elastic, say))
        stack.enter_context(fits.explain_out_of_memory("training"))
        context = RunContext(config, config, here, phases, goodput, watchdog, compilations, Observers([]), given)
        ended = _run(context, print_samples, open_tasks, predictor, log)
        if ended.code in NO_RESTART:
            here.finish(NO_RESTART[ended.code])
        return ended


def _run(
    context: RunContext, print_samples: SamplePrinter, open_tasks: OpenTasks | None, predictor: Predictor | None, log: RunLog
) -> Ended:
    here, goodput, watchdog = context.cluster, context.goodput, context.watchdog
    predict = _on_all_hosts(predictor, context)
    run = open_run(context, open_tasks)
    config, directory, checkpoints = run.config, run.directory, run.checkpoints
    if config.checkpoint.dir is not None:
        checkpoints.claim()
    RunDirectory.create(config.run.dir, config.run.name, primary=directory.primary)
    log.write_to(directory.log if directory.primary else None)
    if checkpoints.memory is not None and run.trains:
        prepare_memory(checkpoints.memory, run.program, here.local_processes)
    concluded = _concluded(run)
    if config.objective_facts.reference and (run.trains or not concluded):
        touch = watchdog.progress.touch
        attach_reference(run.program, run.start, run.data.pipelines, checkpoints.directory, context.phases, touch)
    deadline.stacks_to(directory.path / f"stacks-{jax.process_index()}.txt")
    with contextlib.closing(StopSignal(here.regrouping)) as stop:  # until the end, so that a signal cannot prevent the report
        bill = _bill(run) if directory.primary else None
        outcome = _train(run, stop, bill, predict, concluded=concluded)
        with goodput.measure("save"):
            checkpoints.close(remove_copies=outcome.status == "corrupted")
            done_everywhere = not agree.max_over_processes(int(EXIT_CODES[outcome.status] != ExitCode.DONE))
        watchdog.stop()
        progress_file.record(regroup=_regroups(outcome, here), concluded=done_everywhere)
        if directory.primary:
            stopped = functools.partial(print_samples, stopped=lambda: stop.received is not None)
            _conclude(run, outcome, stopped, bill)
    return Ended(ExitCode.HUNG if watchdog.fired else EXIT_CODES[outcome.status], outcome)


class _ProgressObserver(Observer):
    """Records each logged step for the supervisor, and that the run has a checkpoint; keeps nothing open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step(self, record: StepRecord) -> None:
        progress_file.record(step=record.step)

    def on_event(self, event: Event) -> None:
        if event.kind == "save" or (event.kind == "start" and event.step > 0):
            frozen.note_saved(self._folder)

    def close(self) -> None: ...


@contextlib.contextmanager
def _observing(run: OpenRun, bill: Bill | None) -> Iterator[Observers]:
    """Observers as the config asks for them, closed however the block ends; prints the problems of those that failed. Records have the
    figures of `bill`.
    """
    config, directory, console = run.config, run.directory, run.context.phases.console
    active: list[Observer] = [ConsoleObserver(config.total_steps, primary=directory.primary, console=console)]
    if progress_file.VARIABLE in os.environ:
        active.append(_ProgressObserver(directory.path))
    if directory.primary:
        active.append(FileObserver(directory))
        if config.run.tensorboard:
            active.append(TensorBoardObserver(directory))

        def report(event: Event) -> None:
            observers.on_event(event)

        ended = lambda cause: progress_file.record(alerted=cause)  # noqa: E731
        settings = config.model_dump(mode="json")
        active += run.context.given.observers
        known = {"directory": directory, "settings": settings, "goodput": run.context.goodput.summary, "held": run.held}
        active += build(config, "observers", **known, report=report, ended=ended)
    observers = Observers(active) if bill is None else Observers(active, bill.complete)
    try:
        yield observers
    finally:
        for problem in observers.close():
            run.context.say(problem)


def _bill(run: OpenRun) -> Bill:
    """Cost of the run, by its config, list prices and published power, and by the GPUs' own counters where they have some."""
    rates = rates_of(run.config.cost, jax.devices()[0].device_kind, jax.device_count())
    try:
        before = spent_before(run.directory, rates)
    except OSError:
        before = Totals(None, None, rates.currency, True)
    counters = visible_gpus() if jax.default_backend() == "gpu" else None
    return Bill(rates, before, counters, began=run.context.phases.began)


def _train(run: OpenRun, stop: StopSignal, bill: Bill | None, predict: StepPredictor | None, *, concluded: bool) -> Outcome:
    """Train with observers, from the event `start` to the event `stop`."""
    context, directory, attempt = run.context, run.directory, secrets.token_hex(8)
    goodput, here, watchdog = context.goodput, context.cluster, context.watchdog
    beat = directory.heartbeat if directory.primary else None
    check_owner = owning(run)
    if directory.primary:
        progress_file.record(attempt=attempt, folder=str(directory.path.resolve()))
    with _observing(run, bill) as observers, Heartbeat(beat, attempt, goodput.summary):
        run = replace(run, context=replace(context, observers=observers))
        watchdog.observers, watchdog.folder = observers, directory.path
        here.when_larger(stop.request)
        start = _record_start(run)
        startup = {"startup_s": round(context.phases.seconds(), 3), "attempt": attempt}
        observers.on_event(Event("start", start.step, data=_facts(run, bill) | _predicted(run, predict) | startup))
        session = replace(_session(run, stop), concluded=concluded, check_owner=check_owner)
        with _profiling(run, session, stop) as session:
            outcome = train(session, start)
        summary = {"reason": outcome.status, "message": outcome.message, "goodput": goodput.summary(), "eval_loss": outcome.eval_loss}
        summary |= {"bill": bill.totals().to_json()} if bill is not None else {}
        hung = {"reason": "hung"} if watchdog.fired else {}
        regroup = {"regroup": True} if _regroups(outcome, here) else {}
        observers.on_event(Event("stop", outcome.step, data=summary | hung | regroup))
    return outcome


@contextlib.contextmanager
def _profiling(run: OpenRun, session: Session, stop: StopSignal) -> Iterator[Session]:
    """The session, with a profiler if `run.profile` asks for one."""
    settings, folder, title = run.config.run.profile, run.directory.profiles, run.config.run.name
    if settings is None:
        yield session
        return

    def gives_up() -> bool:
        session.progress.touch()  # the watchdog sees no hang while pages are waited for
        return stop.received is not None

    with RunProfiler(settings, folder, title, session.observers.on_event, gives_up) as profiler:
        yield replace(session, profiler=profiler)


def _regroups(outcome: Outcome, here: Cluster) -> bool:
    """True if training stopped because hosts have come back."""
    return outcome.status in STOPPED and bool(here.regrouping())


def _session(run: OpenRun, stop: StopSignal) -> Session:
    context = run.context
    return Session(
        run.program,
        run.data.train,
        run.data.held_out,
        run.checkpoints,
        context.observers,
        context.goodput,
        stop,
        stop.abandon_batch,
        run.data.named,
        run.tasks,
        stop.received_anywhere,
        context.watchdog.progress,
        run.init,
        run.journal,
        run.directory.path if run.directory.primary else None,
        _integrity(run),
        compilations=context.compilations,
        signal=lambda: stop.received,
    )


def _integrity(run: OpenRun) -> Integrity | None:
    """The checks for silent corruption, compiled, if the config asks for them. All processes go on from what process 0 finds on record."""
    if run.config.integrity is None or not run.trains:
        return None
    hosts, observers = run.context.cluster.hosts, run.context.observers
    record = agree.from_process_0(findings.read(run.directory) if run.directory.primary else {})
    found = findings.Findings(record, run.directory)
    marked = to_replace(run.directory) if run.directory.primary else {}
    for host, reason in marked.items():
        if host in hosts:
            observers.on_event(Event("alarm", run.start.step, data={"cause": "unhealthy_host", "reason": f"{reason}: replace it"}))
    return build_integrity(run.program, hosts, found, run.start.step, observers.on_event)


def _record_start(run: OpenRun) -> Start:
    """Write config and tokenizer to the run directory. Return its start with the settings changed since its checkpoint was written.

    With no steps left to train, the old config stays.
    """
    config, directory, start = run.context.asked, run.directory, run.start
    if not run.trains and directory.config.is_file():
        return start
    if directory.primary and start.restored is not None:
        changed = changed_settings(directory, config, start, run.data.train.fingerprint)
        start = replace(start, restored={**start.restored, "changed": changed} if changed else start.restored)
    directory.write_config(saved_text(config))
    if directory.primary:
        goes_on = start.restored is not None and not start.branched
        source = source_tokenizer(config.train)
        if isinstance(given := run.data.train, GivenBatches):
            if given.tokenizer is not None:
                write_tokenizer(given.tokenizer, directory.path / TOKENIZER)
        else:
            turns = turn_ends(config.data.stores)
            copy_tokenizer(config.data.stores[0], directory.path / TOKENIZER, source, goes_on=goes_on, turns=turns)
        copy_published(source and source.parent, directory.path, goes_on=goes_on)
    return start


def _concluded(run: OpenRun) -> bool:
    """True if the last step was evaluated, in all processes alike: a signal or a crash may have come between it and its figures."""
    kinds = {*(["eval"] if run.data.held_out is not None else []), *(["tasks"] if run.tasks is not None else [])}
    path = run.directory.events
    lines = read_objects(path) if run.directory.primary and not run.trains and path.is_file() else ()
    counted = surviving(list(filter(None, map(Event.from_item, lines))))  # without those before the last steps were trained again
    found = {event.kind for event in counted if event.step == run.config.total_steps}
    return agree.from_process_0(kinds <= found)


def _peak_name(format: MatmulFormat) -> str:
    """Name of the peak that the devices' MFU is a share of; unknown devices have no MFU."""
    chip = chip_of(jax.devices()[0].device_kind)
    return PEAK_NAMES[format] if chip is None else chip.peak_name(format)


def _facts(run: OpenRun, bill: Bill | None) -> dict[str, Any]:
    config, events, here = run.config, run.directory.events, run.context.cluster
    metrics = [*run.program.metrics, *([JOULES_PER_TOKEN] if bill is not None and bill.knows_power else [])]
    return {
        "parameters": count_parameters(config.model),
        "trained_parameters": count_trained(config.model),
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "mfu_peak": _peak_name(mfu_format(config.precision.matmul)),
        "processes": jax.process_count(),
        "total_steps": config.total_steps,
        "total_tokens": config.total_tokens,
        "folder": str(run.directory.path),
        "version": maxlm.__version__,
        **({extensions.FIELD: loaded} if (loaded := extensions.identities(config.extensions)) else {}),
        "cluster": here.description,
        "restarts": sum(item.get("kind") == "start" for item in read_objects(events)) if run.directory.primary else 0,
        "metrics": charts_of(metrics),
        **({"bill": bill.facts()} if bill is not None else {}),
        **({"ended_before": ends} if (ends := here.ends_before()) else {}),
        **elastic.facts(config.mesh, config.train.microbatches, here),
    }


def _on_all_hosts(predictor: Predictor | None, context: RunContext) -> StepPredictor | None:
    """The function that predicts a step, if there is a predictor. Raises UserError in all processes alike."""

    def predict() -> StepPredictor | None:
        try:
            return None if predictor is None else predictor(context.asked, context.cluster.hosts)
        except UserError as error:
            if not frozen.is_restart():
                raise
            logging.getLogger(__name__).warning("steps are not predicted any more: %s", error)
            return None

    return agree.on_all(predict)  # also without a predictor: configs are compared later, and may differ here


def _predicted(run: OpenRun, predict: StepPredictor | None) -> dict[str, Any]:
    """Memory and seconds of the compiled step, for the event `start`. No failure of a prediction changes the run."""
    if not run.trains:
        return {}
    found: dict[str, Any] = {}
    try:
        found[predicted.MEMORY] = needed_by(run.program.step, jax.default_backend())
        if predict is not None and run.directory.primary:
            found |= predict(run.program)
    except Exception:
        logging.getLogger(__name__).warning("memory or time of a step could not be predicted", exc_info=True)
    return {"predicted": found}


def _report(directory: RunDirectory) -> str:
    """Write the report of the run; return a line about it."""
    try:
        message = f"report: {write_report([directory.path], directory.report)}"
        progress_file.record(reported=True)
    except Exception as error:
        message = f"the report cannot be written ({error}); make it with `maxlm report {shell_command(str(directory.path))}`"
    return message


def _conclude(run: OpenRun, outcome: Outcome, print_samples: Callable[..., dict[str, str | None]], bill: Bill | None) -> None:
    """Write the report, print samples, write the report with them, and print its path. Training is over: no failure here changes its
    outcome.
    """
    config, directory, say, console = run.config, run.directory, run.context.say, run.context.phases.console
    message = _report(directory)  # before the samples: a signal ends those at once
    if outcome.status in ("done", "nothing_left") and outcome.state is not None and jax.process_count() == 1:
        try:
            with deadline.allow(deadline.PROMPT):  # all is saved: a signal need not wait for a long sample
                state = run.program.evaluated(outcome.state)
                texts = print_samples(SavedRun(directory.path, config), state.params, state.model_state, console)
                append_samples(directory.samples, outcome.step, texts)
                message = _report(directory) if texts else message
        except Exception as error:
            logging.getLogger(__name__).info("the samples failed", exc_info=True)
            say(f"no samples of the model: {error if isinstance(error, UserError) else first_line(error)}")
        if config.samples is not None:
            console.rule(style="dim")
    with contextlib.suppress(OSError):
        say(str(read_ledger(directory)))
        for line in filter(None, (figure.sentence() for figure in predicted.read_compared(directory) if figure.matters)):
            say(line)
    if bill is not None and (spent := bill.sentence(config.batch_sizes.before(outcome.step) * config.data.seq_len)):
        say(spent)
    say(message)
