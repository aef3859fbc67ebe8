"""A training run from its config to its report: assembles the layers below."""

import contextlib
import functools
import json
import logging
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax

import maxlm
from maxlm.checkpoint import multihost
from maxlm.checkpoint.errors import first_line
from maxlm.config import Config, UserError, directory_lock
from maxlm.config.console import Console
from maxlm.config.errors import ExitCode, UnavailableError
from maxlm.config.loader import dump, saved_text
from maxlm.config.paths import is_remote
from maxlm.data.tokenizer import copy_tokenizer
from maxlm.data.turns import turn_ends
from maxlm.hardware.chips import PEAK_NAMES
from maxlm.memory.spaces import needed_by
from maxlm.models import count_parameters, count_trained, mfu_format
from maxlm.models.parameters import Parameters
from maxlm.runtime import cluster, deadline, elastic, frozen, progress_file
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.consistency import digest, require_equal
from maxlm.runtime.jax_setup import select_platform
from maxlm.runtime.launch import NO_RESTART
from maxlm.runtime.observing import observing
from maxlm.runtime.open_run import OpenRun, OpenTasks, open_run, prepare_memory
from maxlm.runtime.ownership import Ownership, SupersededRunError
from maxlm.runtime.reference import attach_reference
from maxlm.runtime.resume_checks import changed_settings
from maxlm.runtime.signals import StopSignal
from maxlm.runtime.watchdog import Watchdog
from maxlm.telemetry import predicted
from maxlm.telemetry.alert_delivery import check_alerts
from maxlm.telemetry.bill import JOULES_PER_TOKEN, Bill, Totals, rates_of, spent_before
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.course import surviving
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.gpus import visible_gpus
from maxlm.telemetry.ledger import read_ledger
from maxlm.telemetry.lifetime import Heartbeat
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.metric import charts_of
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.prometheus import PrometheusObserver
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.samples import append_samples
from maxlm.telemetry.run_dir import RunDirectory, unwritable
from maxlm.telemetry.strict_json import read_objects
from maxlm.telemetry.wandb_observer import check_wandb
from maxlm.training import bit_flips, findings, fits
from maxlm.training.findings import to_replace
from maxlm.training.integrity import Integrity, build_integrity
from maxlm.training.loop import train
from maxlm.training.profiling import RunProfiler
from maxlm.training.program import Program
from maxlm.training.saved_run import TOKENIZER, copy_published, source_tokenizer
from maxlm.training.session import STOPPED, Outcome, Session, Start

EXIT_CODES = {
    "done": ExitCode.DONE,
    "nothing_left": ExitCode.DONE,
    "preempted": ExitCode.STOPPED,
    "interrupted": ExitCode.STOPPED,
    "unhealthy": ExitCode.UNHEALTHY,
    "corrupted": ExitCode.HOST_LOST,  # started again, best without the host that was named
}

LOCK_FIX = "end that first, or choose another run.name or run.dir"
LOCK_MARGIN_SECONDS = 10.0  # beyond the grace time, in which a run that received a signal has ended for certain


class SamplePrinter(Protocol):
    """Prints and returns samples of the parameters of a finished run, by prompt; returns early once `stopped()`."""

    def __call__(
        self, config: Config, directory: Path, params: Parameters, model_state: Parameters, console: Console, *, stopped: Callable[[], bool]
    ) -> dict[str, str | None]: ...


Predictor = Callable[[Config, Sequence[str]], Callable[[Program], float]]  # of the host of each process, too


def run_training(
    config: Config,
    phases: Phases,
    print_samples: SamplePrinter,
    named: Mapping[str, str] | None = None,
    open_tasks: OpenTasks | None = None,
    predictor: Predictor | None = None,
) -> int:
    """Train as configured; return the process's exit code. `named`: settings of the cluster on the command line. `open_tasks`: not None
    where `config.evaluation` is set; `predictor`: where `cost.calibration` is.

    Raises UserError before anything is written if the config cannot be honoured.
    """
    if config.wandb is not None:
        check_wandb(config.wandb.project)
    if config.run.alerts is not None:
        check_alerts(config.run.alerts)
        progress_file.record(name=config.run.name, alerts=config.run.alerts.model_dump(mode="json"))
    select_platform()
    say = functools.partial(phases.console.print, markup=False, highlight=False, soft_wrap=True)
    goodput = Goodput(began=phases.began, mark=jax.profiler.TraceAnnotation)
    with contextlib.ExitStack() as stack:
        with goodput.measure(elastic.waiting_part(config)):
            joined = cluster.joined(named or {}, say, quorum_of=functools.partial(elastic.quorum_of, config, say))
            here = stack.enter_context(joined)
        watchdog = stack.enter_context(Watchdog(config.watchdog, here.group))
        log = stack.enter_context(RunLog())
        compilations = stack.enter_context(Compilations())
        stack.enter_context(_locked(config, say))
        stack.enter_context(fits.explain_out_of_memory("training"))
        code = _run(config, phases, goodput, print_samples, open_tasks, predictor, here, log, watchdog, compilations)
        if code in NO_RESTART:
            here.finish(NO_RESTART[code])
        return code


