"""The frontier as a picture: step time against memory, what was compiled apart from what was predicted."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maxlm.planning.search.frontier import Point
from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.words import duration

GIB = 2**30
DRAWN = 2000  # predicted layouts: more make the picture no clearer


def draw(path: Path, title: str, found: Sequence[Point], chosen: Point | None, available: int) -> None:
    """Write a PNG of `found` to `path`. `available`: bytes of HBM of a device. Raises OSError."""
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="HBM a device needs, GiB", ylabel="step time, s")
    predicted = [point for point in found if not point.compiled][:DRAWN]
    ideas = sorted((point for point in predicted if point.frontier), key=lambda point: point.needed)
    compiled = [point for point in found if point.compiled and point.fits]
    axes.scatter(*_places(predicted), s=8, color="0.75", label="predicted")
    if ideas:
        axes.plot(*_places(ideas), color="0.5", linewidth=1, linestyle="--", label="predicted to beat what was compiled")
    axes.scatter(*_places(compiled), s=45, color="tab:blue", zorder=3, label="compiled")
    if chosen is not None:
        axes.scatter(*_places([chosen]), s=190, color="tab:orange", marker="*", zorder=4, label=f"chosen: {duration(chosen.step_s)}")
    refused = [point.needed / GIB for point in found if not point.fits]
    floor = min((point.step_s for point in found if point.fits), default=0.0)
    axes.scatter(refused, [floor] * len(refused), s=45, color="tab:red", marker="x", zorder=3, label="compiled, does not fit")
    axes.axvline(available / GIB, color="tab:red", linewidth=1)
    axes.annotate("HBM", (available / GIB, 1), xycoords=("data", "axes fraction"), xytext=(-4, -12), textcoords="offset points", ha="right")
    axes.set_xlim(left=0)
    if compiled:  # the slow end of what was only predicted is of no interest
        axes.set_ylim(top=1.6 * max(floor, *(point.step_s for point in compiled if point.step_s < 2 * floor)))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.needed / GIB for point in points], [point.step_s for point in points]
