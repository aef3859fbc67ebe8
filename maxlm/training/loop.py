"""The loop around the step: restore; then for every step: save if due, fetch the batch, step, log.

Order is an invariant: a checkpoint of step n is taken before batch n is fetched, so it holds n updates and the position n.
The loop never waits for the device to log: figures of step n - 1 are read while step n runs. Only a healthy state is saved.
A run that goes back restores an earlier state and continues from there, without the batches that it leaves out.
"""

import contextlib
import functools
import itertools
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from maxlm.base import directory_lock
from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.checkpoints import STORE
from maxlm.checkpoint.errors import CopyLostError
from maxlm.config.sections.health import HealthConfig
from maxlm.config.table import averages
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.order import batch_number
from maxlm.objectives import Sums
from maxlm.objectives.batch_metric import whole_values
from maxlm.telemetry.goodput import Goodput, Part
from maxlm.telemetry.observer import Event, EventKind
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import evidence
from maxlm.training.evidence import Replay
from maxlm.training.meter import Meter
from maxlm.training.program import Program
from maxlm.training.rollback import Journal
from maxlm.training.saving import Saving, not_finite, prepare_saves
from maxlm.training.session import STOPPED, Init, Outcome, RollBack, Session, Start, stopped_by
from maxlm.training.step import TrainState

IN_FLIGHT = 2  # batches dispatched before the first of them has finished


def restore_or_init(
    program: Program,
    checkpoints: Checkpoints,
    init: Init | None = None,
    journal: Journal | None = None,
    goodput: Goodput | None = None,
) -> Start:
    """Restore the newest good checkpoint, or make the first state, by `init` or from the seed, while the step is compiled. Writes nothing.

    `init` may give a Start, where the run does not begin at step 0. `journal`: of the roll backs of the run. Raises UserError for a foreign
    checkpoint.
    """
    journal, total = journal or Journal(), program.config.total_steps
    # Before manifests, and copies in memory, are read; unless nothing seems to be left.
    compiled = _compile(program) if all(step < total for step in checkpoints.saved_steps()) else None
    unfit = journal.unfit(checkpoints, healthy_only=program.config.health is not None)
    latest = checkpoints.latest(unfit)
    if latest is not None and latest >= total:
        return _restore(program, checkpoints, journal, unfit, goodput)
    compiled, start = compiled or _compile(program), None
    if latest is not None:
        with contextlib.suppress(CopyLostError):  # a copy in memory was all there was
            start = _restore(program, checkpoints, journal, unfit, goodput)
    if start is None:
        with _measured(goodput, "init"):
            first = (init or program.init)()
        start = first if isinstance(first, Start) else Start(first, 0)
        start = replace(start, left_out=journal.left_out(start.position))
        if unfit:
            checkpoints.resume_at(start.step)
        if checkpoints.memory is not None:
            checkpoints.memory.forget_newer(start.step)
    compiled.result()
    return start


def _compile(program: Program) -> Future[Any]:
    """Compile the step in a thread, for which nothing waits after an error, and in others what the first save would wait for."""
    prepare_saves(program.abstract_state, program.mesh)
    pool = ThreadPoolExecutor(1)
    compiled = pool.submit(lambda: program.step)
    pool.shutdown(wait=False)
    return compiled


def _restore(program: Program, checkpoints: Checkpoints, journal: Journal, unfit: Mapping[int, str], goodput: Goodput | None) -> Start:
    began = time.monotonic()
    with _measured(goodput, "restore"):
        restored = checkpoints.restore(program.abstract_state, unfit=unfit)
        # Copies are made without a look at their numbers.
        names = [] if restored.source == STORE else not_finite(restored.state, program.mesh)
        if names:
            checkpoints.discard_copy(f"it holds values that are not finite, in {names[0]}")
            restored = checkpoints.restore(program.abstract_state, unfit=unfit)
    data = {"seconds": round(time.monotonic() - began, 3), "passed_over": list(restored.skipped), "source": restored.source}
    return Start(
        program.placement.adopt(restored.state), restored.step, data, restored.data_position, journal.left_out(restored.data_position)
    )


def _measured(goodput: Goodput | None, part: Part) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if goodput is None else goodput.measure(part)


def train(session: Session, start: Start) -> Outcome:
    """Train until the last step, a reason to stop or an unhealthy run. The last state is saved if it is healthy."""
    total = session.program.config.total_steps
    if start.restored is not None:
        session.observers.on_event(Event("restore", start.step, data=start.restored))
    if start.step > total or (start.step == total and session.concluded):
        done = f"all {total:,} steps are done" if start.step == total else f"the run is at step {start.step:,}, beyond its end at {total:,}"
        return Outcome("nothing_left", start.step, f"{done}: there is nothing left to do", state=start.state)
    end = _train_from(session, start)
    while isinstance(end, Start):
        end = _train_from(session, end, went_back=True)
    return end


