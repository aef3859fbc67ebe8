"""Summary of a run: sentences and a few figures."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maxlm.base.host import in_bytes
from maxlm.base.strict_json import is_finite
from maxlm.config import extensions
from maxlm.telemetry.course import first_step_since, last_stop
from maxlm.telemetry.device_memory import PEAK, PROCESS
from maxlm.telemetry.formatting import count, duration, energy, figure, money, percent
from maxlm.telemetry.ledger import OVER
from maxlm.telemetry.predicted import MEMORY, STEP, expected_of, predicted_of, sentences_of
from maxlm.telemetry.report.load import Run, Series


@dataclass(frozen=True)
class Status:
    """State of the run; `tone` is good, warn, bad or idle."""

    label: str
    tone: str
    explanation: str


class Figure(NamedTuple):
    """A figure of a run, as the page names it, with its hint; `text` writes its value, which is None where nothing was recorded."""

    name: str
    hint: str
    value: Callable[[Run], float | None]
    text: Callable[[Run, float], str]


def loss_text(value: float) -> str:
    """A loss with as many digits as the others of its column: 1.900 above 1.905."""
    return "not finite" if math.isinf(value) else f"{value:#.4g}" if abs(value) < 1e4 else figure(value)


def status_of(run: Run) -> Status:
    """State by the last event of the run."""
    if run.origin:
        return Status("model", "idle", "")
    stop = last_stop(run.events)
    if stop is None:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.modified))
        return Status("no end recorded", "idle", f"It is still going or was killed; it last wrote something at {when}.")
    reason, message = str(stop.data.get("reason", "")), _as_sentence(stop.data.get("message"))
    where = f" at step {stop.step:,}"
    if reason in OVER or not reason:
        return Status("finished", "good", message)
    if reason in ("preempted", "interrupted"):
        return Status(reason, "warn", f"It was asked to stop{where}; the same command continues it. {message}".strip())
    return Status(reason, "bad", f"It was stopped{where}. {message}".strip())


def headline(run: Run, values: Mapping[str, float | None]) -> list[str]:
    """Sentences of the headline, most important first; `values`: of `figures_of`."""
    sentences = [run.origin or _progress(run, values), *_losses(run)]
    if (speed := values["tokens_per_s"]) is not None:
        peak, devices, kind = (run.start.get(key) for key in ("mfu_peak", "devices", "device_kind"))
        of_format = f"{peak} " if peak in ("int8", "fp8") else ""
        mfu = f", {percent(values['mfu'])} of the hardware's {of_format}peak (MFU)" if values["mfu"] is not None else ""
        sentences.append(f"It typically ran at {count(speed)} tokens a second{mfu}{f' on {devices} x {kind}' if devices and kind else ''}.")
    if values["data_wait"] is not None:
        sentences.append(f"Steps waited for data {percent(values['data_wait'])} of their time.")
    starts, skips = (sum(event.kind == kind for event in run.events) for kind in ("start", "skip"))
    troubles = [f"was started {starts} times"] * (starts > 1) + [f"skipped {skips:,} {'update' if skips == 1 else 'updates'}"] * (skips > 0)
    return sentences + [f"It {' and '.join(troubles)}."] * bool(troubles)


def _losses(run: Run) -> list[str]:
    """A sentence on both losses, and one on each that is not finite any more."""
    said, series, held_out = [], run.get("loss"), _last(run.eval_loss)
    if (loss := _settled(series)) is not None:
        first = float(series.values_N[0])
        change = f"{'fell' if loss < first else 'went'} from {figure(first)} to" if loss != first else "is"
        more = f"; on held-out text it is {_held_out(run, held_out)}" if held_out is not None else ""
        said.append(f"Training loss {change} {figure(loss)} {run.loss_unit}{more}.")
    elif held_out is not None:
        said.append(f"Held-out loss is {_held_out(run, held_out)}.")
    lost = {"Training loss": run.lost.get("loss"), "Held-out loss": run.lost.get("eval_loss")}
    return said + [f"{name} is not finite from step {step:,} on." for name, step in lost.items() if step is not None]


def notes_of(run: Run) -> list[str]:
    """Sentences about missing or damaged files, the basis of a predicted step, and losses and gradients that are not finite at the end."""
    lost = {name: step for name, step in run.lost.items() if name in ("loss", "grad_norm") or name.startswith("eval_loss")}
    prediction = [f"Prediction of the step: {sentence}" for sentence in sentences_of(run.start)]
    loaded = run.start.get(extensions.FIELD)
    named = [f"Extension {name}, version and digest {identity}." for name, identity in loaded.items()] if isinstance(loaded, dict) else []
    return (
        run.notes
        + named
        + prediction
        + [f"{name} is not finite from step {step:,} on; its line ends before." for name, step in lost.items()]
    )


def _progress(run: Run, values: Mapping[str, float | None]) -> str:
    model = run.config.get("model")
    shape = ""
    if isinstance(model, dict):
        names = (("n_layers", "{:,} layers"), ("d_model", "width {:,}"), ("n_heads", "{:,} heads"), ("vocab_size", "vocabulary {:,}"))
        shape = ", ".join(text.format(model[key]) for key, text in names if isinstance(model.get(key), int))
    parameters, trained, tokens, seconds = (values[key] for key in ("parameters", "trained", "tokens", "seconds"))
    size = f"a model of {count(parameters)} parameters" if parameters is not None else "a model"
    size += f", {count(trained)} of them trained" if trained is not None else ""
    progress = _steps(run, run.last_step)
    progress += " step" if progress == "1" else " steps"
    seen = f" and saw {count(tokens)} tokens" if tokens is not None else ""
    took = f" in {duration(seconds)}" if seconds else ""
    return f"{run.name} trained {size}{f' ({shape})' if shape else ''} for {progress}{seen}{took}."


def _steps(run: Run, steps: int) -> str:
    """`300 of 1,000`, or without a total that differs `300`."""
    total = run.start.get("total_steps", run.settings.get("train.steps"))
    return f"{steps:,}" + (f" of {total:,}" if isinstance(total, int) and total not in (0, steps) else "")


def _trained(run: Run) -> float | None:
    """Parameters that training changes, if not all."""
    trained = run.start.get("trained_parameters")
    return _number(trained) if trained != run.start.get("parameters") else None


def _on_newest_hardware(name: str) -> Callable[[Run], float | None]:
    return lambda run: _median(run.get(name).after(_hardware_since(run)))


def _predicted(key: str) -> Callable[[Run], float | None]:
    return lambda run: predicted_of(run.start, key)


def _data_wait(run: Run) -> float | None:
    """Share of a step."""
    wait_N, step_time_N = run.get("data_wait_s").values_N, run.get("step_time_s").values_N
    return float(wait_N.sum() / step_time_N.sum()) if len(wait_N) and step_time_N.sum() > 0 else None


def _compared_step(run: Run) -> float | None:
    """Median step, where one was predicted."""
    return None if predicted_of(run.start, STEP) is None else _median(_of_prediction(run, run.get("step_time_s")))


def _corrected_step(run: Run) -> float | None:
    """Estimated seconds of a step, where the expected ones differ."""
    estimate = predicted_of(run.start, STEP)
    return None if estimate == expected_of(run.start).get("middle") else estimate


def _expected_step(run: Run, seconds: float) -> str:
    """`0.61 s (0.58 s to 0.66 s)`, or `0.61 s` without a range."""
    expected = expected_of(run.start)
    low, high = duration(expected["low"]), duration(expected["high"])
    return duration(seconds) + (f" ({low} to {high})" if expected["low"] < expected["high"] else "")


def _energy_a_token(run: Run) -> float | None:
    """Joules of all energy so far over all tokens."""
    kwh, tokens = _so_far(run, "energy_kwh"), _last(run.get("tokens"))
    return kwh * 3.6e6 / tokens if kwh is not None and tokens else None


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


def _currencies(run: Run) -> set[str]:
    return {str(bill["currency"]) for bill in run.bills if "currency" in bill}


def _is_estimated(bill: Mapping[str, Any]) -> bool:
    return bill.get("energy_estimated") is True or bill.get("energy", "counters") != "counters"


def _so_far(run: Run, name: str) -> float | None:
    """The most that a record, or the start or end of an attempt, states of what only grows; None if none does."""
    if name == "cost" and len(_currencies(run)) > 1:
        return None  # they are not added
    stated = [bill[name] for bill in run.bills if is_finite(bill.get(name)) and bill[name] > 0]  # a first start knows of nothing: 0
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


def _plain(text: Callable[[float], str]) -> Callable[[Run, float], str]:
    return lambda run, value: text(value)


def _marked(text: Callable[[float], str]) -> Callable[[Run, float], str]:
    """Text of a figure of energy, marked where it is estimated."""
    return lambda run, value: f"{'~' if any(map(_is_estimated, run.bills)) else ''}{text(value)}"


def _loss(name: str, value: Callable[[Run], float | None]) -> Callable[[Run], float | None]:
    """`value`, or infinity where the metric `name` is not finite any more."""
    return lambda run: math.inf if name in run.lost else value(run)


FIGURES = {
    "parameters": Figure("Parameters", "numbers of the model", lambda run: _number(run.start.get("parameters")), _plain(count)),
    "trained": Figure("Trained", "of them, in adapters", _trained, _plain(count)),
    "steps": Figure("Steps", "updates of the model", lambda run: run.last_step, lambda run, steps: _steps(run, int(steps))),
    "tokens": Figure("Tokens", "pieces of text seen", lambda run: _last(run.get("tokens")), _plain(count)),
    "loss": Figure("Training loss", "lower is better", _loss("loss", lambda run: _settled(run.get("loss"))), _plain(loss_text)),
    "held_out": Figure(
        "Held-out loss", "on text never trained on", _loss("eval_loss", lambda run: _last(run.eval_loss)), _plain(loss_text)
    ),
    "tokens_per_s": Figure("Throughput", "tokens/s, median", _on_newest_hardware("tokens_per_s"), _plain(count)),
    "mfu": Figure("MFU", "of the hardware's peak", _on_newest_hardware("mfu"), _plain(percent)),
    "data_wait": Figure("Data wait", "of a step's time", _data_wait, _plain(percent)),
    "step_s": Figure("Step", "median", _compared_step, _plain(duration)),
    "expected_step_s": Figure("Step, expected", "before the first one", lambda run: expected_of(run.start).get("middle"), _expected_step),
    "predicted_step_s": Figure("Step, estimated", "without the correction by published runs", _corrected_step, _plain(duration)),
    "peak_memory": Figure("Peak memory", "of the fullest device", _peak_memory, _plain(in_bytes)),
    "predicted_memory": Figure("Memory, predicted", "of a device, by the compiler", _predicted(MEMORY), _plain(in_bytes)),
    "seconds": Figure("Time", "since the first start", _wall_time, _plain(duration)),
    "goodput": Figure("Goodput", "of that time, on steps that count", lambda run: run.ledger.goodput, _plain(percent)),
    "cost": Figure(
        "Cost", "of the chips, so far", lambda run: _so_far(run, "cost"), lambda run, cost: money(cost, "".join(_currencies(run)))
    ),
    "kwh": Figure("Energy", "of the data centre; ~: estimated", lambda run: _so_far(run, "energy_kwh"), _marked(energy)),
    "joules_per_token": Figure("Energy a token", "mean of all of it", _energy_a_token, _marked(lambda joules: f"{figure(joules, 3)} J")),
}


def figures_of(run: Run) -> dict[str, float | None]:
    """Values of all `FIGURES` of a run."""
    return {key: one.value(run) for key, one in FIGURES.items()}
