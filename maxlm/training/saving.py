"""Saves of the state: at every `checkpoint.every_steps`, at the end, and only while training is healthy.

Retention keeps the newest checkpoints, so each bad one that is saved removes a good one.
"""

import contextlib
import functools
import logging
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.base.transient import RETRY_DELAYS_S
from maxlm.checkpoint import CheckpointError, digest
from maxlm.checkpoint.ahead import AheadOfTime
from maxlm.checkpoint.errors import UnevenSaveError, UnreachableError
from maxlm.checkpoint.folder import HEALTHY
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.cluster import agree
from maxlm.config import extensions
from maxlm.memory.disk import load_all
from maxlm.memory.pieces import fold, pieces_of
from maxlm.memory.spaces import is_on_host
from maxlm.telemetry.observer import Event
from maxlm.training.meter import Meter
from maxlm.training.session import BRANCH, Session
from maxlm.training.step import TrainState

_log = logging.getLogger(__name__)
AFTER_ERROR_SECONDS = 120.0  # that a save may take to end once training has crashed
FAILED_SAVES, FAILING_SECONDS = 10, 900.0  # saves in a row, and time, after which training ends: perhaps another start can save
JUDGED = ("params.", "opt_state.", "extra.")  # beginnings of the names of leaves in which a value may be absurd
NAMED = 3  # leaves named in a message; the others are counted
MOST_VALUE = 1e6  # absolute value of a parameter, which an update moves by about the learning rate
MOST_MOMENT = MOST_VALUE**2  # of what the optimizer and averages of weights hold: squares of gradients among them
GROWN = 100.0  # times the largest value of a leaf at the check before, and above this itself, is an alarm