def _run(
    asked: Config,
    phases: Phases,
    goodput: Goodput,
    print_samples: SamplePrinter,
    open_tasks: OpenTasks | None,
    predictor: Predictor | None,
    here: Cluster,
    log: RunLog,
    watchdog: Watchdog,
    compilations: Compilations,
) -> int:
    """`asked`: the config for all hosts, also if some are absent."""
    predict = _on_all_hosts(predictor, asked, here.hosts)
    run = open_run(asked, phases, goodput, open_tasks, here, functools.partial(_follow, watchdog, goodput))
    config, directory, checkpoints = run.config, run.directory, run.checkpoints
    if config.checkpoint.dir is not None:
        checkpoints.claim()
    RunDirectory.create(config.run.dir, config.run.name, primary=phases.primary)
    log.write_to(directory.log if phases.primary else None)
    if checkpoints.memory is not None and run.trains:
        prepare_memory(checkpoints.memory, run.program, here.local_processes)
    concluded = _concluded(run)
    if config.objective is not None and config.objective.kind == "dpo" and (run.trains or not concluded):
        attach_reference(config, run.program, run.start, run.data.pipelines, checkpoints.directory, phases, watchdog.progress.touch)
    deadline.stacks_to(directory.path / f"stacks-{jax.process_index()}.txt")
    with contextlib.closing(StopSignal(here.regrouping)) as stop:  # until the end, so that a signal cannot prevent the report
        bill = _bill(run, phases) if phases.primary else None
        outcome = _train(run, phases, goodput, here, watchdog, stop, bill, compilations, predict, concluded=concluded)
        with goodput.measure("save"):
            checkpoints.close(remove_copies=outcome.status == "corrupted")
            done_everywhere = not multihost.max_over_processes(int(EXIT_CODES[outcome.status] != ExitCode.DONE))
        watchdog.stop()
        progress_file.record(regroup=_regroups(outcome, here), concluded=done_everywhere)
        if phases.primary:
            stopped = functools.partial(print_samples, stopped=lambda: stop.received is not None)
            _conclude(run, phases.console, outcome, stopped, bill)
    return ExitCode.HUNG if watchdog.fired else EXIT_CODES[outcome.status]


def _follow(watchdog: Watchdog, goodput: Goodput, config: Config) -> None:
    """Watch the run of `config`. Its operations take as long as in earlier attempts with the same config on the same devices."""
    device = jax.devices()[0].device_kind
    layout = digest(f"{jax.device_count()} {device} {jax.process_count()} {dump(config)}")
    watchdog.follow(goodput, RunDirectory(Path(config.run.dir) / config.run.name, jax.process_index() == 0), layout)


def _bill(run: OpenRun, phases: Phases) -> Bill:
    """Cost of the run, by its config, list prices and published power, and by the GPUs' own counters where they have some."""
    rates = rates_of(run.config.cost, jax.devices()[0].device_kind, jax.device_count())
    try:
        before = spent_before(run.directory, rates)
    except OSError:
        before = Totals(None, None, rates.currency, True)
    counters = visible_gpus() if jax.default_backend() == "gpu" else None
    return Bill(rates, before, counters, began=phases.began)