def _train_from(session: Session, start: Start, *, went_back: bool = False) -> Outcome | Start:
    """Train until the end, or until training goes back: then where it continues. `went_back`: it has just done so."""
    same_data = start.position.get("store") == session.data.fingerprint
    total = session.program.config.total_steps
    levels, skipped = start.position.get("health") if same_data else None, int(jax.device_get(start.state.skipped))
    meter = Meter(
        session.program,
        session.observers,
        start.step,
        levels,
        session.progress,
        skipped=skipped,
        left_out=start.left_out,
        compilations=session.compilations,
        data=session.data,
    )
    from_memory = start.restored is not None and start.restored.get("source", STORE) != STORE
    saving = Saving(session, meter, start.step, saved=not from_memory)
    session.data.go_on(start.position, start.left_out)
    if went_back:
        _report_short_data(session, start.step)
    with jax.set_mesh(session.program.mesh):
        try:
            end = _run(session, meter, saving, start) if start.step < total else _all_done(total, start.state)
            if end.roll_back is not None and (again := _go_back(session, meter, saving, start, end, end.roll_back)):
                return again
            return _conclude(session, meter, saving, end)
        except Exception:
            saving.after_error()
            raise


def _go_back(session: Session, meter: Meter, saving: Saving, start: Start, end: Outcome, back: RollBack) -> Start | None:
    """The state that `back` asks for. None, and the run is unhealthy, if the limits do not allow it or there is none.

    The roll back is recorded before anything else: a kill at any moment then leads to the same state, and the same data order.
    """
    session.check_owner()
    began, journal = time.monotonic(), session.journal
    settings = session.program.config.health or HealthConfig()
    before = min((back.before, *back.batches))
    batches = [batch_number(step, start.left_out) for step in back.batches]
    saving.settle()
    with session.goodput.measure("save"):
        problem = "" if back.final else journal.refusal(settings, end.step) or _unreachable(session, before)
    if not problem or back.cause == "corrupted":  # also where this start ends: the next one must not continue from a wrong state
        problem = journal.add(end.step, before, batches, back.cause, back.reason) or problem
    if back.final:
        return None
    if problem:
        meter.health.fail(f"{back.reason}; {problem}")
        return None
    evidence.write(session, meter.health, end.step, back)
    for leaf in jax.tree.leaves(end.state):
        leaf.delete()  # or there would be two states
    again = restore_or_init(session.program, session.checkpoints, session.init, journal, session.goodput)
    session.progress.pause()
    data = {"from_step": end.step, "reason": back.reason, "cause": back.cause, "batches": batches}
    data |= {"seconds": round(time.monotonic() - began, 3), "passed_over": (again.restored or {}).get("passed_over", [])}
    session.observers.on_event(Event("rollback", again.step, data=data))
    if session.folder is not None:
        with contextlib.suppress(OSError):  # the next start mends what is left
            RunDirectory(session.folder, primary=True).trained_again(again.step)
    return again


def _unreachable(session: Session, before: int) -> str:
    """Reason that training cannot go back to `before`, or ""."""
    config, steps = session.program.config, session.checkpoints.positions()
    first = 0 if config.train.branch_from is None else config.train.branch_from.step
    if before < first:
        return f"this run begins at step {first:,}, where it branches off"
    if before - first < config.checkpoint.every_steps or (steps and min(steps) <= before):
        return ""
    if not steps:  # as if all saves have failed: going back to the beginning would lose all
        return "no checkpoint has been saved"
    return f"the oldest checkpoint, of step {min(steps):,}, is later than step {before:,}; raise checkpoint.keep"


