"""Measured collectives as tables on a terminal and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maxlm.runtime.comm.measure import Row
from maxlm.runtime.comm.sizes import format_size
from maxlm.telemetry.atomic import replacing

GB = 1e9


def table(rows: Sequence[Row], axis: str) -> Table:
    """Table of one axis: a row per size with each operation's time and bus bandwidth; column heads show the links' limits if known."""
    names = list(dict.fromkeys(row.operation for row in rows))
    by_cell = {(row.operation, row.bytes): row for row in rows if row.axis == axis}
    devices = next(row.devices for row in rows if row.axis == axis)
    heading = f"{axis}, {devices} devices: time, and bus bandwidth in GB/s"
    result = Table(title=heading, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    result.add_column("size", justify="right", no_wrap=True)
    for name in names:
        limit = next(row.limit for row in by_cell.values() if row.operation == name)
        result.add_column(name, justify="right", no_wrap=True)
        result.add_column(f"of {_three(limit / GB)}" if limit else "GB/s", justify="right", no_wrap=True)
    for size in sorted({row.bytes for row in by_cell.values()}):
        cells = [by_cell.get((name, size)) for name in names]
        result.add_row(format_size(size), *(text for row in cells for text in (_cell(row) if row else ("", ""))))
    return result


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each axis."""
    for axis in dict.fromkeys(row.axis for row in rows):
        console.print(table(rows, axis))


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG to `path`: bus bandwidth against size, a panel per axis, a line per operation, dashed limits. Raises OSError."""
    axes_names = list(dict.fromkeys(row.axis for row in rows))
    figure = Figure(figsize=(1.5 + 7 * len(axes_names), 5.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, len(axes_names), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes_names, strict=True):
        _panel(panel, [row for row in rows if row.axis == axis])
    panels[0].set_ylabel("bus bandwidth of a device, GB/s")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({row.bytes for row in rows})
    names = list(dict.fromkeys(row.operation for row in rows))
    for name in names:
        line = [row for row in rows if row.operation == name]
        panel.plot([row.bytes for row in line], [row.bus_bytes_per_s / GB for row in line], label=name, marker="o", markersize=4)
    panel.legend(fontsize=9)
    for limit in sorted({row.limit for row in rows if row.limit}):
        limited = dict.fromkeys(row.operation for row in rows if row.limit == limit)
        which = "" if len(limited) == len(names) else f" of {', '.join(limited)}"
        panel.axhline(limit / GB, color="0.3", linestyle="--", linewidth=1)
        panel.annotate(
            f"limit{which}: {_three(limit / GB)} GB/s", (sizes[0], limit / GB), xytext=(0, 4), textcoords="offset points", fontsize=8
        )
    panel.set_title(f"{rows[0].axis}, {rows[0].devices} devices", fontsize="medium")
    panel.set_xlabel("bytes of a device's full buffer")
    panel.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(alpha=0.3)
    panel.margins(x=0.02)


def _cell(row: Row) -> tuple[str, str]:
    return format_seconds(row.seconds), _three(row.bus_bytes_per_s / GB)


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def _three(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
