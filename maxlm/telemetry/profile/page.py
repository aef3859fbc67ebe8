"""The profile as one HTML page without network access."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from maxlm.base.host import in_bytes
from maxlm.telemetry import pages
from maxlm.telemetry.formatting import duration, percent
from maxlm.telemetry.pages import table
from maxlm.telemetry.profile.attribution import HOST_MARK, LONGEST_GAPS, Device, Profile
from maxlm.telemetry.profile.intervals import Spans
from maxlm.telemetry.profile.scopes import COLLECTIVES, PHASES, TITLES, Phase, scope_of

PS = 1e12  # picoseconds a second
LONGEST_OPS, MOST_DEVICES, MEMORY_POINTS = 40, 64, 600
COLORS = ("--p0", "--p1", "--p2", "--p3", "--p4", "--p6", "--p5", "--p7")
_CSS = "main{max-width:1240px}.bar span{min-width:1px}td code{overflow-wrap:anywhere}.wrap td{white-space:normal}"
_FEW = 0.0005  # share of time under which a part is not drawn
_WELL = 0.9  # share of attributed time from which nothing is advised
_COMMAND_BUFFERS = (
    "What XLA launches in command buffers (CUDA graphs) names no operation; the step of a run with run.profile has none, unless XLA_FLAGS "
    "name some in xla_gpu_enable_command_buffer."
)

Predicted = Mapping[str, Mapping[Phase, float]]  # scope -> phase -> seconds a step on one device


@dataclass(frozen=True)
class Facts:
    """Facts that the trace does not hold."""

    title: str
    steps: int = 1  # that the trace covers
    step: int | None = None  # update before the first of them
    hardware: str = ""
    predicted: Predicted | None = None  # the estimate
    factor: float = 1.0  # of the estimate, for the expected seconds
    prediction_note: str = "The trace alone is known here, so there is no prediction."
    viewer_file: str = "trace.json.gz"
    notes: Sequence[str] = field(default_factory=tuple)


def render(profile: Profile, facts: Facts) -> str:
    """The page. Raises nothing for a trace with no operation: it says so."""
    sections = [_header(profile, facts)]
    if profile.devices:
        sections += [_parts(profile, facts), _busy(profile, facts), _gaps(profile, facts), _collectives(profile, facts)]
        sections += [_host(profile, facts), _memory(profile), _ops(profile, facts)]
        viewer = f"{facts.viewer_file}, in the folder of this page, is the timeline: open it at ui.perfetto.dev or in chrome://tracing."
        sections.append(f'<section><p class="note">{escape(viewer)}</p></section>')
    return pages.page(f"{facts.title} · profile", sections, css=_CSS)


def _a_step(picoseconds: float, profile: Profile, facts: Facts) -> float:
    """Seconds a step, the mean of devices."""
    return picoseconds / PS / max(facts.steps, 1) / max(len(profile.devices), 1)


def _header(profile: Profile, facts: Facts) -> str:
    begun = f", from step {facts.step:,} on" if facts.step is not None else ""
    kind = "all threads of the CPU as one device" if profile.is_cpu else f"{len(profile.devices)} devices of this host"
    lead = f"{facts.steps} step{'s' * (facts.steps != 1)}{begun}; {kind}" + (f"; {facts.hardware}" if facts.hardware else "") + "."
    if not profile.devices:
        lead += " The trace holds no operation of a device: there is nothing to show."
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in facts.notes)
    return (
        f'<header><p class="kind">Profile</p><h1>{escape(facts.title)}</h1><p class=lead>{escape(lead)}</p>{notes}'
        f"{_cards(profile, facts) if profile.devices else ''}</header>"
    )


def _cards(profile: Profile, facts: Facts) -> str:
    window = sum(device.window for device in profile.devices)
    share = {
        "Compute": sum(device.compute for device in profile.devices) / window,
        "Exposed communication": sum(device.exposed for device in profile.devices) / window,
        "Idle": 1 - sum(device.busy for device in profile.devices) / window,
    }
    hints = {
        "Compute": "operations that are no collective",
        "Exposed communication": "no compute at that time",
        "Idle": "nothing runs",
    }
    cards = [("Step", duration(_a_step(window, profile, facts)), "from the first operation to the last, a step")]
    cards += [(name, percent(value), f"of that time; {hints[name]}") for name, value in share.items()]
    cards.append(("Attributed", percent(profile.attributed), "of device time, to a part of the step"))
    return pages.cards(cards)


def _parts(profile: Profile, facts: Facts) -> str:
    """Time by part of the model and phase, compared with the prediction."""
    measured, total = profile.table(), sum(profile.own.values())
    order = sorted(measured, key=lambda scope: -sum(measured[scope].values()))
    drawn = [(TITLES[scope], sum(measured[scope].values())) for scope in order]
    predicted = facts.predicted or {}
    known = facts.predicted is not None
    heads = ["part", *PHASES, "all", "share"]
    heads += ["expected", "of expected", "estimate"][: 3 if facts.factor != 1 else 2] if known else []

    def against(measured: float, estimate: float) -> list[str]:
        """Cells of the prediction; without a correction the estimate is the expected time."""
        expected = facts.factor * estimate
        cells = [_short(expected), _ratio(_a_step(measured, profile, facts), expected), _short(estimate)]
        return cells[: 3 if facts.factor != 1 else 2] if known else []

    rows = []
    for scope in [*order, *(scope for scope in predicted if scope not in measured)]:
        phases = measured.get(scope, {})
        whole = sum(phases.values())
        cells = [_time(phases.get(phase, 0), profile, facts) for phase in PHASES]
        cells += [_time(whole, profile, facts), percent(whole / total), *against(whole, sum(predicted.get(scope, {}).values()))]
        rows.append([escape(TITLES[scope]), *cells])
    sums = [sum(phases.get(phase, 0) for phases in measured.values()) for phase in PHASES]
    last = against(total, sum(sum(phases.values()) for phases in predicted.values()))
    rows.append(["<b>all</b>", *(_time(time, profile, facts) for time in sums), _time(total, profile, facts), "100.0%", *last])
    unit = "time of threads" if profile.is_cpu else "device time"
    unnamed = f" {_COMMAND_BUFFERS}" if profile.is_gpu and (profile.attributed or 0.0) < _WELL else ""
    return (
        f"<section><h2>Time by part of the step</h2>{_bar(drawn, total)}{table(heads, rows, numbers=True)}"
        f'<p class="note">Mean {unit} a step on one device; the time of an operation without those nested in it. Recomputed: forward '
        f"again in the backward pass (remat). {escape(facts.prediction_note)}{unnamed}</p></section>"
    )


def _time(picoseconds: float, profile: Profile, facts: Facts) -> str:
    return _short(_a_step(picoseconds, profile, facts)) if picoseconds else "–"


def _short(seconds: float) -> str:
    """In milliseconds, so that figures of a column compare; a second or more as anywhere."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else duration(seconds)


