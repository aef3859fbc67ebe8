"""Records and events of training, and the interface of observers. No observer can stop or delay training."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

from maxlm.base.background import Background
from maxlm.base.metric import Metric
from maxlm.base.strict_json import dumps, is_finite, is_number

if TYPE_CHECKING:  # numpy, which takes longer to import than a line of progress to print
    from maxlm.telemetry.balance import Balance
    from maxlm.telemetry.run_dir import RunDirectory

log = logging.getLogger(__name__)

EventKind = Literal[
    "start",
    "compile",
    "restore",
    "save",
    "skip",
    "alarm",
    "eval",
    "tasks",
    "rollback",
    "preempt",
    "interrupt",
    "stop",
    "observer",
    "killed",
    "profile",
]
CLOSE_S = 10.0  # for all observers together


@dataclass(frozen=True)
class StepRecord:
    """Figures of an update. Means are over the steps since the record before."""

    step: int
    """Updates done when the record was written. Unit: updates."""
    loss: float
    """Training loss; other objectives than next-token prediction have a unit of their own. Unit: nats a token."""
    grad_norm: float
    """Norm of the whole gradient, before clipping. Unit: gradient norm."""
    lr: float
    """Learning rate of the last update. Unit: learning rate."""
    tokens: int
    """Tokens consumed since the start of the run, padding included. Unit: tokens."""
    tokens_per_s: float
    """Throughput of all devices together. Unit: tokens a second."""
    step_time_s: float
    """Time of an update, waits for data included. Unit: seconds."""
    tflops_per_device: float | None
    """Model FLOPs that a device computes in a second. Unit: 10^12 FLOP/s."""
    mfu: float | None
    """Model FLOPs utilization: share of the peak of the format of the matmuls, which the `start` event names as `mfu_peak`; null where the
    peak is unknown. Unit: share.
    """
    data_wait_s: float
    """Part of an update's time that was spent waiting for its batch. Unit: seconds."""
    time: float = field(default_factory=time.time, compare=False)
    """Time at which the record was written. Unit: seconds since 1970."""
    extra: Mapping[str, float | None] = field(default_factory=dict)  # of declared metrics, and skipped, batch_digest, and of bill.py
    balance: "Balance | None" = field(default=None, compare=False, repr=False)  # expert by expert; on about a thousand records a run
    declared: Sequence[Metric] = field(default=(), compare=False, repr=False)  # metrics with their values in `extra`

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, `extra` included."""
        known = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("extra", "balance", "declared")}
        known["time"] = round(self.time, 3)
        return {**known, **self.extra, **known}  # an extra never replaces one of the fields


@dataclass(frozen=True)
class Event:
    """Something that happens now and then. `data` holds the fields of its kind, all of them optional: see `event_fields.FIELDS`."""

    kind: EventKind
    step: int
    time: float = field(default_factory=time.time)  # seconds since 1970
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_item(cls, item: Mapping[str, Any]) -> "Event | None":
        """The event of a line's object; None if it is no event."""
        kind, step, when = item.get("kind"), item.get("step"), item.get("time")
        if not isinstance(kind, str) or not is_step(step) or not is_finite(when):
            return None
        data = {name: value for name, value in item.items() if name not in ("kind", "step", "time")}
        return cls(kind, step, float(when), data)  # type: ignore[arg-type]  # of a later version perhaps

    def to_json(self) -> str:
        """One line of strict JSON: kind, step, time and the fields of `data`."""
        return dumps({**self.data, "kind": self.kind, "step": self.step, "time": round(self.time, 3)})


def evaluated(event: Event) -> dict[str, Any]:
    """Figures of an event that an evaluation has written, by name: eval_loss, eval_loss/NAME, eval_loss_ema, eval_loss_ema/NAME, the
    same for each metric as eval/METRIC, and tasks/TASK/METRIC; {} of another event.
    """
    if event.kind == "eval":
        return {name: value for name, value in event.data.items() if name.startswith("eval")}
    tasks = event.data.get("tasks") if event.kind == "tasks" else None
    found = {}
    for task, metrics in tasks.items() if isinstance(tasks, Mapping) else ():
        for metric, value in metrics.items() if isinstance(metrics, Mapping) else ():
            found[f"tasks/{task}/{metric}"] = value
    return found


def is_step(value: Any) -> TypeGuard[int]:
    """True for a number of updates, as files hold it."""
    return is_number(value) and isinstance(value, int) and 0 <= value < 2**53


@runtime_checkable
class Observer(Protocol):
    """Follows training, in a thread of its own. A call that raises OSError is made again later, so it must leave nothing half done."""

    def on_step(self, record: StepRecord) -> None:
        """Take the figures of a step."""

    def on_event(self, event: Event) -> None:
        """Take an event."""

    def close(self) -> None:
        """Finish what is under way; nothing follows."""


class ConfiguredObserver(Observer, Protocol):
    """An observer that a section asks for (`Capability.observers`)."""

    @classmethod
    def check(cls, section: Any) -> None:
        """Raise ConfigError for what this host lacks; called on every host before the run opens anything."""

    @classmethod
    def open(cls, section: Any, directory: "RunDirectory", warn: Callable[[str], None]) -> Any:
        """Open what the observer holds from the beginning, such as a port; called on the first process, before anything is written.
        Raises ConfigError, which ends the run on all hosts. `warn` prints a line.
        """
        return None

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "ConfiguredObserver":
        """Gets the section and, by name, settings of the config, the run's `directory`, all `settings` as JSON, `report`, which takes an
        event for all observers, `ended`, which takes the cause of a stop that a person was told of, `goodput`, as `Goodput.summary`, and
        what all observers have opened, `held`, by the keys of their sections.
        """


class Observers:
    """Passes records and events to several observers, each in a thread of its own. No call here waits or fails.

    An observer that raises OSError is given the same again until it succeeds; one that raises anything else is closed and gets no more.
    The others are informed by an `observer` event.
    """

    def __init__(self, observers: Sequence[Observer], complete: Callable[[StepRecord], StepRecord] = lambda record: record) -> None:
        """`complete` adds figures to every record; it is called by the training loop, so it neither waits nor fails."""
        self._step, self._complete = 0, complete
        self._active: list[tuple[Observer, Background]] = []
        for observer in observers:
            name = type(observer).__name__
            self._active.append((observer, Background(name, observer.close, functools.partial(self._report, name))))

    def on_step(self, record: StepRecord) -> None:
        """Hand the record to every observer."""
        self._step, record = record.step, self._complete(record)
        for observer, background in self._active:
            background.put(observer.on_step, record)

    def on_event(self, event: Event) -> None:
        """Hand the event to every observer."""
        self._step = event.step
        for observer, background in self._active:
            background.put(observer.on_event, event)

    def close(self, within_s: float = CLOSE_S) -> list[str]:
        """Close every observer, in `within_s` seconds at most. Returns what was lost, in sentences. A second call does nothing."""
        deadline = time.monotonic() + within_s
        closing, self._active = self._active, []
        for _, background in closing:
            background.finish(deadline)
        problems = [f"{type(observer).__name__}: {problem}" for observer, background in closing if (problem := background.join())]
        for problem in problems:
            log.warning("%s", problem)
        return problems

    def _report(self, name: str, reason: str, error: BaseException | None) -> None:
        log.log(logging.ERROR if error else logging.WARNING, "%s: %s", name, reason, exc_info=error)
        self.on_event(Event("observer", self._step, data={"name": name, "reason": reason}))
