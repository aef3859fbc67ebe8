"""Section on mixtures of experts: expert load, router confidence and entropy, dropped choices."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.balance import peak, times_even
from maxlm.telemetry.formatting import percent
from maxlm.telemetry.report.charts import FULL, HALF, Line, chart, metric_lines
from maxlm.telemetry.report.heat import Columns, columns, heat, legend
from maxlm.telemetry.report.load import Loads, Run

# N records, L layers with experts, E experts
FEW_LAYERS = 6  # up to this many are shown one by one; of more, an overview and the worst
WORST = 3
THIRD_WIDTH = 420  # in SVG units, where HALF.width is half of the page
NAMED = 3  # layers with idle experts that are listed

CHARTS = (
    ("Router confidence", "score of a token's first choice, mean", "router_confidence"),
    ("Router entropy", "of a token's scores, nats, mean", "router_entropy"),
)

CHARTED = {"expert_load_max", "expert_load_mean", "dropped", *(key for _, _, key in CHARTS)}  # figures that this section draws

LEGEND = '<p class="legend"><span class="key c0"></span>worst layer <span class="key c1"></span>mean over layers</p>'


class Ending(NamedTuple):
    """Sum of the last tenth of the records."""

    from_step: int
    load_LE: NDArray[np.int64]


def section(runs: Sequence[Run], names: Sequence[str]) -> str:
    """HTML for the runs with experts; "" if there are none."""
    maps = "".join(_maps(run, name if len(runs) > 1 else "") for run, name in zip(runs, names, strict=True) if run.loads is not None)
    curves = _curves(runs, names)
    if not maps and not curves:
        return ""
    return f'<section><h2>Expert load</h2>{maps}<div class="grid2">{curves}</div></section>'


def load_sentences(run: Run) -> str:
    """Sentences on the last tenth of the run; "" for a run without experts."""
    if run.loads is None:
        return ""
    ending = _ending(run.loads)
    layer, expert = (int(i) for i in np.unravel_index(times_even(ending.load_LE).argmax(), ending.load_LE.shape))
    times = float(times_even(ending.load_LE)[layer, expert])
    since = f"From step {ending.from_step:,} on" if ending.from_step < run.loads.steps_N[-1] else f"At step {ending.from_step:,}"
    if times < 1.1:
        sentences = [f"{since}, load is even: no expert takes more than {times:.2f} times its share."]
    else:
        sentences = [
            f"{since}, expert {expert} of layer {run.loads.first_layer + layer} takes {times:.1f} times its share, more than any other."
        ]
    dropped = run.get("dropped")
    late = dropped.values_N[dropped.steps_N >= ending.from_step]
    if late.any():
        sentences.append(f"{percent(float(late.mean()))} of the choices exceeded the capacity and were dropped.")
    return " ".join([*sentences, *_idle(run.loads, ending)])


def _idle(loads: Loads, ending: Ending) -> list[str]:
    idle_L = (ending.load_LE == 0).sum(axis=1)
    where = np.argsort(-idle_L, kind="stable")[: np.count_nonzero(idle_L)]
    if not len(where) or not ending.load_LE.any():
        return []
    named = ", ".join(f"{idle_L[i]} of {ending.load_LE.shape[1]} in layer {loads.first_layer + i}" for i in where[:NAMED])
    more = len(where) - NAMED
    rest = f", and some in {more} more {'layer' if more == 1 else 'layers'}" if more > 0 else ""
    return [f"Experts without a token in that time: {named}{rest}."]


def _ending(loads: Loads) -> Ending:
    n = len(loads.steps_N)
    late = slice(n - max(1, n // 10), n)
    return Ending(int(loads.steps_N[late][0]), loads.load_NLE[late].sum(axis=0))


def _maps(run: Run, name: str) -> str:
    assert run.loads is not None
    layers = run.loads.load_NLE.shape[1]
    panels = range(layers) if layers <= FEW_LAYERS else _worst(_ending(run.loads))
    cells = columns(run.loads, len(panels))
    drawn = "".join(_layer(run.loads, cells, i) for i in panels)
    if layers > FEW_LAYERS:
        title, description = "Busiest expert of each layer", f"Load of the busiest expert of each of {layers} layers over steps"
        glance = heat(title, "a row a layer", description, cells, peak(cells.load_CLE), run.loads.first_layer, FULL.width)
        drawn = f'<div class="wide">{glance}</div><div class="wide grid3">{drawn}</div>'
    head = f"<h3>{escape(name)}</h3>" if name else ""
    hint = "Colours: an expert's load in times its even share"
    picked = f"; below, the {WORST} layers to look at first" if layers > FEW_LAYERS else ""
    lead = f'<p class="lead">{escape(load_sentences(run))}</p><p class="note">{hint}{picked}.</p>'
    return f'{head}{lead}{legend()}<div class="grid2 maps">{drawn}</div>'


def _worst(ending: Ending) -> list[int]:
    """The layer of the busiest expert, then those with most idle experts, then the next busiest: the first WORST, in order."""
    busiest = np.argsort(-peak(ending.load_LE), kind="stable").tolist()
    idle_L = (ending.load_LE == 0).sum(axis=1)
    idle = [i for i in np.argsort(-idle_L, kind="stable").tolist() if idle_L[i] > 0]
    return sorted([*dict.fromkeys([busiest[0], *idle, *busiest])][:WORST])


def _layer(loads: Loads, cells: Columns, index: int) -> str:
    number, last_E = loads.first_layer + index, times_even(cells.load_CLE[-1, index])
    ended = f"at the end expert {last_E.argmax()} takes {last_E.max():.1f} times its share"
    description = f"Load of {len(last_E)} experts of layer {number} over steps; {ended}"
    layers = loads.load_NLE.shape[1]
    width = FULL.width if layers == 1 else HALF.width if layers <= FEW_LAYERS else THIRD_WIDTH
    return heat(f"Layer {number}", "a row an expert", description, cells, times_even(cells.load_CLE[:, index]), 0, width)


def _curves(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Charts of the metrics of all steps: worst layer and mean for one run, one line each for several."""
    many = len(runs) > 1
    worst = metric_lines(runs, names, "worst layer", "expert_load_max")
    if not many:
        worst.append(Line("mean over layers", runs[0].get("expert_load_mean"), 1))
    busiest = chart("Load of the busiest expert", f"times its even share{', worst layer' if many else ''}", worst)
    parts = [f"<div>{busiest}{'' if many else LEGEND}</div>" if busiest else ""]
    if any(run.get("dropped").values_N.any() for run in runs):
        parts.append(chart("Dropped choices", "share of all", metric_lines(runs, names, "dropped", "dropped"), zero=True))
    parts += [chart(title, unit, metric_lines(runs, names, title.lower(), key), zero=True) for title, unit, key in CHARTS]
    return "".join(parts)