def _ratio(measured: float, expected: float) -> str:
    return f"{measured / expected:.2f}x" if expected else "–"


def _bar(parts: Sequence[tuple[str, float]], total: float) -> str:
    shown = [(name, value / total) for name, value in parts if value > _FEW * total]
    colors = [f"background:var({color}){fade}" for fade in ("", ";opacity:.55") for color in COLORS]
    return pages.bar([(name, share, colors[i % len(colors)], "") for i, (name, share) in enumerate(shown)], "share of time")


def _busy(profile: Profile, facts: Facts) -> str:
    """Compute, communication and idle time of every device."""
    steps, rows = max(facts.steps, 1) * PS, []
    for device in profile.devices[:MOST_DEVICES]:
        busy, hidden = device.busy, device.communication - device.exposed
        times = device.window, device.compute, device.communication, hidden, device.exposed, device.window - busy
        rows.append([escape(device.name), *(_short(time / steps) for time in times)])
    heads = ["device", "window", "compute", "communication", "hidden", "exposed", "idle"]
    left = len(profile.devices) - len(rows)
    more = f'<p class="note">{left} more devices are not listed.</p>' if left > 0 else ""
    note = "Wall time a step. Communication: any collective runs. Hidden: compute runs meanwhile. Exposed: none does. Idle: nothing runs."
    return (
        f'<section><h2>Compute, communication, idle time</h2>{table(heads, rows, numbers=True)}{more}<p class="note">{note}</p></section>'
    )


def _gaps(profile: Profile, facts: Facts) -> str:
    """Times in which a device runs nothing, by length, and the longest."""
    rows = []
    for place, title in enumerate(("under 1 µs", "1 to 10 µs", "10 to 100 µs", "0.1 to 1 ms", "1 ms or more")):
        number, time = (sum(device.gaps[place][i] for device in profile.devices) for i in (0, 1))
        rows.append([title, f"{number / max(facts.steps, 1) / len(profile.devices):,.1f}", _time(time, profile, facts)])
    drawn = table(["gap", "a step", "time a step"], rows, numbers=True) + _longest_gaps(profile)
    return f"<section><h2>Gaps between operations</h2>{drawn}</section>"


def _longest_gaps(profile: Profile) -> str:
    candidates = [(end - start, start, end, device) for device in profile.devices for start, end in device.longest_gaps]
    rows = []
    for length, start, end, device in sorted(candidates, key=lambda item: -item[0])[:LONGEST_GAPS]:
        gap = Spans(np.array([start]), np.array([end]))
        overlaps = {name: spans.clipped_total(gap) for name, spans in profile.host.items() if name.startswith(HOST_MARK)}
        cause = max(overlaps, key=lambda name: overlaps[name], default="")
        host = f"{_mark(cause)} ({percent(overlaps[cause] / length)})" if cause and overlaps[cause] else "–"
        before, after = _drawn_op(profile, device, end=start), _drawn_op(profile, device, start=end)
        rows.append([_short(length / PS), escape(device.name), escape(before), escape(after), escape(host)])
    if not rows:
        return ""
    return f'<h3>The longest</h3><div class="wrap">{table(["time", "device", "after", "before", "host meanwhile"], rows)}</div>'


