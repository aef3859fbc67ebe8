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

    step: int  # updates done
    loss: float  # nats a token
    grad_norm: float  # global, before clipping
    lr: float
    tokens: int  # consumed since the start of the run, padding included
    tokens_per_s: float  # of all devices together
    step_time_s: float
    tflops_per_device: float | None  # 10^12 FLOP/s
    mfu: float | None  # share of the peak of the format of the matmuls (`mfu_peak` of the start event), 0 to 1; None where it is unknown
    data_wait_s: float  # of a step, waiting for its batch
    time: float = field(default_factory=time.time, compare=False)  # seconds since 1970
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
    """Something that happens now and then. `data` by kind, all of it optional (times in seconds):

    start     step it starts from; `parameters devices device_kind processes total_steps total_tokens folder version`, `mfu_peak`
              (bf16, int8 or fp8: MFU is a share of its peak), `startup_s` since the command began, `changed` (setting ->
              old and new value), `metrics` (name -> title and unit, see metric.py), `attempt` (its id), `restarts` (attempts before),
              `extensions` (name -> version and digest), `bill` (rates, see bill.py), `predicted` (see predicted.py), without some hosts
              `elastic` (`absent`, `mesh`, `microbatches`)
    restore   step restored; `seconds`, `passed_over` (why newer checkpoints were not taken), `changed` as above, `source` (checkpoint,
              memory, memory of peers, branch; then `branch_of` is the folder of the other run)
    compile   programs compiled since the last of these events, or since the command began; `programs` (how many), `trace_s lower_s
              compile_s`, `cache_hits cache_misses` of the persistent cache, `longest` (name, seconds, cached)
    save      step of a committed save; `seconds`, `blocked_s` the loop waited for it
    skip      step of an update that was not applied; `reason`, `cause` (spike, where loss and gradient are finite; loss_scale)
    alarm     step at which something needs attention; `reason` (what and what to do), `cause` and `layer` (see alarms.py, routing.py
              and layer_alarms.py; not_finite, with `tensor`: see evidence.py; recompilation of the step: see compilations.py). Of the
              watchdog: `hang` (`hosts` to blame, if known; `seconds` without progress), and `slow_host`, `slow_link` (`hosts`, `since`
              which step) with `slow_host_recovered` and `slow_link_recovered`; `no_watchdog`. Of `corrupted`: `devices` (ids), `hosts`,
              and `certain` if these are the wrong ones and not suspects (see integrity.py)
    eval      `eval_loss` (nats a token), `eval_loss/NAME` of each set of data.eval, `eval_loss_ema` and its names (`ema`), `seconds`;
              of the section `metrics` in the same way `eval/METRIC`, `eval/METRIC/NAME`, `eval_ema/METRIC`
    tasks     `tasks` (task -> metric -> value), `notes` (sentences about what was cut off or failed), `seconds`
    rollback  step gone back to; `from_step reason`, `cause` (spike, bad_loss, not_finite, layer_jump ...), `batches` left out from here on
              (their numbers), `seconds`, `passed_over` as above
    preempt   `reason` (the signal, of a machine or a scheduler)
    interrupt `reason` (the signal: Ctrl-C, or the end of the terminal)
    killed    last step recorded of an attempt that ended without `stop` (killed, crashed), at the time of that record; written by the next
              attempt; `goodput`, as far as its last heartbeat tells
    profile   step before the first that was traced: `page` (its path), `attributed` (share of device time), `seconds` training paused for
              it; or `reason`, where it failed
    observer  an observer failed, was switched off or writes again: `name reason`
    stop      last step; `reason` (done, nothing_left, preempted, interrupted, unhealthy, hung), `message`, `goodput` (see goodput.py),
              `eval_loss`, `bill` (cost and energy of the run so far)
    """

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

    def _report(self, name: str, reason: str, error: Exception | None) -> None:
        log.log(logging.ERROR if error else logging.WARNING, "%s: %s", name, reason, exc_info=error)
        self.on_event(Event("observer", self._step, data={"name": name, "reason": reason}))
