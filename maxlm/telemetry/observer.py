"""What training tells the world, and the one interface those who listen implement. Nobody who listens can stop training by failing."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from maxlm.telemetry.balance import Balance
from maxlm.telemetry.strict_json import dumps

log = logging.getLogger(__name__)

EventKind = Literal["start", "restore", "save", "skip", "alarm", "eval", "rollback", "preempt", "stop"]


@dataclass(frozen=True)
class StepRecord:
    """What is known after an update. Means are over the steps since the record before."""

    step: int  # updates done
    loss: float  # nats a token
    grad_norm: float  # global, before clipping
    lr: float
    tokens: int  # consumed since the start of the run, padding included
    tokens_per_s: float  # of all devices together
    step_time_s: float
    tflops_per_device: float | None  # 10^12 FLOP/s
    mfu: float | None  # share of the peak, 0 to 1; None where the peak is unknown
    data_wait_s: float  # of a step, waiting for its batch
    extra: Mapping[str, float] = field(default_factory=dict)  # z_loss, skipped, eval_loss, ...; with experts Balance.figures()
    balance: Balance | None = field(default=None, compare=False, repr=False)  # expert by expert; on about a thousand records a run

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, `extra` beside the others; not `balance`, which is more than figures."""
        known = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("extra", "balance")}
        return {**known, **self.extra, **known}  # an extra never hides a figure of ours

    def to_json(self) -> str:
        """One line of strict JSON: what is not finite is null."""
        return dumps(self.to_dict())


@dataclass(frozen=True)
class Event:
    """Something that happens now and then. `data` by kind, all of it optional (times in seconds):

    start     step it starts from; `parameters devices device_kind processes total_steps version`
    restore   step restored; `seconds`, `passed_over` (why newer checkpoints were not taken)
    save      step whose save began; `blocked_s` the loop waited for it, `failed_before` why the save before it failed
    skip      step whose update was not applied; `reason`
    alarm     step at which something needs attention; `reason` (what and what to do), `cause` and `layer` (see alarms.py)
    eval      `eval_loss` (nats a token), `seconds`
    rollback  step gone back to; `from_step reason`
    preempt   `reason` (the signal)
    stop      last step; `reason` (done, nothing_left, preempted, unhealthy ...), `message`, `goodput` (see goodput.py), `eval_loss`
    """

    kind: EventKind
    step: int
    time: float = field(default_factory=time.time)  # seconds since 1970
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of strict JSON, `data` beside kind, step and time."""
        return dumps({**self.data, "kind": self.kind, "step": self.step, "time": round(self.time, 3)})


class Observer(Protocol):
    """Listens to training, in the thread of the loop: be quick."""

    def on_step(self, record: StepRecord) -> None: ...
    def on_event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Observers:
    """Tells several observers. One that raises is logged, closed and told no more; the others and training go on."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._active = list(observers)

    def on_step(self, record: StepRecord) -> None:
        for observer in tuple(self._active):
            self._tell(observer, "on_step", record)

    def on_event(self, event: Event) -> None:
        for observer in tuple(self._active):
            self._tell(observer, "on_event", event)

    def close(self) -> None:
        """Closes every observer still active. A second call does nothing."""
        for observer in tuple(self._active):
            self._tell(observer, "close")
        self._active.clear()

    def _tell(self, observer: Observer, method: str, *args: StepRecord | Event) -> None:
        try:
            getattr(observer, method)(*args)
        except Exception:
            self._active.remove(observer)
            log.exception("%s failed in %s and is switched off; training goes on without it", type(observer).__name__, method)
            if method != "close":
                self._close_quietly(observer)

    @staticmethod
    def _close_quietly(observer: Observer) -> None:
        try:
            observer.close()  # a console must give the terminal back, a file its last lines
        except Exception:
            log.debug("closing %s failed too", type(observer).__name__, exc_info=True)