class Saving:
    """Saves the states of one attempt, and reports how each save ended."""

    def __init__(self, session: Session, meter: Meter, start: int, *, saved: bool = True) -> None:
        """`saved`: the state of `start` is from a checkpoint, or the first one; else from a copy in memory."""
        self._session, self._meter = session, meter
        self._start = start
        self._saved = start if saved else start - 1  # step of the newest save, or of the checkpoint that training continues
        self._postponed = False
        self._began, self._blocked_s = 0.0, 0.0  # of the newest save: when, and for how long training waited for it
        self._failure_reported = False  # of the newest save
        self._failing_since: float | None = None
        self._largest: dict[str, float] = {}  # absolute value of each leaf of the parameters, at the newest check

    def save_if_due(self, step: int, state: TrainState) -> None:
        """Save `state` if a save is due or was postponed, and training is healthy; otherwise postpone it, and report that once. Copy it to
        memory if that is due.
        """
        self.poll()
        self._save_if_due(step, state)
        self._copy_if_due(step, state)  # last: the copy then records the same health as the checkpoint

    def _save_if_due(self, step: int, state: TrainState) -> None:
        if not self.due(step):
            return
        problem = self.check(state)
        if not problem:
            self.save(step, state)
        elif not self._postponed:
            self._postponed = True
            self._alarm("save_postponed", step, f"the checkpoint of step {step:,} is postponed until training is healthy: {problem}")

    def due(self, step: int) -> bool:
        """True if the state of `step` is to be saved."""
        scheduled = step % self._session.program.config.checkpoint.every_steps == 0
        return step > self._saved and (self._postponed or scheduled)

    def check(self, state: TrainState) -> str:
        """Reason not to save `state` now, or "". A state that is not finite, or absurd, ends the run: it stays so."""
        self._meter.flush()
        with self._session.goodput.measure("save"):
            names, values = extremes(state, self._session.program.mesh)
        largest = {name: value for name, value in values.items() if name.startswith("params.")}
        absurd = [f"{name} ({value:.3g})" for name, value in values.items() if value > (MOST_VALUE if name in largest else MOST_MOMENT)]
        grown = [name for name, value in largest.items() if value > GROWN * max(self._largest.get(name, value), 1.0)]
        if names:
            self._meter.health.state_not_finite(f"the state holds values that are not finite, in {_some(names)}")
        elif absurd:
            self._meter.health.state_not_finite(f"the state holds values that no training gives, in {_some(absurd)}")
        elif grown:
            said = _some([f"{name} from {self._largest[name]:.3g} to {largest[name]:.3g}" for name in grown])
            self._alarm(
                "large_value", int(jax.device_get(state.step)), f"the largest value of parameters grew since the save before: {said}"
            )
        self._largest = largest
        return self._meter.health.problem

    def save(self, step: int, state: TrainState) -> None:
        """Begin to save `state`, whatever it holds, unless it is saved already. A save that fails is reported, and training goes on.

        Raises UnreachableError after FAILED_SAVES in a row, FAILING_SECONDS after the first of them, if this one fails as well.
        """
        if step <= self._saved:
            return
        session, began = self._session, time.monotonic()
        session.check_owner()
        begun, failure = False, None
        with session.goodput.measure("save"):
            self._wait()
            try:
                begun = session.checkpoints.save(step, load_all(state), self._position(step))
            except UnevenSaveError:
                raise
            except CheckpointError as error:
                failure = error
        if failure is not None:
            self._alarm("save_failed", step, str(failure))
        self._failure_reported = failure is not None
        self._saved, self._postponed, session.progress.saving = step, False, began if begun else None
        self._began, self._blocked_s = began, time.monotonic() - began
        self._meter.pause()
        self._end_if_all_fail(began)

    def _end_if_all_fail(self, began: float) -> None:
        checkpoints = self._session.checkpoints
        self._failing_since = None if not checkpoints.failed_in_a_row else self._failing_since or began
        long = self._failing_since is not None and began - self._failing_since >= FAILING_SECONDS
        if checkpoints.failed_in_a_row < FAILED_SAVES or not agree.max_over_processes(int(long)):  # the clocks of processes differ
            return
        with self._session.goodput.measure("save"):
            failure = self._wait()  # if a save has begun, it decides: storage may be back
        self._meter.pause()
        if failure is not None:
            raise UnreachableError(f"{checkpoints.failed_in_a_row} saves in a row have failed; the last one: {failure}") from failure

    def finish(self, step: int, state: TrainState, *, saved: bool) -> None:
        """Wait for the running save. If the save of the last state, `state` of `step`, was asked for (`saved`) and fails, it is tried again
        for half a minute, unless a signal asks to stop, and then raised as CheckpointError. Any other that fails is reported only.
        """
        session, pauses = self._session, iter(RETRY_DELAYS_S)
        while True:
            with session.goodput.measure("save"):
                failure = self._wait()
                if failure is None or not saved:
                    return
                pause_s = next(pauses, 0.0)
                if not pause_s:
                    raise failure
                _log.warning("the last save is tried again in %g s: %s", pause_s, failure)
                for _ in range(math.ceil(pause_s)):
                    if session.all_give_up():
                        raise failure
                    time.sleep(1.0)
            self._saved = step - 1
            self.save(step, state)

    def settle(self) -> None:
        """Wait until the running save has ended in all processes; if it has failed, that is reported, and forgotten."""
        with self._session.goodput.measure("save"):
            self._wait()

    def _wait(self) -> CheckpointError | None:
        """Wait until the newest save has ended in all processes. Returns its failure, which is reported."""
        self.poll(None)
        try:
            self._session.checkpoints.wait()
        except CheckpointError as error:
            if not self._failure_reported:  # another process could not write its part
                self._alarm("save_failed", self._saved, str(error))
                self._failure_reported = True
            return error
        return None

    def before_error(self, step: int, state: TrainState) -> None:
        """Save `state`, if it is healthy, before training ends for want of a batch. Not in a cluster, where other processes continue."""
        integrity = self._session.integrity
        if jax.process_count() == 1 and not self.check(state) and (integrity is None or integrity.check(step, state, now=True) is None):
            with contextlib.suppress(CheckpointError):  # the error that ends training is the one to report
                self.save(step, state)

    def after_error(self) -> None:
        """Wait for the running save, since it holds a good state, but not for ever: other processes may have ended."""
        self.poll(AFTER_ERROR_SECONDS)

    def poll(self, wait_s: float | None = 0.0) -> None:
        """Report the newest save if it has ended, or ends within `wait_s` seconds (None: wait until it has ended)."""
        ended = self._session.checkpoints.ended(wait_s)
        if ended is None:
            return
        self._failure_reported, self._session.progress.saving = ended.failure is not None, None
        if ended.failure is not None:
            self._alarm("save_failed", ended.step, str(ended.failure))
        else:
            data = {"seconds": round(time.monotonic() - self._began, 3), "blocked_s": round(self._blocked_s, 4)}
            self._session.observers.on_event(Event("save", ended.step, data=data))

    def copy_due(self, step: int) -> bool:
        """True if the state of `step` is to be copied to memory, unless training is in trouble."""
        memory = self._session.checkpoints.memory
        return memory is not None and step != self._start and memory.due(step)

    def _copy_if_due(self, step: int, state: TrainState) -> None:
        """Start a copy of `state` in memory if one is due. The updates read so far tell its health: nothing waits for the device."""
        memory = self._session.checkpoints.memory
        if memory is None or step == self._start:
            return
        if memory.due(step) and not self._meter.health.problem:
            with self._session.goodput.measure("save"):
                memory.save(step, state, self._position(step))
        if failure := memory.take_failure():
            self._alarm("memory_save_failed", step, failure)

    def _position(self, step: int) -> dict[str, Any]:
        session, health = self._session, self._meter.health
        position = {"next_step": step, "store": session.data.fingerprint, "health": self._meter.levels, HEALTHY: health.healthy}
        branch = session.program.config.train.branch_from
        position |= {} if branch is None else {BRANCH: branch.step}
        loaded = extensions.identities(session.program.config.extensions)
        position |= {extensions.FIELD: loaded} if loaded else {}
        return position | session.data.position(step) | session.journal.position(session.data.left_out)

    def _alarm(self, cause: str, step: int, reason: str) -> None:
        self._session.observers.on_event(Event("alarm", step, data={"cause": cause, "reason": reason}))


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def not_finite(state: TrainState, mesh: Mesh) -> list[str]:
    """Names of the leaves that hold an infinity or a NaN. Waits for the devices and reads all of it: for saves, not for steps."""
    return extremes(state, mesh)[0]


