"""`ladder.html`: the runs, the fit, its prediction of the largest size, and the best sizes for larger budgets, as one page with plots.

Plots are SVG text: measured losses with the fitted curves, the prediction of the largest size, the best size for a budget.
"""

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from maxlm.ladder.analysis import Analysis, Optimum, doubts_of
from maxlm.ladder.fits import SHARE
from maxlm.ladder.forms import Runs
from maxlm.ladder.runs import Found
from maxlm.telemetry import pages
from maxlm.telemetry.formatting import count, duration
from maxlm.telemetry.pages import table

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


CSS = """
figure{min-width:0;overflow-x:auto}figure svg{width:100%;height:auto;background:#fff;border-radius:8px}figure svg text{fill:#1b1f24}
@media screen and (max-width:760px){figure svg{min-width:560px}}
"""


def page(title: str, found: Sequence[Found], analysis: Analysis, optima: Sequence[Optimum]) -> str:
    """The page as HTML, without scripts or anything from elsewhere."""
    sections = [_head(title, found, analysis), _predictions(analysis), _plots(analysis), _fit(analysis), _optima(optima), _runs(found)]
    return pages.page(title, sections, css=CSS)


def _head(title: str, found: Sequence[Found], analysis: Analysis) -> str:
    runs = analysis.fit.runs
    left_out = len(found) - len(analysis.done)
    cards = [
        ("Runs", f"{len(analysis.done)}", "all are done" if not left_out else f"{left_out} more are not in the fit"),
        ("Sizes", f"{count(runs.parameters_R.min())} to {count(runs.parameters_R.max())}", "parameters"),
        ("Lengths", f"{count(runs.tokens_R.min())} to {count(runs.tokens_R.max())}", "tokens"),
        ("FLOPs", f"{runs.flops_R.min():.2g} to {runs.flops_R.max():.2g}", f"of a run; {runs.flops_R.sum():.2g} in all"),
        ("Scatter", f"{100 * analysis.fit.noise:.2g}%", "of measured losses around the fit"),
    ]
    return f'<p class="kind">Scaling ladder</p><h1>{escape(title)}</h1>{pages.cards(cards)}'


def _predictions(analysis: Analysis) -> str:
    heading = "<h2>The largest size, predicted from the others</h2>"
    if not analysis.predictions:
        return f'{heading}<p class="note">Not predicted: {escape(analysis.not_predicted)}</p>'
    rows = [
        (escape(one.name), f"{one.measured:.4f}", f"{one.predicted:.4f}", f"{one.low:.4f} to {one.high:.4f}", f"{100 * one.error:+.2f}%")
        for one in analysis.predictions
    ]
    return heading + table(("run", "measured", "predicted", f"{SHARE:.0%} interval", "error"), rows, numbers=True)


def _plots(analysis: Analysis) -> str:
    figures = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in all_plots(analysis))
    return f'<h2>Plots</h2><div class="grid2">{figures}</div>'


def _fit(analysis: Analysis) -> str:
    ranges = analysis.fit.ranges()
    rows = [(name, f"{value:.4g}", f"{ranges[name][0]:.4g} to {ranges[name][1]:.4g}") for name, value in analysis.fit.values().items()]
    text = f"<h2>Fit</h2><p>L = {escape(analysis.fit.form.formula)}</p>" + table(
        ("constant", "value", f"{SHARE:.0%} interval"), rows, numbers=True
    )
    if analysis.parabolas:
        minima = [
            (
                f"{one.flops:.3g}",
                count(one.parameters),
                count(one.tokens),
                f"{one.minimum:.4f}",
                "" if one.inside else "beyond the sizes trained",
            )
            for one in analysis.parabolas
        ]
        text += "<h3>Minima of parabolas, budget by budget</h3>" + table(
            ("FLOPs", "parameters", "tokens", "loss", ""), minima, numbers=True
        )
    text += "".join(f'<p class="note">{escape(line)}</p>' for line in doubts_of(analysis))
    if analysis.exponents:
        text += f"<p>Best size ∝ C^{analysis.exponents['a']:.3f}, best length ∝ C^{analysis.exponents['b']:.3f} (approach 2).</p>"
    return text


def _optima(optima: Sequence[Optimum]) -> str:
    if not optima:
        return ""
    rows = [
        (
            f"{one.flops:.3g}", count(one.parameters), " to ".join(map(count, one.parameters_range)), count(one.tokens),
            f"{one.loss:.4f}", f"{one.loss_range[0]:.4f} to {one.loss_range[1]:.4f}",
        )
        for one in optima
    ]  # fmt: skip
    heads = ("FLOPs", "best size", f"{SHARE:.0%} interval", "tokens", "loss", f"{SHARE:.0%} interval")
    note = "Beyond the largest run these are extrapolations: intervals hold the scatter of the runs, not the choice of the form."
    return f'<h2>Best size for a budget</h2><p class="note">{note}</p>' + table(heads, rows, numbers=True)


def _runs(found: Sequence[Found]) -> str:
    rows = [
        (
            escape(one.rung.name), f"{one.rung.parameters:,}", f"{one.rung.tokens:,}", f"{one.rung.flops:.3g}",
            escape(one.state) if one.loss is None else f"{one.loss:.4f}", "" if one.seconds is None else duration(one.seconds),
        )
        for one in found
    ]  # fmt: skip
    return "<h2>Runs</h2>" + table(("run", "parameters", "tokens", "FLOPs", "held-out loss", "time"), rows, numbers=True)
