"""Text of figures and events, for the console and the report."""

import math
from collections.abc import Mapping
from typing import Any

from maxlm.base.strict_json import is_finite, is_number
from maxlm.telemetry.observer import Event, evaluated

# Figures that are parts of data_wait_s
HELD_OUT = "eval_loss"  # then _NAME for an average of the parameters, then /NAME of a set
WAIT_CAUSES = {"data_read_s": "reading the store", "data_pack_s": "shuffling and packing", "data_transfer_s": "transfer to devices"}

_SCALES = ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"))


def count(number: float) -> str:
    """3210 -> 3,210; 16384000 -> 16.4 M; 8030261248 -> 8.03 B; 0.187 -> 0.187."""
    for scale, letter in _SCALES:
        if abs(number) >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.3g}" if abs(number) < 9.995 else f"{round(number):,}"


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


def money(amount: float, currency: str) -> str:
    """0.245 USD -> $0.245; 4.2 USD -> $4.20; 1234 USD -> $1,234; 2.5e6 EUR -> EUR 2.5 M."""
    number = f"{amount:.3g}" if abs(amount) < 1 else f"{amount:.2f}" if abs(amount) < 100 else count(amount)
    return f"${number}" if currency == "USD" else f"{currency} {number}"


def energy(kwh: float) -> str:
    """0.25 -> 250 Wh; 12 -> 12 kWh; 3400 -> 3.4 MWh; 5.6e6 -> 5.6 GWh."""
    return _scaled(1000 * kwh, ("Wh", "kWh", "MWh", "GWh", "TWh"))