def extremes(state: TrainState, mesh: Mesh) -> tuple[list[str], dict[str, float]]:
    """(`not_finite`, largest absolute value of each leaf of parameters, optimizer and averages), in one pass over the state."""
    rest, host = _inexact(state)  # and what is in files
    everywhere = NamedSharding(mesh, PartitionSpec())
    found = dict(zip(rest, _compiled(everywhere)(tuple(rest.values())), strict=True))
    found |= {name: _compiled_in_pieces(everywhere, pieces_of([leaf]))(load_all(leaf)) for name, leaf in host.items()}
    found = jax.device_get(found)
    largest = {name: float(value) for name, (_, value) in found.items() if name.startswith(JUDGED)}
    return [name for name, (finite, _) in found.items() if not finite], largest


def prepare_saves(abstract_state: TrainState, mesh: Mesh) -> None:
    """Compile the programs of a save in threads, so that the first one need not wait for them: the check, and the digest."""
    _compiled(NamedSharding(mesh, PartitionSpec())).prepare(list(_inexact(abstract_state)[0].values()))
    digest.prepare(named_leaves(abstract_state))


def _inexact(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leaves of numbers that may not be finite: (on devices, in host memory)."""
    leaves = {name: leaf for name, leaf in named_leaves(state).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    host = {name: leaf for name, leaf in leaves.items() if is_on_host(leaf)}
    return {name: leaf for name, leaf in leaves.items() if name not in host}, host


@functools.cache
def _compiled(everywhere: NamedSharding) -> AheadOfTime:
    def extremes(leaves: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        return tuple(map(_extreme, leaves))

    return AheadOfTime(extremes, everywhere)


def _extreme(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(all are finite, the largest absolute value); a reduction over devices may lose a NaN of the latter."""
    return jnp.all(jnp.isfinite(leaf)), jnp.max(jnp.abs(leaf).astype(jnp.float32), initial=0.0)


@functools.cache
def _compiled_in_pieces(everywhere: NamedSharding, pieces: int) -> Any:
    """For an array in host memory, which is streamed through the device."""

    def finite(leaf: jax.Array) -> Any:
        def joined(so_far: Any, piece: jax.Array, _: Any) -> Any:
            here, value = _extreme(piece)
            return so_far[0] & here, jnp.maximum(so_far[1], value)

        return fold(joined, (jnp.bool_(True), jnp.float32(0)), leaf, pieces)

    return jax.jit(finite, out_shardings=everywhere)