def _train(
    run: OpenRun,
    phases: Phases,
    goodput: Goodput,
    here: Cluster,
    watchdog: Watchdog,
    stop: StopSignal,
    bill: Bill | None,
    compilations: Compilations,
    predict: Callable[[Program], float] | None,
    *,
    concluded: bool,
) -> Outcome:
    """Train with observers, from the event `start` to the event `stop`."""
    config, directory, attempt = run.config, run.directory, secrets.token_hex(8)
    beat = directory.heartbeat if phases.primary else None
    check_owner = _owning(run)
    if phases.primary:
        progress_file.record(attempt=attempt, folder=str(directory.path.resolve()))
    beside = [PrometheusObserver(run.metrics_port, directory, goodput.summary)] if run.metrics_port is not None else []
    observing_run = observing(config, directory, phases.console, phases.primary, beside, bill)
    with observing_run as observers, Heartbeat(beat, attempt, goodput.summary):
        watchdog.observers, watchdog.folder = observers, directory.path
        here.when_larger(stop.request)
        start = _record_start(run)
        facts = _facts(run, here, bill) | _predicted(run, predict) | {"startup_s": round(phases.seconds(), 3), "attempt": attempt}
        observers.on_event(Event("start", start.step, data=facts))
        if run.flips is not None:
            bit_flips.inject(run.program, run.flips)
            reason = f"bits are flipped on purpose, as {bit_flips.VARIABLE} says"
            observers.on_event(Event("alarm", start.step, data={"cause": "bit_flips", "reason": reason}))
        session = _session(run, observers, goodput, stop, watchdog, _integrity(run, here, observers))
        session = replace(session, compilations=compilations, concluded=concluded)
        with _profiling(run, session, stop) as session:
            outcome = train(replace(session, check_owner=check_owner), start)
        summary = {"reason": outcome.status, "message": outcome.message, "goodput": goodput.summary(), "eval_loss": outcome.eval_loss}
        summary |= {"bill": bill.totals().to_json()} if bill is not None else {}
        hung = {"reason": "hung"} if watchdog.fired else {}
        regroup = {"regroup": True} if _regroups(outcome, here) else {}
        observers.on_event(Event("stop", outcome.step, data=summary | hung | regroup))
    return outcome


def _owning(run: OpenRun) -> Callable[[], None]:
    """Own the run's folders and checkpoints. Returns a check, which raises UserError once another start of the run does."""
    folder, needs_token = run.checkpoints.directory, run.asked.elastic is not None or is_remote(str(run.checkpoints.directory))
    owner = Ownership(folder, _superseded(run.asked)) if needs_token else None

    def check() -> None:
        for path in (run.directory.path, *([] if is_remote(str(folder)) else [Path(folder)])):
            directory_lock.check(path)
        if owner is not None:
            owner.check()

    check()
    run.checkpoints.check_owner = check
    return check


def _superseded(config: Config) -> type[UserError]:
    """Error of a start that has lost the run to a later one; an elastic one may join that."""
    return UserError if config.elastic is None else SupersededRunError


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


def _session(
    run: OpenRun, observers: Observers, goodput: Goodput, stop: StopSignal, watchdog: Watchdog, checks: Integrity | None
) -> Session:
    return Session(
        run.program,
        run.data.train,
        run.data.held_out,
        run.checkpoints,
        observers,
        goodput,
        stop,
        stop.abandon_batch,
        run.data.named,
        run.tasks,
        stop.received_anywhere,
        watchdog.progress,
        run.init,
        run.journal,
        run.directory.path if run.directory.primary else None,
        checks,
        signal=lambda: stop.received,
    )


def _integrity(run: OpenRun, here: Cluster, observers: Observers) -> Integrity | None:
    """The checks for silent corruption, compiled, if the config asks for them. All processes go on from what process 0 finds on record."""
    if run.config.integrity is None or not run.trains:
        return None
    record = multihost.text_from_process_0(json.dumps(findings.read(run.directory) if run.directory.primary else {}))
    found = findings.Findings(json.loads(record), run.directory)
    marked = to_replace(run.directory) if run.directory.primary else {}
    for host, reason in marked.items():
        if host in here.hosts:
            observers.on_event(Event("alarm", run.start.step, data={"cause": "unhealthy_host", "reason": f"{reason}: replace it"}))
    return build_integrity(run.program, here.hosts, found, run.start.step, observers.on_event)


def _record_start(run: OpenRun) -> Start:
    """Write config and tokenizer to the run directory. Return its start with the settings changed since its checkpoint was written.

    With no steps left to train, the old config stays.
    """
    config, directory, start = run.asked, run.directory, run.start
    if not run.trains and directory.config.is_file():
        return start
    if directory.primary and start.restored is not None:
        changed = changed_settings(directory, config, start, run.data.train.fingerprint)
        start = replace(start, restored={**start.restored, "changed": changed} if changed else start.restored)
    directory.write_config(saved_text(config))
    if directory.primary:
        goes_on = start.restored is not None and not start.branched
        source = source_tokenizer(config)
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
    return multihost.text_from_process_0("yes" if kinds <= found else "no") == "yes"