def _run(session: Session, meter: Meter, saving: Saving, start: Start) -> Outcome:
    """The steps, up to the last or a reason to stop."""
    program, goodput = session.program, session.goodput
    settings, total = program.config.train, program.config.total_steps
    state, eval_loss, replay = start.state, None, Replay(program)
    advance = program.step if session.integrity is None else functools.partial(session.integrity.update, program.step)
    batches = session.data.batches(start.step, program.batch_sharding, total)
    try:
        for step in range(start.step, total):
            if session.profiler is not None:
                with session.progress.in_seldom():
                    session.profiler.before(step, state, meter)
            reason = session.stop(step)
            directory_lock.check()
            if end := _corrupted(session, step, state, now=saving.due(step) or saving.copy_due(step)):
                return replace(end, eval_loss=eval_loss)
            if reason is None:
                saving.save_if_due(step, state)
            if meter.health.roll_back is not None:
                return Outcome("unhealthy", step, meter.health.problem, eval_loss, state, meter.health.roll_back)
            if meter.health.unhealthy:
                return Outcome("unhealthy", step, meter.health.unhealthy, eval_loss, state)
            if reason is not None:
                return Outcome(stopped_by(reason), step, f"stopped by {reason}", eval_loss, state)
            waiting = time.monotonic()
            try:
                with goodput.measure("data_wait"):
                    batch = batches.get(session.gives_up)
            except UserError:  # the store is damaged or away
                saving.before_error(step, state)
                raise
            if batch is None:
                reason = session.stop(step)
                return Outcome(stopped_by(reason), step, f"stopped by {reason} while the data did not come", eval_loss, state)
            _report_problems(session, session.data, step)
            waited = time.monotonic() - waiting
            if end := _corrupted(session, step, state, batch):
                return replace(end, eval_loss=eval_loss)
            session.progress.sequences = meter.sequences(step + 1)
            with goodput.measure("step"):
                due = [probe(state, batch) for probe in program.probes if probe.due(step + 1)]  # first: the state is donated
                state, metrics = advance(state, batch)
                meter.stepped(step + 1, metrics._replace(values=dict(ChainMap(*due, metrics.values))), waited, batches.waited)
            if (bad := meter.health.take_replay()) is not None:
                with session.progress.in_seldom():
                    replay.report(session, state, bad)
                meter.pause()
            if step == start.step:
                goodput.started()
            if settings.eval_every and (step + 1) % settings.eval_every == 0 and step + 1 < total:
                eval_loss = _evaluate(session, meter, saving, step + 1, state)
            if session.tasks is not None and session.tasks.every and (step + 1) % session.tasks.every == 0 and step + 1 < total:
                if end := _corrupted(session, step + 1, state, now=True):
                    return replace(end, eval_loss=eval_loss)
                saving.save_if_due(step + 1, state)  # first: tasks may take long, and no failure of theirs may cost it
                _run_tasks(session, meter, saving, step + 1, state)
        meter.flush()
    finally:
        batches.close()
    return _all_done(total, state, meter.health.roll_back)


def _all_done(total: int, state: TrainState, roll_back: RollBack | None = None) -> Outcome:
    return Outcome("done", total, f"all {total:,} steps are done", state=state, roll_back=roll_back)


def _corrupted(session: Session, step: int, state: TrainState, batch: Any = None, *, now: bool = False) -> Outcome | None:
    """End of the run if a check for silent corruption finds any: of the copies of the state, or, with a batch, of what devices compute."""
    if session.integrity is None:
        return None
    with session.goodput.measure("step", counts=False):
        checks = session.integrity
        end = checks.check(step, state, now=now) if batch is None else checks.replay(step, state, batch)
    return None if end is None else replace(end, state=state)


def _conclude(session: Session, meter: Meter, saving: Saving, end: Outcome) -> Outcome:
    """Save the last state if it is healthy, and evaluate it meanwhile; else report why not, and which checkpoint is left."""
    state = end.state
    assert state is not None, "the steps end with a state"
    saving.check(state)
    corrupted = end if end.status == "corrupted" else _corrupted(session, end.step, state, now=True)
    wrong = meter.health.unhealthy or (corrupted.message if corrupted else meter.health.at_end())
    if wrong and (meter.health.unhealthy or end.status == "done"):
        end = replace(end, status="corrupted" if corrupted and not meter.health.unhealthy else "unhealthy", message=wrong)
    if not wrong:
        saving.save(end.step, state)  # first: no evaluation that fails, or that a signal cuts short, may cost it
    if end.status == "unhealthy":
        evidence.write(session, meter.health, end.step, end.roll_back)
    if end.status == "done":
        end = replace(end, eval_loss=_evaluate(session, meter, saving, end.step, state))
        if (session.held_out is not None and end.eval_loss is None) or not _run_tasks(session, meter, saving, end.step, state):
            end = replace(end, status=stopped_by(session.signal()), message=f"{end.message}, and a signal came before the evaluation")
    saving.finish(end.step, state, saved=not wrong)
    if wrong:
        newest = session.checkpoints.latest()
        left = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest:,}"
        because = "" if wrong == end.message else f" ({wrong})"
        end = replace(end, message=f"{end.message}; the last state is not saved{because}, and {left}")
    if end.status in STOPPED:
        kind: EventKind = "preempt" if end.status == "preempted" else "interrupt"
        session.observers.on_event(Event(kind, end.step, data={"reason": end.message}))
    return end