def _mark(name: str) -> str:
    return name.removeprefix(HOST_MARK).replace("_", " ") if name.startswith(HOST_MARK) else f"dispatch: {name}"


def _drawn_op(profile: Profile, device: Device, *, start: int | None = None, end: int | None = None) -> str:
    """The operation that starts, or ends, at this time."""
    drawn = profile.drawn
    if not drawn.row:
        return "–"
    times = drawn.start[0] if start is not None else drawn.start[0] + drawn.length[0]
    for place in np.flatnonzero(times == (end if start is None else start)):
        if f"{drawn.track[drawn.on[0][place]]} ".startswith(f"{device.name} "):  # not TPU:10 for TPU:1
            op = profile.ops[drawn.row[0][place]]
            return f"{op.name} ({TITLES[op.scope]})"
    return "–"


def _collectives(profile: Profile, facts: Facts) -> str:
    """Collectives by kind and by the part of the model that they serve."""
    sums: dict[tuple[str, str, Phase], list[int]] = {}
    for device in profile.devices:
        for row, time in device.own.items():
            op = profile.ops[row]
            if op.scope == COLLECTIVES:
                held = sums.setdefault((op.opcode or op.name.split(".")[0], scope_of(op.where), op.phase), [0, 0])
                held[0], held[1] = held[0] + time, held[1] + device.count[row]
    rows = []
    for (opcode, scope, phase), (time, number) in sorted(sums.items(), key=lambda item: -item[1][0])[:LONGEST_OPS]:
        calls = number / max(facts.steps, 1) / len(profile.devices)
        rows.append([escape(opcode), escape(TITLES[scope]), phase, f"{calls:,.1f}", _time(time, profile, facts)])
    if not rows:
        return '<section><h2>Collectives</h2><p class="note">There are none in this trace.</p></section>'
    return f"<section><h2>Collectives</h2>{table(['collective', 'of', 'phase', 'calls a step', 'time a step'], rows)}</section>"


def _host(profile: Profile, facts: Facts) -> str:
    """Table of the training loop's work on the host, and how much of it left the devices idle."""
    rows = []
    for name, spans in sorted(profile.host.items(), key=lambda item: -item[1].total):
        idle = sum(device.idle_beside.get(name, 0) for device in profile.devices) / len(profile.devices)
        steps = max(facts.steps, 1) * PS
        rows.append([escape(_mark(name)), _short(spans.total / steps), _short(idle / steps)])
    if not rows:
        return '<section><h2>Host</h2><p class="note">The training loop has left no marks in this trace.</p></section>'
    note = "step: the loop dispatches an update and waits for the one before; data wait: it waits for a batch."
    drawn = table(["what the loop does", "a step", "while a device is idle"], rows, numbers=True)
    return f'<section><h2>Host</h2>{drawn}<p class="note">{note}</p></section>'


def _memory(profile: Profile) -> str:
    """Bytes allocated over time, where the allocator has traced them."""
    if len(profile.memory) < 2:
        return '<section><h2>Memory</h2><p class="note">This trace holds no allocations, so there is no timeline.</p></section>'
    every = -(-len(profile.memory) // MEMORY_POINTS)
    groups = [profile.memory[i : i + every] for i in range(0, len(profile.memory), every)]
    points = [max(group, key=lambda item: item[1]) for group in groups]  # the peak of each group
    first, last, peak = points[0][0], points[-1][0], max(size for _, size in points) or 1
    line = " ".join(f"{1000 * (time - first) / max(last - first, 1):.1f},{200 - 190 * size / peak:.1f}" for time, size in points)
    drawing = (
        '<svg viewBox="0 0 1000 200" preserveAspectRatio="none" style="width:100%;height:200px" role="img" aria-label="memory over time">'
        f'<polyline points="{line}" style="fill:none;stroke:var(--p0);stroke-width:1.5" vector-effect="non-scaling-stroke"/></svg>'
    )
    note = f"Bytes of the fullest allocator (each device has one), at most {in_bytes(peak)}, over {duration((last - first) / PS)}."
    return f'<section><h2>Memory</h2>{drawing}<p class="note">{note}</p></section>'


def _ops(profile: Profile, facts: Facts) -> str:
    """The operations that take most time."""
    own, total = profile.own, sum(profile.own.values())
    longest: Iterable[int] = sorted(own, key=lambda row: -own[row])[:LONGEST_OPS]
    rows = []
    for row in longest:
        op = profile.ops[row]
        number = sum(device.count.get(row, 0) for device in profile.devices) / max(facts.steps, 1) / len(profile.devices)
        place = escape(op.where[:400]).replace("/", "/<wbr>")
        cells = [
            escape(op.name[:120]),
            escape(TITLES[op.scope]),
            op.phase,
            f"{number:,.1f}",
            _time(own[row], profile, facts).replace(" ", "&nbsp;"),
        ]
        rows.append([*cells, percent(own[row] / total), f"<code>{place or '–'}</code>"])
    heads = ["operation", "part", "phase", "calls a step", "time a step", "share", "op_name"]
    return f'<section><h2>Longest operations</h2><div class="wrap">{table(heads, rows)}</div></section>'


__all__ = ["Facts", "Predicted", "render"]
