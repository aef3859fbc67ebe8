"""Summary of a run: sentences and a few figures."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxlm.telemetry.course import first_step_since
from maxlm.telemetry.device_memory import PEAK, PROCESS
from maxlm.telemetry.formatting import count, duration, figure, percent
from maxlm.telemetry.ledger import OVER
from maxlm.telemetry.predicted import MEMORY, STEP, predicted_of
from maxlm.telemetry.report.load import Run, Series
from maxlm.telemetry.strict_json import is_finite


@dataclass(frozen=True)
class Status:
    """State of the run; `tone` is good, warn, bad or idle."""

    label: str
    tone: str
    explanation: str


@dataclass(frozen=True)
class Figures:
    """Figures of a run; None where nothing was recorded."""

    steps: int
    total_steps: int | None
    tokens: float | None
    parameters: float | None
    trained: float | None  # parameters that training changes, if not all
    first_loss: float | None
    loss: float | None
    loss_lost: int | None  # step from which on it is not finite
    held_out: float | None
    held_out_lost: int | None
    tokens_per_s: float | None  # median, of the newest hardware
    mfu: float | None
    mfu_peak: str  # the share is of the peak of this format, such as "fp8 "; "" for bf16
    data_wait: float | None  # share of a step
    seconds: float | None  # wall time since the first start
    goodput: float | None  # share of it spent on steps that count
    attempts: int
    skipped: int
    peak_memory: float | None  # bytes, of the fullest local device; on CPUs by the growth of the process
    predicted_memory: float | None  # bytes of a device, by the compiler
    step_s: float | None  # median
    predicted_step_s: float | None
    hardware: str
    cost: float | None  # so far
    currency: str
    kwh: float | None  # energy so far, of the data centre
    joules_per_token: float | None  # of all of it
    energy_estimated: bool


def figures_of(run: Run) -> Figures:
    loss, wait, step_time = run.get("loss"), run.get("data_wait_s"), run.get("step_time_s")
    start, bills = _start_data(run), _bills(run)
    waited = float(wait.values_N.sum() / step_time.values_N.sum()) if len(wait.values_N) and step_time.values_N.sum() > 0 else None
    total = start.get("total_steps", run.settings.get("train.steps"))
    hardware_since = _hardware_since(run)
    cost, kwh, tokens = _so_far(run, "cost"), _so_far(run, "energy_kwh"), _last(run.get("tokens"))
    return Figures(
        steps=run.last_step,
        total_steps=total if isinstance(total, int) else None,
        tokens=tokens,
        parameters=_number(start.get("parameters")),
        trained=_number(start.get("trained_parameters")) if start.get("trained_parameters") != start.get("parameters") else None,
        first_loss=float(loss.values_N[0]) if len(loss.values_N) else None,
        loss=_settled(loss),
        loss_lost=run.lost.get("loss"),
        held_out=_last(run.eval_loss),
        held_out_lost=run.lost.get("eval_loss"),
        tokens_per_s=_median(run.get("tokens_per_s").after(hardware_since)),
        mfu=_median(run.get("mfu").after(hardware_since)),
        mfu_peak=f"{start['mfu_peak']} " if start.get("mfu_peak") in ("int8", "fp8") else "",
        data_wait=waited,
        seconds=_wall_time(run),
        goodput=run.ledger.goodput,
        attempts=max(1, sum(event.kind == "start" for event in run.events)),
        skipped=sum(event.kind == "skip" for event in run.events),
        peak_memory=_peak_memory(run),
        step_s=_median(_of_prediction(run, step_time)),
        predicted_step_s=predicted_of(start, STEP),
        predicted_memory=predicted_of(start, MEMORY),
        hardware=f"{start['devices']} x {start['device_kind']}" if start.get("devices") and start.get("device_kind") else "",
        cost=cost,
        currency="".join(_currencies(bills)),
        kwh=kwh,
        joules_per_token=kwh * 3.6e6 / tokens if kwh is not None and tokens else None,
        energy_estimated=any(one.get("energy_estimated") is True or one.get("energy", "counters") != "counters" for one in bills),
    )


def status_of(run: Run) -> Status:
    """State by the last event of the run."""
    if run.origin:
        return Status("model", "idle", "")
    last_start = max((i for i, e in enumerate(run.events) if e.kind == "start"), default=-1)
    stops = [event for event in run.events[last_start + 1 :] if event.kind == "stop"]
    if not stops:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.modified))
        return Status("no end recorded", "idle", f"It is still going or was killed; it last wrote something at {when}.")
    reason, message = str(stops[-1].data.get("reason", "")), _as_sentence(stops[-1].data.get("message"))
    where = f" at step {stops[-1].step:,}"
    if reason in OVER or not reason:
        return Status("finished", "good", message)
    if reason in ("preempted", "interrupted"):
        return Status(reason, "warn", f"It was asked to stop{where}; the same command continues it. {message}".strip())
    return Status(reason, "bad", f"It was stopped{where}. {message}".strip())


def headline(run: Run, f: Figures) -> list[str]:
    """Sentences of the headline, most important first."""
    sentences = [run.origin or _progress(run, f)]
    sentences += _losses(run, f)
    if f.tokens_per_s is not None:
        mfu = f", {percent(f.mfu)} of the hardware's {f.mfu_peak}peak (MFU)" if f.mfu is not None else ""
        sentences.append(f"It typically ran at {count(f.tokens_per_s)} tokens a second{mfu}{f' on {f.hardware}' if f.hardware else ''}.")
    if f.data_wait is not None:
        sentences.append(f"Steps waited for data {percent(f.data_wait)} of their time.")
    if f.attempts > 1 or f.skipped:
        sentences.append(_troubles(f))
    return sentences


def _losses(run: Run, f: Figures) -> list[str]:
    """A sentence on both losses, and one on each that is not finite any more."""
    said = []
    if f.loss is not None and f.first_loss is not None:
        verb = "fell" if f.loss < f.first_loss else "went"
        change = f"{verb} from {figure(f.first_loss)} to" if f.loss != f.first_loss else "is"
        held_out = f"; on held-out text it is {_held_out(run, f.held_out)}" if f.held_out is not None else ""
        said.append(f"Training loss {change} {figure(f.loss)} {run.loss_unit}{held_out}.")
    elif f.held_out is not None:
        said.append(f"Held-out loss is {_held_out(run, f.held_out)}.")
    lost = {"Training loss": f.loss_lost, "Held-out loss": f.held_out_lost}
    return said + [f"{name} is not finite {from_step(step)}." for name, step in lost.items() if step is not None]


def from_step(step: int) -> str:
    return f"from step {step:,} on"


def notes_of(run: Run) -> list[str]:
    """Sentences about what is missing or damaged, and about losses and gradients that are not finite at the end."""
    lost = {name: step for name, step in run.lost.items() if name in ("loss", "grad_norm") or name.startswith("eval_loss")}
    return run.notes + [f"{name} is not finite {from_step(step)}; its line ends before." for name, step in lost.items()]


def _progress(run: Run, f: Figures) -> str:
    model = run.config.get("model")
    shape = ""
    if isinstance(model, dict):
        names = (("n_layers", "{:,} layers"), ("d_model", "width {:,}"), ("n_heads", "{:,} heads"), ("vocab_size", "vocabulary {:,}"))
        shape = ", ".join(text.format(model[key]) for key, text in names if isinstance(model.get(key), int))
    size = f"a model of {count(f.parameters)} parameters" if f.parameters is not None else "a model"
    size += f", {count(f.trained)} of them trained" if f.trained is not None else ""
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


def _start_data(run: Run) -> dict[str, Any]:
    """Data of all start events; newer values replace older ones."""
    data: dict[str, Any] = {}
    for event in run.events:
        if event.kind == "start":
            data.update(event.data)
    return data


def _wall_time(run: Run) -> float | None:
    if not run.attempts:  # no events: the sum of step times
        step_time = run.get("step_time_s")
        return float((np.diff(step_time.steps_N, prepend=0.0) * step_time.values_N).sum()) or None
    return run.ledger.wall_s or None


def _settled(series: Series) -> float | None:
    """Mean of the last records (at most 20, at most a twentieth): single steps are noisy."""
    n = len(series.values_N)
    return float(series.values_N[-max(1, min(20, n // 20)) :].mean()) if n else None


def _held_out(run: Run, loss: float) -> str:
    """The loss, and of tokens their perplexity."""
    perplexity = figure(math.exp(loss), 3) if loss < 50 else "above e^50"
    return f"{figure(loss)} (perplexity {perplexity})" if run.loss_unit.startswith("nats a token") else figure(loss)


def _bills(run: Run) -> list[dict[str, Any]]:
    """Bills that the starts and ends of attempts state."""
    bills = [event.data.get("bill") for event in run.events if event.kind in ("start", "stop")]
    return [bill for bill in bills if isinstance(bill, dict)]


def _currencies(bills: Sequence[dict[str, Any]]) -> set[str]:
    return {str(bill["currency"]) for bill in bills if "currency" in bill}


def _so_far(run: Run, name: str) -> float | None:
    """The most that a record, or the start or end of an attempt, states of what only grows; None if none does."""
    bills = _bills(run)
    if name == "cost" and len(_currencies(bills)) > 1:
        return None  # they are not added
    stated = [bill[name] for bill in bills if is_finite(bill.get(name)) and bill[name] > 0]  # a first start knows of nothing: 0
    values_N = run.get(name).values_N
    return max([*stated, *([float(values_N.max())] if len(values_N) else [])], default=None)


def _peak_memory(run: Run) -> float | None:
    """Peak bytes of the fullest device; on CPUs the least growth of the process, as `telemetry.predicted` compares it."""
    peaks_N, grown_N = (_of_prediction(run, run.get(name)).values_N for name in (PEAK, PROCESS))
    return float(peaks_N.max()) if len(peaks_N) else float(grown_N.min()) if len(grown_N) else None


def _of_prediction(run: Run, series: Series) -> Series:
    """Records since the newest start that predicts something: earlier attempts may have had other devices, or another config."""
    starts = [i for i, event in enumerate(run.events) if event.kind == "start" and event.data.get("predicted")]
    return series.after(first_step_since(run.events, starts[-1]) if starts else -1)


def _hardware_since(run: Run) -> int:
    """Step after which all records are of the hardware, and of the peak, that the newest start names; -1 if it never changed."""
    since, before = -1, dict[str, Any]()
    for i, event in enumerate(run.events):
        stated = {key: event.data[key] for key in ("devices", "device_kind", "mfu_peak") if event.kind == "start" and key in event.data}
        if any(key in before and before[key] != value for key, value in stated.items()):
            since = first_step_since(run.events, i)
        before |= stated
    return since


def _last(series: Series) -> float | None:
    return float(series.values_N[-1]) if len(series.values_N) else None


def _median(series: Series) -> float | None:
    return float(np.median(series.values_N)) if len(series.values_N) else None


def _as_sentence(text: Any) -> str:
    stripped = str(text or "").strip()
    return f"{stripped[0].upper()}{stripped[1:].rstrip('.')}." if stripped else ""


def _number(value: Any) -> float | None:
    return float(value) if is_finite(value) else None
