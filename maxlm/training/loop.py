"""The loop around the step: restore; then for every step: save if due, fetch the batch, step, log.

Order is an invariant: a checkpoint of step n is taken before batch n is fetched, so it holds n updates and the position n.
The loop never waits for the device to log: figures of step n - 1 are read while step n runs.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax

from maxlm.checkpoint import Checkpoints
from maxlm.data.pipeline import Pipeline
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Event, Observers
from maxlm.training.evaluate import evaluate
from maxlm.training.meter import Meter
from maxlm.training.program import Program
from maxlm.training.state import TrainState

Status = Literal["done", "nothing_left", "preempted", "unhealthy"]


@dataclass(frozen=True)
class Outcome:
    """How training ended: after `step` updates, and why."""

    status: Status
    step: int
    message: str
    eval_loss: float | None = None
    state: TrainState | None = None


@dataclass(frozen=True)
class Session:
    """What the loop works with. `stop` is asked before every step: a reason to stop there, or None; `gives_up` while it waits for data."""

    program: Program
    data: Pipeline
    held_out: Pipeline | None
    checkpoints: Checkpoints
    observers: Observers
    goodput: Goodput
    stop: Callable[[int], str | None] = lambda step: None
    gives_up: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Start:
    """Where training begins: a state that holds `step` updates, and what is told of its restore, if it was restored."""

    state: TrainState
    step: int
    restored: dict[str, Any] | None = None


def restore_or_init(program: Program, checkpoints: Checkpoints) -> Start:
    """The newest good checkpoint, or a fresh state; meanwhile the step is compiled. Writes nothing.

    Raises UserError for a foreign checkpoint.
    """
    latest = checkpoints.latest()
    if latest is not None and latest >= program.config.total_steps:
        return _restore(program, checkpoints)
    pool = ThreadPoolExecutor(1)
    compiled = pool.submit(lambda: program.step)
    pool.shutdown(wait=False)  # an error below is told at once
    start = Start(program.init(), 0) if latest is None else _restore(program, checkpoints)
    compiled.result()
    return start


def _restore(program: Program, checkpoints: Checkpoints) -> Start:
    began = time.monotonic()
    restored = checkpoints.restore(program.abstract_state)
    told = {"seconds": round(time.monotonic() - began, 3), "passed_over": list(restored.skipped)}
    return Start(restored.state, restored.step, told)


def train(session: Session, start: Start) -> Outcome:
    """Train until the last step, a reason to stop or an unhealthy run. The last state is saved whatever the reason."""
    total = session.program.config.total_steps
    if start.restored is not None:
        session.observers.on_event(Event("restore", start.step, data=start.restored))
    if start.step >= total:
        return Outcome("nothing_left", start.step, f"all {total:,} steps are done: there is nothing left to do", state=start.state)
    with jax.set_mesh(session.program.mesh):
        return _run(session, start.state, start.step, total)


def _run(session: Session, state: TrainState, start: int, total: int) -> Outcome:
    program, goodput = session.program, session.goodput
    settings = program.config.train
    meter = Meter(program, session.observers, start)
    batches = session.data.batches(start, program.batch_sharding, total)
    saved = start
    step, eval_loss = start, None
    status: Status = "done"
    message = f"all {total:,} steps are done"
    try:
        for step in range(start, total):
            reason = session.stop(step)
            if reason is not None or meter.unhealthy:
                status, message = ("unhealthy", meter.unhealthy) if meter.unhealthy else ("preempted", f"stopped by {reason}")
                break
            if step > saved and step % program.config.checkpoint.every_steps == 0:
                saved = _save(session, meter, step, state)
            waiting = time.monotonic()
            with goodput.measure("data_wait"):
                ready = batches.get(session.gives_up)
            if ready is None:
                status, message = "preempted", f"stopped by {session.stop(step)} while the data did not come"
                break
            _, batch = ready
            waited = time.monotonic() - waiting
            with goodput.measure("step"):
                state, metrics = program.step(state, batch)
                meter.stepped(step + 1, metrics, waited)
            if step == start:
                goodput.started()
            if settings.eval_every and (step + 1) % settings.eval_every == 0 and step + 1 < total:
                eval_loss = _evaluate(session, meter, step + 1, state)
        else:
            step = total
        meter.flush()
        if status == "done":
            eval_loss = _evaluate(session, meter, step, state)
        if step > saved:
            _save(session, meter, step, state)
        with goodput.measure("save"):
            session.checkpoints.wait()
    finally:
        batches.close()
    if status == "preempted":
        session.observers.on_event(Event("preempt", step, data={"reason": message}))
    return Outcome(status, step, message, eval_loss, state)


def _save(session: Session, meter: Meter, step: int, state: TrainState) -> int:
    """Start saving `state`; returns the step saved."""
    began = time.monotonic()
    with session.goodput.measure("save"):
        session.checkpoints.save(step, state, {"next_step": step})
    told: dict[str, Any] = {"blocked_s": round(time.monotonic() - began, 4)}
    if session.checkpoints.last_failure is not None:
        told["failed_before"] = str(session.checkpoints.last_failure)
    session.observers.on_event(Event("save", step, data=told))
    meter.pause()
    return step


def _evaluate(session: Session, meter: Meter, step: int, state: TrainState) -> float | None:
    """Mean held-out loss in nats a token, told as an event; None without held-out data."""
    if session.held_out is None:
        return None
    meter.flush()
    began = time.monotonic()
    with session.goodput.measure("eval"):
        loss = evaluate(session.program, state, session.held_out)
    session.observers.on_event(Event("eval", step, data={"eval_loss": loss, "seconds": round(time.monotonic() - began, 3)}))
    meter.pause()
    return loss
