"""What was measured, as a table on a terminal and as a picture."""

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
from maxlm.runtime.comm.sizes import in_words
from maxlm.telemetry.atomic import replacing

GB = 1e9
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def table(rows: Sequence[Row], axis: str) -> Table:
    """Of one axis: a line a size, for each operation its time and bus bandwidth; the links' limits at the head where they are known."""
    names = list(dict.fromkeys(row.operation for row in rows))
    found = {(row.operation, row.bytes): row for row in rows if row.axis == axis}
    devices = next(row.devices for row in rows if row.axis == axis)
    heading = f"{axis}, {devices} devices: time, and bus bandwidth in GB/s"
    shown = Table(title=heading, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("size", justify="right", no_wrap=True)
    for name in names:
        limit = next(row.limit for row in found.values() if row.operation == name)
        shown.add_column(name, justify="right", no_wrap=True)
        shown.add_column(f"of {_three(limit / GB)}" if limit else "GB/s", justify="right", no_wrap=True)
    for size in sorted({row.bytes for row in found.values()}):
        cells = [found.get((name, size)) for name in names]
        shown.add_row(in_words(size), *(text for row in cells for text in (_cell(row) if row else ("", ""))))
    return shown


def show(rows: Sequence[Row], console: Console) -> None:
    """A table an axis."""
    for axis in dict.fromkeys(row.axis for row in rows):
        console.print(table(rows, axis))


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG to `path`: bus bandwidth against size, a panel an axis, a line an operation, a dashed line a limit. Raises OSError."""
    axes_names = list(dict.fromkeys(row.axis for row in rows))
    figure = Figure(figsize=(1.5 + 7 * len(axes_names), 5.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, len(axes_names), sharey=True, squeeze=False)[0]
    parts = [[row for row in rows if row.axis == axis] for axis in axes_names]
    for panel, part in zip(panels, parts, strict=True):
        _panel(panel, part)
    for panel, part in zip(panels, parts, strict=True):  # once the height that all share is known
        _name_lines(panel, part)
    panels[0].set_ylabel("bus bandwidth of a device, GB/s")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    sizes = sorted({row.bytes for row in rows})
    names = list(dict.fromkeys(row.operation for row in rows))
    for colour, name in zip(COLOURS, names, strict=False):
        line = [row for row in rows if row.operation == name]
        panel.plot([row.bytes for row in line], [row.bus_bytes_per_s / GB for row in line], color=colour, marker="o", markersize=4)
    for limit in sorted({row.limit for row in rows if row.limit}):
        limited = [row.operation for row in rows if row.limit == limit]
        who = "" if len(set(limited)) == len(names) else f" of {', '.join(dict.fromkeys(limited))}"
        panel.axhline(limit / GB, color="0.3", linestyle="--", linewidth=1)
        panel.annotate(
            f"limit{who}: {_three(limit / GB)} GB/s", (sizes[0], limit / GB), xytext=(0, 4), textcoords="offset points", fontsize=8
        )
    panel.set_title(f"{rows[0].axis}, {rows[0].devices} devices", fontsize="medium")
    panel.set_xlabel("bytes of a device's full buffer")
    panel.set_xticks(sizes, [in_words(size) for size in sizes], rotation=45, ha="right")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(alpha=0.3)
    panel.margins(x=0.02)


def _name_lines(panel: Axes, rows: Sequence[Row]) -> None:
    """Each line's name at its end, moved apart where ends meet."""
    last = {row.operation: row for row in rows}  # the largest size
    colours = dict(zip(last, COLOURS, strict=False))
    ends = sorted(last.values(), key=lambda row: row.bus_bytes_per_s)
    low, high = (float(panel.transData.transform((1, value))[1]) for value in panel.get_ylim())
    places = [float(panel.transData.transform((row.bytes, row.bus_bytes_per_s / GB))[1]) for row in ends]
    for row, place, apart in zip(ends, places, _apart(places, 0.045 * (high - low)), strict=True):
        end = (row.bytes, row.bus_bytes_per_s / GB)
        shift = (14, (apart - place) * 72 / panel.figure.get_dpi())
        colour = colours[row.operation]
        panel.annotate(row.operation, end, xytext=shift, textcoords="offset points", color=colour, fontsize=9, va="center")


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Ascending `places`, those nearer than `gap` pushed away from each other by as much."""
    moved = list(places)
    for _ in range(100):
        for lower in range(len(moved) - 1):
            push = max(0.0, gap - (moved[lower + 1] - moved[lower])) / 2
            moved[lower] -= push
            moved[lower + 1] += push
    return moved


def _cell(row: Row) -> tuple[str, str]:
    return in_time(row.seconds), _three(row.bus_bytes_per_s / GB)


def in_time(seconds: float) -> str:
    """Three significant digits."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def _three(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
