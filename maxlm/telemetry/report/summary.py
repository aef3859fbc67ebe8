"""What a run did, in words and in a few figures."""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from maxlm.telemetry.formatting import count, duration, figure, percent
from maxlm.telemetry.goodput import PARTS
from maxlm.telemetry.report.load import Run, Series, eval_loss, flatten

FINISHED = ("done", "nothing_left")


@dataclass(frozen=True)
class Status:
    """How the run stands: `tone` is good, warn, bad or idle."""

    word: str
    tone: str
    explanation: str


@dataclass(frozen=True)
class Figures:
    """The run in numbers; None where nothing was written."""

    steps: int
    total_steps: int | None
    tokens: float | None
    parameters: float | None
    first_loss: float | None
    loss: float | None
    held_out: float | None
    tokens_per_s: float | None  # median
    tflops_per_device: float | None
    mfu: float | None
    data_wait: float | None  # share of a step
    seconds: float | None  # wall time of all attempts
    goodput: float | None  # share of it that went to steps which count
    attempts: int
    skipped: int
    hardware: str


def figures_of(run: Run) -> Figures:
    loss, tokens, held_out = run.get("loss"), run.get("tokens"), eval_loss(run)
    wait, step_time = run.get("data_wait_s"), run.get("step_time_s")
    told = _told(run)
    waited = float(wait.values_N.sum() / step_time.values_N.sum()) if len(wait.values_N) and step_time.values_N.sum() > 0 else None
    settings = flatten(run.config)
    total = told.get("total_steps", settings.get("train.steps"))
    return Figures(
        steps=run.last_step,
        total_steps=total if isinstance(total, int) else None,
        tokens=_last(tokens),
        parameters=_number(told.get("parameters")),
        first_loss=float(loss.values_N[0]) if len(loss.values_N) else None,
        loss=_settled(loss),
        held_out=_last(held_out),
        tokens_per_s=_median(run.get("tokens_per_s")),
        tflops_per_device=_median(run.get("tflops_per_device")),
        mfu=_median(run.get("mfu")),
        data_wait=waited,
        seconds=_wall_time(run),
        goodput=_goodput(run),
        attempts=max(1, sum(event.kind == "start" for event in run.events)),
        skipped=sum(event.kind == "skip" for event in run.events),
        hardware=_hardware(told),
    )


def status_of(run: Run) -> Status:
    """Judged by the last word of the run."""
    last_start = max((i for i, e in enumerate(run.events) if e.kind == "start"), default=-1)
    stops = [event for event in run.events[last_start + 1 :] if event.kind == "stop"]
    if not stops:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.modified))
        return Status("no end recorded", "idle", f"It is still going or was killed; it last wrote something at {when}.")
    reason, message = str(stops[-1].data.get("reason", "")), _as_sentence(stops[-1].data.get("message"))
    where = f" at step {stops[-1].step:,}"
    if reason in FINISHED or not reason:
        return Status("finished", "good", message)
    if reason.startswith("preempt"):
        return Status("preempted", "warn", f"It was told to stop{where}; the same command continues it. {message}".strip())
    return Status(reason, "bad", f"It was stopped{where}. {message}".strip())


def in_words(run: Run, f: Figures) -> list[str]:
    """The headline: sentences, most important first."""
    said = [_what(run, f)]
    if f.loss is not None and f.first_loss is not None:
        verb = "fell" if f.loss < f.first_loss else "went"
        change = f"{verb} from {figure(f.first_loss)} to" if f.loss != f.first_loss else "is"
        held_out = f"; on held-out text it is {figure(f.held_out)} (perplexity {_perplexity(f.held_out)})" if f.held_out is not None else ""
        said.append(f"Training loss {change} {figure(f.loss)} nats a token{held_out}.")
    elif f.held_out is not None:
        said.append(f"Held-out loss is {figure(f.held_out)} (perplexity {_perplexity(f.held_out)}).")
    if f.tokens_per_s is not None:
        mfu = f", {percent(f.mfu)} of the hardware's peak (MFU)" if f.mfu is not None else ""
        said.append(f"It typically ran at {count(f.tokens_per_s)} tokens a second{mfu}{f' on {f.hardware}' if f.hardware else ''}.")
    if f.data_wait is not None:
        said.append(f"Steps waited for data {percent(f.data_wait)} of their time.")
    if f.attempts > 1 or f.skipped:
        said.append(_troubles(f))
    return said


