"""`ladder.html`: the runs, the fit, its prediction of the largest size, and the best sizes for larger budgets, as one page."""

from collections.abc import Sequence
from html import escape

from maxlm.ladder.analysis import Analysis, Optimum, doubts_of
from maxlm.ladder.fits import SHARE
from maxlm.ladder.plots import all_plots
from maxlm.ladder.runs import Found
from maxlm.telemetry import pages
from maxlm.telemetry.formatting import count, duration
from maxlm.telemetry.pages import table

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