def _facts(run: OpenRun, here: Cluster, bill: Bill | None) -> dict[str, Any]:
    config, events = run.config, run.directory.events
    metrics = [*run.program.metrics, *([JOULES_PER_TOKEN] if bill is not None and bill.knows_power else [])]
    return {
        "parameters": count_parameters(config.model),
        "trained_parameters": count_trained(config.model),
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "mfu_peak": PEAK_NAMES[mfu_format(config)],
        "processes": jax.process_count(),
        "total_steps": config.total_steps,
        "total_tokens": config.total_tokens,
        "folder": str(run.directory.path),
        "version": maxlm.__version__,
        "cluster": here.description,
        "restarts": sum(item.get("kind") == "start" for item in read_objects(events)) if run.directory.primary else 0,
        "metrics": charts_of(metrics),
        **({"bill": bill.facts()} if bill is not None else {}),
        **({"ended_before": ends} if (ends := here.ends_before()) else {}),
        **elastic.facts(config, here),
    }


def _on_all_hosts(predictor: Predictor | None, config: Config, hosts: Sequence[str]) -> Callable[[Program], float] | None:
    """The function that predicts a step, if there is a predictor. Raises UserError in all processes alike."""
    predict, problem = None, None
    try:
        predict = None if predictor is None else predictor(config, hosts)
    except UserError as error:
        if frozen.is_restart():
            logging.getLogger(__name__).warning("steps are not predicted any more: %s", error)
        else:
            problem = error
    require_equal({}, problem)  # also without one: configs are compared later, and may differ here
    return predict


def _predicted(run: OpenRun, predict: Callable[[Program], float] | None) -> dict[str, Any]:
    """Memory and seconds of the compiled step, for the event `start`. No failure of a prediction changes the run."""
    if not run.trains:
        return {}
    found: dict[str, Any] = {}
    try:
        found[predicted.MEMORY] = needed_by(run.program.step, jax.default_backend())
        if predict is not None and run.directory.primary:
            found[predicted.STEP] = predict(run.program)
    except Exception:
        logging.getLogger(__name__).warning("memory or time of a step could not be predicted", exc_info=True)
    return {"predicted": found}


@contextlib.contextmanager
def _locked(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the directories that this run writes. A run that holds them and received a signal is given its grace time.

    Raises UserError in all processes alike: another run holds one, or one is not writable.
    """
    directory = RunDirectory(Path(config.run.dir) / config.run.name, primary=jax.process_index() == 0)
    folders = {directory.path.resolve(): (directory.path, "run.dir")}
    checkpoints = config.checkpoint.dir or str(directory.checkpoints)  # possibly the folder of another run, by a setting or link
    if not is_remote(checkpoints):  # under two names it would wait for itself
        field = "checkpoint.dir" if config.checkpoint.dir else "run.dir"
        folders.setdefault(Path(checkpoints).resolve(), (Path(checkpoints), field))
    with contextlib.ExitStack() as locks:
        problem = None
        try:
            seconds, taken = deadline.grace_seconds() + LOCK_MARGIN_SECONDS, _superseded(config)
            for folder, field in folders.values() if directory.primary else ():
                locks.enter_context(directory_lock.locked(folder, field, seconds, say, LOCK_FIX, taken)).watch()
        except UserError as error:
            problem = error if config.elastic is None else UnavailableError(str(error))  # a host that is about to be found lost may hold it
        except OSError as error:
            problem = frozen.may_pass(unwritable(error, field, config.run.dir if field == "run.dir" else str(folder)))
        require_equal({}, problem)
        yield


def _report(directory: RunDirectory) -> str:
    """Write the report of the run; return a line about it."""
    try:
        message = f"report: {write_report([directory.path], directory.report)}"
        progress_file.record(reported=True)
    except Exception as error:
        message = f"the report cannot be written ({error}); make it with `maxlm report {shlex.quote(str(directory.path))}`"
    return message


def _conclude(
    run: OpenRun, console: Console, outcome: Outcome, print_samples: Callable[..., dict[str, str | None]], bill: Bill | None
) -> None:
    """Write the report, print samples, write the report with them, and print its path. Training is over: no failure here changes its
    outcome.
    """
    config, directory = run.config, run.directory
    message = _report(directory)  # before the samples: a signal ends those at once
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if outcome.status in ("done", "nothing_left") and outcome.state is not None and jax.process_count() == 1:
        try:
            with deadline.allow(deadline.PROMPT):  # all is saved: a signal need not wait for a long sample
                state = run.program.evaluated(outcome.state)
                texts = print_samples(config, directory.path, state.params, state.model_state, console)
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