def goodput_of(run: Run) -> dict[str, float]:
    """Seconds by part over all attempts, with `lost` apart from `step`; {} when nothing was recorded."""
    seconds: dict[str, float] = dict.fromkeys((*PARTS, "lost"), 0.0)
    for attempt in run.attempts:
        for part, value in attempt.seconds.items():
            seconds[part] += value
        seconds["step"] -= attempt.lost_s
        seconds["lost"] += attempt.lost_s
    return seconds if any(seconds.values()) else {}


def between_attempts(run: Run) -> float:
    """Seconds from the end of an attempt to the beginning of the next, together."""
    return sum(max(0.0, after.began - before.ended) for before, after in pairwise(run.attempts))


def _what(run: Run, f: Figures) -> str:
    model = run.config.get("model")
    shape = ""
    if isinstance(model, dict):
        names = (("n_layers", "{:,} layers"), ("d_model", "width {:,}"), ("n_heads", "{:,} heads"), ("vocab_size", "vocabulary {:,}"))
        shape = ", ".join(text.format(model[key]) for key, text in names if isinstance(model.get(key), int))
    size = f"a model of {count(f.parameters)} parameters" if f.parameters is not None else "a model"
    progress = (
        f"{f.steps:,} of {f.total_steps:,} steps"
        if f.total_steps and f.total_steps != f.steps
        else f"{f.steps:,} {'step' if f.steps == 1 else 'steps'}"
    )
    seen = f" and saw {count(f.tokens)} tokens" if f.tokens is not None else ""
    took = f" in {duration(f.seconds)}" if f.seconds else ""
    return f"{run.name} trained {size}{f' ({shape})' if shape else ''} for {progress}{seen}{took}."


def _troubles(f: Figures) -> str:
    parts = []
    if f.attempts > 1:
        parts.append(f"was started {f.attempts} times")
    if f.skipped:
        parts.append(f"skipped {f.skipped:,} {'update' if f.skipped == 1 else 'updates'}")
    return f"It {' and '.join(parts)}."


def _told(run: Run) -> dict[str, Any]:
    """What the starts said, the newest last."""
    told: dict[str, Any] = {}
    for event in run.events:
        if event.kind == "start":
            told.update(event.data)
    return told


def _hardware(told: dict[str, Any]) -> str:
    devices, kind = told.get("devices"), told.get("device_kind")
    return f"{devices} x {kind}" if devices and kind else ""


def _wall_time(run: Run) -> float | None:
    if not run.attempts:  # no events: as long as the steps took
        step_time = run.get("step_time_s")
        return float((np.diff(step_time.steps_N, prepend=0.0) * step_time.values_N).sum()) or None
    return sum(attempt.wall_s for attempt in run.attempts) or None


def _goodput(run: Run) -> float | None:
    seconds = goodput_of(run)
    return seconds["step"] / sum(seconds.values()) if seconds else None


def _settled(series: Series) -> float | None:
    """Mean of the last records (at most 20, at most a twentieth): single steps are noisy."""
    n = len(series.values_N)
    return float(series.values_N[-max(1, min(20, n // 20)) :].mean()) if n else None


def _perplexity(loss: float) -> str:
    return figure(math.exp(loss), 3) if loss < 50 else "beyond counting"


def _last(series: Series) -> float | None:
    return float(series.values_N[-1]) if len(series.values_N) else None


def _median(series: Series) -> float | None:
    return float(np.median(series.values_N)) if len(series.values_N) else None


def _as_sentence(text: Any) -> str:
    said = str(text or "").strip()
    return f"{said[0].upper()}{said[1:].rstrip('.')}." if said else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