def _evaluate(session: Session, meter: Meter, saving: Saving, step: int, state: TrainState) -> float | None:
    """Mean held-out loss, also reported as an event with the losses of the named sets and of the moving average; None without held-out
    data, or if a signal asks training to stop meanwhile.
    """
    if session.held_out is None:
        return None
    sets = {"": session.held_out, **{f"/{name}": held_out for name, held_out in session.named.items()}}
    kept = averages(session.program.config)
    states = {"eval_loss": state, **{f"eval_loss_{name}": replace(state, params=state.extra[name]) for name in kept}}
    losses: dict[str, float] = {}
    meter.flush()
    began = time.monotonic()
    with session.goodput.measure("eval"):
        for (name, held_out), (kind, weights) in itertools.product(sets.items(), states.items()):
            found = evaluate(session.program, session.program.evaluated(weights), held_out, _giving_up(session.gives_up, session, saving))
            _report_problems(session, held_out, step)
            if found is None:
                _not_evaluated(session, step)
                return None
            losses[kind + name] = found.pop("loss")
            losses |= {f"{kind.replace('eval_loss', 'eval')}/{key}{name}": value for key, value in found.items()}
    session.observers.on_event(Event("eval", step, data={**losses, "seconds": round(time.monotonic() - began, 3)}))
    meter.pause()
    return losses["eval_loss"]


def evaluate(
    program: Program, state: TrainState, held_out: Pipeline, gives_up: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Mean `loss`, and the figures of `metrics`, over the first `train.eval_batches` held-out batches; None once `gives_up()`."""

    def batches() -> Iterator[Any]:
        for n in range(min(program.config.train.eval_batches, held_out.n_batches)):
            if gives_up():
                raise _GivenUpError
            yield held_out.device_batch(n, program.batch_sharding)

    try:
        sums = evaluated_sums(program, state, batches())
    except _GivenUpError:
        return None
    return whole_values([metric for metric in program.objective.metrics if metric.held_out or metric.name == "loss"], sums)


def evaluated_sums(program: Program, state: TrainState, batches: Iterable[Any]) -> Sums:
    """Figures of all `batches`, which lie on devices, in float64 on the host; of a state that `Program.evaluated` made."""
    sums: list[Sums] = []
    with jax.set_mesh(program.mesh):
        for n, batch in enumerate(batches):
            if n >= IN_FLIGHT:  # or a signal would have to wait for all of them
                jax.block_until_ready(sums[n - IN_FLIGHT])
            sums.append(program.evaluate(state.params, state.model_state, batch))
    whole = jax.device_get(sums)
    double = jax.tree.map(np.float64, [part._replace(largest={}, routing=None) for part in whole])
    added: Sums = jax.tree.map(lambda *parts: sum(parts), *double)
    return added._replace(largest={name: np.max([part.largest[name] for part in whole], axis=0) for name in whole[0].largest})


class _GivenUpError(Exception):
    """A signal asks training to stop."""


def _run_tasks(session: Session, meter: Meter, saving: Saving, step: int, state: TrainState) -> bool:
    """Run the tasks, if there are any, and report their results as an event. False if a signal asks training to stop meanwhile."""
    if session.tasks is None:
        return True
    meter.flush()
    began = time.monotonic()
    with session.goodput.measure("eval"):
        results = session.tasks.run(session.program.evaluated(state), step, _giving_up(session.all_give_up, session, saving))
    if results is None:
        _not_evaluated(session, step)
        return False
    session.observers.on_event(Event("tasks", step, data={**results, "seconds": round(time.monotonic() - began, 3)}))
    meter.pause()
    return True


def _giving_up(ask: Callable[[], bool], session: Session, saving: Saving) -> Callable[[], bool]:
    def gives_up() -> bool:
        session.progress.touch()
        saving.poll()  # a save may end meanwhile
        return ask()

    return gives_up


def _not_evaluated(session: Session, step: int) -> None:
    reason = "the evaluation was skipped: a signal asked training to stop"
    session.observers.on_event(Event("alarm", step, data={"cause": "not_evaluated", "reason": reason}))


def _report_short_data(session: Session, step: int) -> None:
    """Report that the data end before the run does: batches that a roll back leaves out are replaced by later ones."""
    try:
        session.data.check_length(session.program.config.total_steps)
    except UserError as error:
        reason = f"without the batches that are left out, the data are too short, and training will end there: {error}"
        session.observers.on_event(Event("alarm", step, data={"cause": "short_data", "reason": reason}))


def _report_problems(session: Session, data: Pipeline, step: int) -> None:
    """Report the samples that were left out of batches."""
    for problem in data.take_problems():
        session.observers.on_event(Event("alarm", step, data=problem))
