"""The report of `maxlm compile` on a terminal or in a log: no wider than the console, and readable without colour."""

from collections.abc import Sequence

from rich.console import Console

from maxlm.cost.advice import place, surprise
from maxlm.cost.report import Report
from maxlm.telemetry.formatting import count, duration, percent

GIB = 2**30
SHOWN = 12  # rows of a table; --json has them all


def show(report: Report, console: Console) -> None:
    """Print `report`."""
    _header(report, console)
    _memory(report, console)
    if report.cost is not None:
        _time(report, console)
        _communication(report, console)
    if report.remarks:
        _title(console, "Warnings" if report.step.fits else "Why, and what to do")
        for remark in report.remarks:
            _line(console, f"- {remark}")
    elif not report.step.fits:
        _ways(report, console)


def _header(report: Report, console: Console) -> None:
    config, topology = report.config, report.topology
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    parts = f" in {config.train.microbatches} microbatches" if config.train.microbatches > 1 else ""
    batch = f"{config.train.global_batch:,} x {config.data.seq_len:,}{parts}"
    _line(console, f"{config.run.name}: {count(report.parameters)} parameters, {count(config.tokens_per_step)} tokens a step ({batch})")
    where = f"{_some(topology.chips, 'chip')} on {_some(topology.hosts, 'host')}"
    _line(console, f"{slices}{topology.name}: {where}; mesh {mesh}")
    verb = "compiled" if report.step.fits else "refused by the compiler"
    _line(console, f"{verb}{' before,' if report.step.cached else ''} in {duration(report.step.seconds)}")


def _memory(report: Report, console: Console) -> None:
    step = report.step
    holder = "chip" if report.topology.chip.devices_per_chip == 1 else "device (half a chip)"
    if step.fits:
        said = f"{size(step.needed)} of {size(step.available)} a {holder}, {percent(1 - step.needed / step.available)} free"
    else:
        said = f"does not fit: at least {size(step.needed)} of {size(step.available)} a {holder}, {size(step.missing)} too much"
    _title(console, f"HBM: {said}")
    rows = []
    previous = ""
    for part in report.parts:
        group = part.group if part.group != previous else ""
        previous = part.group
        rows.append((group, part.name if part.name != part.group else "", size(part.bytes), percent(part.bytes / step.available)))
    if step.fits:
        rows.append(("free", "", size(step.available - step.needed), percent(1 - step.needed / step.available)))
    _table(console, ("", "", ">", ">"), rows)
    if step.memory is not None and step.memory.host:
        _line(console, f"  and {size(step.memory.host)} of host memory")


def _time(report: Report, console: Console) -> None:
    cost = report.cost
    assert cost is not None
    total = cost.total_s or 1.0
    tokens = report.config.tokens_per_step / total
    mfu = f"MFU {percent(report.mfu)}, " if report.mfu is not None else ""
    _title(
        console,
        f"Time: {duration(cost.total_s)} a step, {mfu}{count(tokens)} tokens/s ({'predicted' if report.topology.is_tpu else 'a guess'})",
    )
    kinds = {
        "matmul": ("#", cost.matmul_s),
        "attention": ("@", cost.attention_s),
        "other": ("+", cost.kernel_s),
        "memory-bound": (".", cost.memory_s),
        "exposed communication": ("!", cost.exposed_s),
    }
    width = max(10, min(console.width - 6, 72))
    _line(console, f"  [{_bar([(mark, seconds / total) for mark, seconds in kinds.values()], width)}]")
    parts = [f"{mark} {name} {duration(seconds)} ({percent(seconds / total)})" for name, (mark, seconds) in kinds.items()]
    _line(console, "  " + "   ".join(parts))
    longest = [
        (op.kind, f"{op.times:,}", duration(op.seconds), percent(op.share_of_peak) if op.share_of_peak else "", place(op.where) or op.name)
        for op in cost.top[:8]
    ]
    _table(console, ("longest", ">times", ">time", ">of peak", "where"), longest)


def _communication(report: Report, console: Console) -> None:
    cost = report.cost
    assert cost is not None
    if not cost.traffic:
        _title(console, "Communication: none")
        return
    _title(console, f"Communication: {duration(cost.exposed_s)} exposed, {duration(cost.hidden_s)} hidden behind compute")
    table = []
    axes = list(report.mesh)
    rows = sorted(cost.traffic, key=lambda t: axes.index(t.axes[0]) if t.axes and t.axes[0] in axes else len(axes))
    longest = sorted(rows, key=lambda t: -t.seconds)[:SHOWN]
    for traffic in (row for row in rows if row in longest):
        mark = "! " if surprise(traffic) else ""
        opcode = traffic.opcode if traffic.how == "sync" else f"{traffic.opcode} ({traffic.how})"
        size = f"{traffic.bytes / 1e6:,.1f}" if traffic.bytes < 1e7 else f"{traffic.bytes / 1e6:,.0f}"
        exposed = duration(traffic.exposed_s) if traffic.exposed_s else "hidden"
        row = (" ".join(traffic.axes), mark + opcode, f"{traffic.count:,}", size, traffic.link, duration(traffic.seconds), exposed)
        table.append((*row, place(traffic.where)))
    _table(console, ("axis", "collective", ">count", ">MB a step", "link", ">time", ">exposed", "where"), table)
    if len(rows) > len(longest):
        _line(console, f"  and {len(rows) - len(longest)} smaller ones (--json lists them)")


def _ways(report: Report, console: Console) -> None:
    if not report.suggestions:
        _title(console, "No smaller setting that was tried fits: take more chips, or a smaller model")
        return
    _title(console, "It would fit with, each checked by compiling:")
    for way in report.suggestions:
        _line(console, f"  {way}   ({size(way.used)} of {size(way.available)})")


def _bar(shares: list[tuple[str, float]], width: int) -> str:
    """One character stands for 1/width of the whole; the ends are rounded, so that the lengths add up."""
    drawn, reached = "", 0.0
    for mark, share in shares:
        reached += share
        drawn += mark * (round(reached * width) - len(drawn))
    return drawn


def _table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need, `>` before a name aligns one to the right; the last is cut where the console ends."""
    right = [name.startswith(">") for name in header]
    lines = [[name.lstrip(">") for name in header], *rows] if any(name.lstrip(">") for name in header) else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [cell.rjust(width) if aligned else cell.ljust(width) for cell, width, aligned in zip(line, widths, right, strict=True)]
        text = "  " + "  ".join(cells).rstrip()
        _line(console, text if len(text) < console.width else text[: console.width - 2] + "~")


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False, highlight=False)


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _some(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def size(number: int) -> str:
    """Bytes as GiB, or as MiB where that says more."""
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
