"""Plots of a ladder as SVG text: measured losses with the fitted curves, the prediction of the largest size, the best size for a budget."""

import re
from collections.abc import Sequence
from io import StringIO
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from maxlm.ladder.analysis import Analysis
from maxlm.ladder.forms import Runs
from maxlm.telemetry.formatting import count

COLORS = ("#0b66a8", "#b84e00", "#007a5a", "#a3437e", "#7a6200", "#3a7fae", "#5b4bb5", "#444c56")  # of the runs' report, on white
_POINTS = 100
_LEAST_RESIDUAL = 0.01  # percent, of the axis of residuals: smaller ones are errors of rounding
_FIXED: Any = {"svg.hashsalt": "maxlm", "svg.fonttype": "none", "font.size": 10}  # the same bytes each time


def losses(analysis: Analysis) -> str:
    """Loss over FLOPs, a line a size."""
    figure, axes = _axes("model FLOPs of a run", "held-out loss, nats a token")
    runs = analysis.fit.runs
    for size, color in zip(np.unique(runs.parameters_R), cycle(COLORS)):
        some = runs.only(runs.parameters_R == size)
        axes.plot(some.flops_R, some.losses_R, "o", color=color, label=f"{count(size)} parameters")
        between = _between(some)
        low_R, high_R = analysis.fit.interval(between, of_runs=False)
        axes.plot(between.flops_R, analysis.fit.predict(between), color=color, linewidth=1.2)
        axes.fill_between(between.flops_R, low_R, high_R, color=color, alpha=0.15, linewidth=0)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def predictions(analysis: Analysis) -> str:
    """Predicted and measured losses of the largest size; "" without any."""
    if not analysis.predictions:
        return ""
    figure, axes = _axes("run", "held-out loss, nats a token", log=False)
    for place, one in enumerate(analysis.predictions):
        axes.plot([place, place], [one.low, one.high], color=COLORS[0], linewidth=6, alpha=0.3, solid_capstyle="butt")
        axes.plot(place, one.predicted, "_", color=COLORS[0], markersize=18, label="predicted, with interval" if not place else None)
        axes.plot(place, one.measured, "o", color=COLORS[1], label="measured" if not place else None)
    axes.set_xticks(range(len(analysis.predictions)), [one.name for one in analysis.predictions])
    axes.set_xlim(-0.7, len(analysis.predictions) - 0.3)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def parabolas(analysis: Analysis) -> str:
    """Loss over size at each budget, with its parabola; "" without any."""
    if not analysis.parabolas:
        return ""
    figure, axes = _axes("parameters", "held-out loss, nats a token")
    for one, color in zip(analysis.parabolas, cycle(COLORS)):
        some = [found for found in analysis.done if found.rung.length.startswith("budget") and abs(found.rung.flops / one.flops - 1) < 0.5]
        sizes = np.array([found.rung.parameters for found in some], np.float64)
        axes.plot(sizes, np.array([found.loss for found in some], np.float64), "o", color=color, label=f"{one.flops:.2g} FLOPs")
        curve = np.geomspace(min(sizes.min(), one.parameters), max(sizes.max(), one.parameters), _POINTS)
        axes.plot(curve, one.minimum + one.curvature * np.log(curve / one.parameters) ** 2, color=color, linewidth=1.2)
        axes.plot(one.parameters, one.minimum, "x", color=color, markersize=9)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def residuals(analysis: Analysis) -> str:
    """Measured over fitted loss, run by run."""
    figure, axes = _axes("model FLOPs of a run", "measured over fitted loss, less 1 (%)")
    runs = analysis.fit.runs
    axes.axhline(0, color="#888", linewidth=0.8)
    percent_R = 100 * np.expm1(analysis.fit.residuals_R)
    axes.plot(runs.flops_R, percent_R, "o", color=COLORS[0])
    limit = 1.1 * max(float(np.abs(percent_R).max()), _LEAST_RESIDUAL)
    axes.set_ylim(-limit, limit)
    return _svg(figure)


def _between(some: Runs) -> Runs:
    """A finer grid of lengths of one size."""
    order_R = np.argsort(some.tokens_R)
    shares = np.linspace(0, 1, _POINTS) if len(order_R) > 1 else np.zeros(1)
    columns = [np.exp(np.log(v[order_R[0]]) + shares * np.log(v[order_R[-1]] / v[order_R[0]])) for v in some[:4]]
    return Runs(*columns)


def _axes(x: str, y: str, *, log: bool = True) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+", "e").replace("e0", "e")))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    text = StringIO()
    with rc_context(_FIXED):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)  # without its XML declaration, as part of a page


def all_plots(analysis: Analysis) -> Sequence[tuple[str, str]]:
    """Return (title, SVG) of each plot that has data."""
    drawn = (
        ("Losses and the fit", losses(analysis)),
        ("The largest size, predicted from the others", predictions(analysis)),
        ("Loss over size at equal FLOPs", parabolas(analysis)),
        ("Residuals of the fit", residuals(analysis)),
    )
    return [(title, svg) for title, svg in drawn if svg]
