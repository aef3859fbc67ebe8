"""Bandwidth of links over time: average, 90th percentile and peak of each, as a table, JSON and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from maxlm.base.atomic import replacing
from maxlm.base.errors import error_kind
from maxlm.telemetry.formatting import figure, percent

GB, MB = 1e9, 1e6
PERCENTILE = 0.9
MOST_PANELS = 8  # of a plot
FAR = 4  # times the peak: a limit beyond is only named in the plot
BINS = 2000  # points of a line of a plot


@dataclass(frozen=True)
class Rates:
    """Bandwidth over time: `bytes_per_s` during each interval of `seconds`, in order."""

    seconds: np.ndarray  # [intervals]
    bytes_per_s: np.ndarray  # [intervals]

    @property
    def average(self) -> float:
        """Bytes/s; 0 without any interval."""
        total = float(self.seconds.sum())
        return float(self.seconds @ self.bytes_per_s) / total if total > 0 else 0.0

    @property
    def peak(self) -> float:
        """Highest bandwidth, in bytes/s."""
        return float(self.bytes_per_s.max(initial=0.0, where=self.seconds > 0))

    @property
    def busy(self) -> float:
        """Share of the time in which anything is sent."""
        total = float(self.seconds.sum())
        return float(self.seconds[self.bytes_per_s > 0].sum()) / total if total > 0 else 0.0

    def percentile(self, share: float = PERCENTILE) -> float:
        """Bandwidth that is not exceeded for `share` of the time."""
        order = np.argsort(self.bytes_per_s)
        passed = np.cumsum(self.seconds[order])
        if not len(passed) or passed[-1] <= 0:
            return 0.0
        return float(self.bytes_per_s[order][np.searchsorted(passed, share * passed[-1] * (1 - 1e-9))])


@dataclass(frozen=True)
class LinkUse:
    """Use of one link of a device or a host, one way. Bandwidths in bytes/s."""

    link: str  # such as "ICI x", "DCN" or "eth0 sent"
    kind: str  # ici, dcn, host, ethernet, infiniband, loopback, nvlink or pcie
    average: float
    p90: float
    peak: float
    limit: float | None  # of the link, as its maker or the interface states it; None where unknown
    busy: float | None = None  # share of the time
    exposed_s: float | None = None  # seconds of a step that wait for it
    used_by: str = ""  # mesh axes, or the host
    rates: Rates | None = None  # over time, for the plot

    @classmethod
    def from_rates(cls, link: str, kind: str, rates: Rates, limit: float | None, **more: Any) -> "LinkUse":
        """The use of a link by its bandwidth over time; `more`: other fields."""
        return cls(link, kind, rates.average, rates.percentile(), rates.peak, limit, rates=rates, **more)

    def to_json(self) -> dict[str, Any]:
        """Plain values, bandwidths in bytes/s."""
        figures = {"average": self.average, "p90": self.p90, "peak": self.peak, "limit": self.limit}
        return {
            "link": self.link,
            "kind": self.kind,
            "used_by": self.used_by,
            **{f"{name}_bytes_per_s": value for name, value in figures.items()},
            "busy": self.busy,
            "exposed_s": self.exposed_s,
        }

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> "LinkUse":
        """The inverse of `to_json`; rates are not kept."""
        average, p90, peak, limit = (item[f"{name}_bytes_per_s"] for name in ("average", "p90", "peak", "limit"))
        return cls(item["link"], item["kind"], average, p90, peak, limit, item["busy"], item["exposed_s"], item["used_by"])


def table(uses: Sequence[LinkUse], used_by: str) -> Table:
    """A row a link; `used_by` is the heading of that column. The unit suits the fastest link."""
    unit, name = (GB, "GB/s") if max((use.peak for use in uses), default=0.0) >= 0.1 * GB else (MB, "MB/s")
    with_busy = any(use.busy is not None for use in uses)
    heads = (f"average, {name}", "90th percentile", "peak", "limit", *(("busy", "exposed") if with_busy else ()))
    columns = (Column(head, justify="left" if head in ("link", used_by) else "right", no_wrap=True) for head in ("link", used_by, *heads))
    result = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1))
    for use in uses:
        cells = [figure(value / unit, 3) for value in (use.average, use.p90, use.peak)]
        cells.append("" if use.limit is None else figure(use.limit / unit, 3))
        if with_busy:
            cells += [percent(use.busy), f"{1e3 * (use.exposed_s or 0.0):.3g} ms"]
        result.add_row(use.link, use.used_by, *cells)
    return result


def plot(uses: Sequence[LinkUse], title: str, path: Path) -> None:
    """Write a PNG to `path`: a panel a link, bandwidth against time, with its average, 90th percentile and limit. Raises UserError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [use for use in uses if use.rates is not None][:MOST_PANELS]
    page = Figure(figsize=(11, 1.0 + 2.0 * max(1, len(shown))), dpi=120, layout="constrained")
    page.suptitle(title, fontsize="medium", parse_math=False)  # a `$` in the name of a run or of a link is no formula
    panels = page.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    for panel, use in zip(panels, shown, strict=False):
        assert use.rates is not None
        unit, name = (GB, "GB/s") if use.peak >= 0.1 * GB else (MB, "MB/s")
        edges, values = _binned(use.rates)
        panel.stairs(values / unit, edges, fill=True, alpha=0.4)
        for value, style, label in ((use.average, "-", "average"), (use.p90, ":", "90th percentile"), (use.limit, "--", "limit")):
            if value is not None:
                panel.axhline(value / unit, color="0.2", linestyle=style, linewidth=1, label=f"{label} {figure(value / unit, 3)}")
        panel.set_title(f"{use.link} ({use.used_by})" if use.used_by else use.link, fontsize="small", loc="left", parse_math=False)
        panel.set_ylabel(name)
        in_sight = use.limit if use.limit is not None and use.limit < FAR * use.peak else use.peak
        panel.set_ylim(0, 1.1 * max(in_sight, use.peak) / unit or 1.0)
        panel.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
        panel.margins(x=0)
    panels[-1].set_xlabel("seconds")
    FigureCanvasAgg(page)
    try:
        with replacing(path) as file:
            page.savefig(file, format="png")
    except OSError as error:
        raise error_kind(error)(f"--out {path} cannot be written: {error.strerror}; choose another path.") from None


def _binned(rates: Rates) -> tuple[np.ndarray, np.ndarray]:
    """(edges in seconds, bytes/s between them): averages over equal bins where there are more intervals than a plot can show."""
    edges = np.concatenate(([0.0], np.cumsum(rates.seconds)))
    if len(rates.seconds) <= BINS:
        return edges, rates.bytes_per_s
    moved = np.concatenate(([0.0], np.cumsum(rates.seconds * rates.bytes_per_s)))
    even = np.linspace(0.0, edges[-1], BINS + 1)
    return even, np.diff(np.interp(even, edges, moved)) / np.diff(even)
