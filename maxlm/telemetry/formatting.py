"""Figures and events as a person says them. The console and the report speak the same language."""

import math
from collections.abc import Mapping
from typing import Any

from maxlm.telemetry.observer import Event

_SCALES = ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"))


def count(number: float) -> str:
    """3210 -> 3,210; 16384000 -> 16.4 M; 8030261248 -> 8.03 B."""
    for scale, letter in _SCALES:
        if abs(number) >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{round(number):,}"


def duration(seconds: float) -> str:
    """0.012 -> 12 ms; 4.2 -> 4.2 s; 192 -> 3 min 12 s; 100000 -> 1 d 3 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def figure(value: float | None, digits: int = 4) -> str:
    """Four significant digits; a dash for what is not known."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 10**digits:
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """0.4123 -> 41.2%; shares under a tenth of a percent are said to be so."""
    if share is None or not math.isfinite(share):
        return "–"
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.1f}%"


def sentence(event: Event) -> str:
    """The event in one short sentence; what its data does not say is left out."""
    data = event.data
    match event.kind:
        case "start":
            return f"Started at step {event.step:,}{_of_total(data)}{_hardware(data)}{_size(data)}{_folder(data)}{_changed(data)}"
        case "restore":
            damaged = "".join(f"; passed over: {reason}" for reason in data.get("passed_over", ()))
            return f"Restored the checkpoint of step {event.step:,}{_took(data)}{damaged}{_changed(data)}"
        case "save":
            return f"Saved step {event.step:,}{_took(data)}{_blocked(data)}"
        case "skip":
            return f"Skipped the update of step {event.step:,}{_because(data)}"
        case "alarm":
            return f"Alarm at step {event.step:,}{_because(data)}"
        case "eval":
            loss = data.get("eval_loss")
            return f"Evaluated at step {event.step:,}" + (f": held-out loss {figure(loss)}" if _is_number(loss) else "")
        case "rollback":
            start = data.get("from_step")
            back = f" from step {start:,}" if isinstance(start, int) else ""
            return f"Rolled back{back} to step {event.step:,}{_because(data)}"
        case "preempt":
            return f"Told to stop at step {event.step:,}{_because(data)}"
        case "killed":
            return f"Killed or crashed after step {event.step:,}: no end of this attempt was recorded"
        case "observer":
            return f"{data.get('name') or 'An observer'} at step {event.step:,}{_because(data)}"
        case "stop":
            reason = f" ({str(data['reason']).replace('_', ' ')})" if data.get("reason") else ""
            message = f": {data['message']}" if data.get("message") else ""
            more = "; the same command goes on" if data.get("reason") == "preempted" else ""
            return f"Stopped at step {event.step:,}{reason}{message}{more}"
    return f"{event.kind} at step {event.step:,}"  # an events.jsonl of a later version


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_total(data: Mapping[str, Any]) -> str:
    total = data.get("total_steps")
    return f" of {total:,}" if isinstance(total, int) else ""


def _hardware(data: Mapping[str, Any]) -> str:
    devices, kind = data.get("devices"), data.get("device_kind")
    return f" on {devices} x {kind}" if devices and kind else ""


def _size(data: Mapping[str, Any]) -> str:
    figures = (("parameters", data.get("parameters")), ("tokens", data.get("total_tokens")))
    known = [f"{count(value)} {unit}" for unit, value in figures if isinstance(value, int | float)]
    return f": {', '.join(known)}" if known else ""


def _folder(data: Mapping[str, Any]) -> str:
    return f", in {data['folder']}" if data.get("folder") else ""


def _changed(data: Mapping[str, Any]) -> str:
    """Settings that are not what they were."""
    changed = data.get("changed")
    if not isinstance(changed, Mapping) or not changed:
        return ""
    pairs = [f"{key} {_was(value)}" for key, value in changed.items()]
    return f"; changed: {', '.join(pairs)}"


def _was(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"from {_plain(value[0])} to {_plain(value[1])}"
    return f"to {_plain(value)}"


def _plain(value: Any) -> str:
    """A learning rate is computed in float32: 0.001, not 0.0010000000474974513."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _took(data: Mapping[str, Any]) -> str:
    seconds = data.get("seconds")
    return f" in {duration(float(seconds))}" if seconds is not None and _is_number(seconds) else ""


def _blocked(data: Mapping[str, Any]) -> str:
    seconds = data.get("blocked_s")
    return f"; training waited {duration(float(seconds))}" if seconds is not None and _is_number(seconds) else ""


def _because(data: Mapping[str, Any]) -> str:
    return f": {data['reason']}" if data.get("reason") else ""
