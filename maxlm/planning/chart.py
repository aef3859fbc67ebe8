"""The frontier as a picture: step time against memory, what was compiled apart from what was predicted."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from maxlm.planning.frontier import Point
from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.formatting import duration

GIB = 2**30
DRAWN = 2000  # predicted layouts: more make the picture no clearer


def draw(path: Path, title: str, found: Sequence[Point], chosen: Point, available: int) -> None:
    """Write a PNG of `found`, of which `chosen` is the fastest compiled, to `path`. `available`: HBM of a device. Raises OSError."""
    compiled = [point for point in found if point.compiled and point.fits]
    top = 1.1 * max(point.step_s for point in compiled if point.step_s < 2 * chosen.step_s)  # what is slower is of no interest
    predicted = [point for point in found if not point.compiled and point.step_s < top]
    ideas = sorted((point for point in predicted if point.frontier), key=lambda point: point.needed)
    refused = [point.needed / GIB for point in found if not point.fits]
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="HBM that a device needs, GiB", ylabel="step time, s")
    axes.scatter(*_places(predicted[:: 1 + len(predicted) // DRAWN]), s=8, color="0.8", label="predicted")
    if ideas:
        axes.plot(*_places(ideas), color="0.45", linewidth=1, linestyle="--", label="predicted, with less memory than was compiled")
    axes.scatter(*_places(compiled), s=45, color="tab:blue", zorder=3, label="compiled")
    axes.scatter(*_places([chosen]), s=190, color="tab:orange", marker="*", zorder=4, label=f"chosen: {duration(chosen.step_s)}")
    if refused:
        axes.scatter(refused, [chosen.step_s] * len(refused), s=45, color="tab:red", marker="x", zorder=3, label="compiled, does not fit")
    axes.axvline(available / GIB, color="tab:red", linewidth=1, label=f"HBM: {available / GIB:.1f} GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(0.97 * chosen.step_s, top)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.needed / GIB for point in points], [point.step_s for point in points]