def mass(kg: float) -> str:
    """0.25 -> 250 g; 12 -> 12 kg; 3400 -> 3.4 t."""
    return _scaled(1000 * kg, ("g", "kg", "t", "kt", "Mt"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three digits, in the unit that leaves one to three before the point; each is 1000 times the one before."""
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{count(value) if value >= 999.5 else f'{value:.3g}'} {units[-1]}"


def figure(value: float | None, digits: int = 4) -> str:
    """Four significant digits; a dash for an unknown value."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 10**digits:
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """0.4123 -> 41.2%; 0.0004 -> <0.1%."""
    if share is None or not math.isfinite(share):
        return "–"
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.1f}%"


def sentence(event: Event) -> str:
    """The event in one short sentence, without what its data does not have."""
    data, at = event.data, f"step {event.step:,}"
    reason = f": {data['reason']}" if data.get("reason") else ""
    match event.kind:
        case "start":
            return f"Started at {at}{_run_facts(data)}{_changed(data)}"
        case "restore":
            causes = data.get("passed_over")
            skipped = "".join(f"; skipped: {cause}" for cause in (causes if isinstance(causes, list | tuple) else ()))
            done = f"Branched off {data['branch_of']} at {at}" if "branch_of" in data else f"Restored the checkpoint of {at}"
            return f"{done}{_time(data, 'seconds', ' in')}{skipped}{_changed(data)}"
        case "compile":
            return f"Compiled by {at}{_programs(data)}"
        case "save":
            return f"Saved {at}{_time(data, 'seconds', ' in')}{_time(data, 'blocked_s', '; training waited')}"
        case "skip":
            return f"Skipped the update of {at}{reason}"
        case "alarm":
            return f"Alarm at {at}{reason}"
        case "eval":
            loss = data.get("eval_loss")
            losses = {key: value for key, value in evaluated(event).items() if key != HELD_OUT and is_number(value)}
            named = "".join(f", {_weights_and_set(key)} {figure(value)}" for key, value in losses.items())
            return f"Evaluated at {at}" + (f": held-out loss {figure(loss)}{named}" if is_number(loss) else "")
        case "tasks":
            known = {key.removeprefix("tasks/"): value for key, value in evaluated(event).items() if is_number(value)}
            notes = data.get("notes")
            parts = [*(f"{key} {figure(value)}" for key, value in known.items()), *(map(str, notes) if isinstance(notes, list) else ())]
            return f"Tasks at {at}" + (f": {', '.join(parts)}" if parts else "")
        case "rollback":
            start = data.get("from_step")
            origin = f" from step {start:,}" if isinstance(start, int) else ""
            return f"Rolled back{origin} to {at}{reason}"
        case "preempt" | "interrupt":
            return f"Asked to stop at {at}{reason}"
        case "killed":
            return f"Killed or crashed after {at}: no end of this attempt was recorded"
        case "profile":
            return (
                f"Profiled the steps from {at} on: {data['page']}" if data.get("page") else f"No profile of the steps from {at} on{reason}"
            )
        case "observer":
            return f"{data.get('name') or 'An observer'} at {at}{reason}"
        case "stop":
            cause = f" ({str(data['reason']).replace('_', ' ')})" if data.get("reason") else ""
            message = f": {data['message']}" if data.get("message") else ""
            more = "; the same command continues it" if data.get("reason") in ("preempted", "interrupted") else ""
            return f"Stopped at {at}{cause}{message}{more}"
    return f"{event.kind} at {at}"  # an events.jsonl of a later version


def _time(data: Mapping[str, Any], key: str, prefix: str) -> str:
    seconds = data.get(key)
    return f"{prefix} {duration(float(seconds))}" if is_number(seconds) else ""


def _programs(data: Mapping[str, Any]) -> str:
    """Number, time and cache hits of the programs of a `compile` event."""
    number, hits, longest = data.get("programs"), data.get("cache_hits"), data.get("longest")
    seconds = [value for key in ("trace_s", "lower_s", "compile_s") if is_number(value := data.get(key))]
    text = f": {number:,} {'program' if number == 1 else 'programs'}" if isinstance(number, int) else ""
    text += f", {hits:,} of them from the cache" if isinstance(hits, int) and hits else ""
    text += f", in {duration(sum(seconds))}" if seconds else ""
    named = longest[0] if isinstance(longest, list) and longest and isinstance(longest[0], Mapping) else {}
    return text + (f"; longest: {named['name']}{_time(named, 'seconds', ',')}" if named.get("name") else "")


def _run_facts(data: Mapping[str, Any]) -> str:
    """Steps, hardware, sizes and folder of a start event."""
    total, devices, kind = data.get("total_steps"), data.get("devices"), data.get("device_kind")
    text = f" of {total:,}" if isinstance(total, int) else ""
    text += f" on {devices} x {kind}" if devices and kind else ""
    figures = (("parameters", data.get("parameters")), ("tokens", data.get("total_tokens")))
    known = [f"{count(value)} {unit}" for unit, value in figures if is_finite(value)]
    parameters, trained = data.get("parameters"), data.get("trained_parameters")
    if is_finite(parameters) and is_finite(trained) and trained != parameters:
        known.insert(1, f"{count(trained)} of them trained")
    text += f": {', '.join(known)}" if known else ""
    text += f", MFU of the {data['mfu_peak']} peak" if data.get("mfu_peak") in ("int8", "fp8") else ""
    return text + (f", in {data['folder']}" if data.get("folder") else "")


def _changed(data: Mapping[str, Any]) -> str:
    """Settings that differ from the previous attempt."""
    changed = data.get("changed")
    if not isinstance(changed, Mapping) or not changed:
        return ""
    pairs = []
    for key, value in changed.items():
        old, new = value if isinstance(value, list | tuple) and len(value) == 2 else (None, value)
        pairs.append(f"{key} to {_short(new)}" if old is None else f"{key} from {_short(old)} to {_short(new)}")
    return f"; changed: {', '.join(pairs)}"


def _short(value: Any) -> str:
    """Six digits: a learning rate is computed in float32, and is 0.001, not 0.0010000000474974513."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def held_out_title(key: str) -> str:
    """Title of a held-out loss: eval_loss_ema/wiki -> Held-out loss of the moving average: wiki."""
    kind, _, rest = key.partition("/")
    average = _average(kind)
    return "Held-out loss" + (f" of the {average}" if average else "") + (f": {rest}" if rest else "")


def _weights_and_set(key: str) -> str:
    kind, _, rest = key.partition("/")
    kind = kind if kind.startswith(HELD_OUT) else kind.replace("eval", HELD_OUT, 1)
    return "/".join(part for part in (_average(kind), rest) if part)


def _average(kind: str) -> str:
    name = kind.removeprefix(HELD_OUT).removeprefix("_")
    return "moving average" if name == "ema" else f"average {name}" if name else ""
