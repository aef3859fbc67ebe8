"""Sections of heat maps: loads of experts, with charts of their routers, and figures of layers in times their median."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.balance import peak, times_even
from maxlm.telemetry.formatting import percent
from maxlm.telemetry.report.charts import Line, chart, json_block, metric_lines
from maxlm.telemetry.report.load import Loads, Run

# N records, C columns drawn, L layers with experts, E experts, R rows drawn
BOUNDS = (0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)  # times the even share, between the colours
LABELS = ("no token", "under 0.5x", "0.5–0.75x", "0.75–0.9x", "0.9–1.1x: even", "1.1–1.33x", "1.33–2x", "2–4x", "over 4x")
EVEN = 4  # index in LABELS of the background colour
WIDTH = 1000  # of a map, in units that page.js scales
MAX_COLUMNS, MIN_COLUMNS = 160, 16
MAX_CELLS = 80_000  # of all runs together, of about 8 bytes each: their maps take under a megabyte
FEW_LAYERS = 6  # up to this many are shown one by one; of more, an overview and the worst
WORST = 3
NAMED = 3  # layers with idle experts that are listed
MAX_LAYER_COLUMNS, MAX_LAYERS = 120, 512  # of maps of layers: all together some hundred kilobytes

CHARTS = (
    ("Router confidence", "score of a token's first choice, mean", "router_confidence"),
    ("Router entropy", "of a token's scores, nats, mean", "router_entropy"),
)

CHARTED = {"expert_load_max", "expert_load_mean", "dropped", *(key for _, _, key in CHARTS)}  # figures that this section draws


class Ending(NamedTuple):
    """Sum of the last tenth of the records."""

    from_step: int
    load_LE: NDArray[np.int64]


class Columns(NamedTuple):
    """Loads summed over the records of each column."""

    first_step: float  # where the first one begins
    ends_C: NDArray[np.float64]  # last step of each column
    load_CLE: NDArray[np.float64]


def experts_section(runs: Sequence[Run], points: int) -> str:
    """HTML for the runs with experts, each line of a chart of `points` at most; "" if there are none."""
    loads = [(run, run.loads) for run in runs if run.loads is not None]
    cells = MAX_CELLS // max(1, len(loads))
    maps = "".join(_maps(of_run, run.label if len(runs) > 1 else "", load_sentences(run), cells) for run, of_run in loads)
    curves = _curves(runs, points)
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


def _maps(loads: Loads, name: str, lead: str, max_cells: int) -> str:
    layers = loads.load_NLE.shape[1]
    panels = range(layers) if layers <= FEW_LAYERS else _worst(_ending(loads))
    cells = columns(loads, len(panels), max_cells)
    drawn = "".join(_layer(loads, cells, i) for i in panels)
    if layers > FEW_LAYERS:
        title, description = "Busiest expert of each layer", f"Load of the busiest expert of each of {layers} layers over steps"
        glance = heat(title, "a row a layer", description, cells, peak(cells.load_CLE), loads.first_layer)
        drawn = f'<div class="wide">{glance}</div><div class="wide grid3">{drawn}</div>'
    head = f"<h3>{escape(name)}</h3>" if name else ""
    hint = "Colours: an expert's load in times its even share"
    picked = f"; below, the {WORST} layers to look at first" if layers > FEW_LAYERS else ""
    keys = "".join(f'<li><span class="swatch h{k}"></span>{label}</li>' for k, label in enumerate(LABELS))
    legend = f'<p class="note">{hint}{picked}.</p><ul class="keys scale">{keys}</ul>'
    return f'{head}<p class="lead">{escape(lead)}</p>{legend}<div class="grid2 maps">{drawn}</div>'


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
    return heat(f"Layer {number}", "a row an expert", description, cells, times_even(cells.load_CLE[:, index]), 0)


def _curves(runs: Sequence[Run], points: int) -> str:
    """Charts of the metrics of all steps: worst layer and mean for one run, one line each for several."""
    many = len(runs) > 1
    worst = metric_lines(runs, "worst layer", "expert_load_max")
    if not many:
        worst.append(Line("mean over layers", runs[0].get("expert_load_mean"), 0, 1))
    busiest = chart("Load of the busiest expert", f"times its even share{', worst layer' if many else ''}", worst, points)
    parts = [busiest]
    if any(run.get("dropped").values_N.any() for run in runs):
        parts.append(chart("Dropped choices", "share of all", metric_lines(runs, "dropped", "dropped"), points, zero=True))
    parts += [chart(title, unit, metric_lines(runs, title.lower(), key), points, zero=True) for title, unit, key in CHARTS]
    return "".join(parts)


def columns(loads: Loads, panels: int, max_cells: int = MAX_CELLS) -> Columns:
    """Bin the records into columns, fewer for more `panels` and experts."""
    steps_N, experts = loads.steps_N, loads.load_NLE.shape[2]
    gap = float(np.median(np.diff(steps_N))) if len(steps_N) > 1 else 1.0
    first = max(0.0, float(steps_N[0]) - gap)
    wanted = int(np.clip(max_cells // (panels * experts), MIN_COLUMNS, MAX_COLUMNS))
    place_N = np.ceil((steps_N - first) / max(1e-9, float(steps_N[-1]) - first) * wanted - 1e-9).astype(np.int64)
    starts_C = np.unique(place_N, return_index=True)[1]
    load_CLE = np.add.reduceat(loads.load_NLE, starts_C, axis=0).astype(np.float64)
    return Columns(first, steps_N[[*(starts_C[1:] - 1), -1]], load_CLE)


def heat(title: str, unit: str, description: str, cells: Columns, values_CR: NDArray[np.float64], first_row: int) -> str:
    """A figure with a caption. `values_CR`: times the even share; rows are numbered from `first_row`."""
    rows = values_CR.shape[1]
    last = float(cells.ends_C[-1])
    edges_C = np.rint(WIDTH * (cells.ends_C - cells.first_step) / max(1e-9, last - cells.first_step)).astype(np.int64)
    colours_CR = np.where(values_CR > 0, 1 + np.searchsorted(BOUNDS, values_CR, side="right"), 0)
    paths = "".join(f'<path class="h{k}" d="{"".join(_strokes(colours_CR == k, edges_C))}"/>' for k in range(len(LABELS)) if k != EVEN)
    data = {"title": title, "about": description, "rows": rows, "first": first_row, "steps": [cells.first_step, last]}
    return (
        f'<figure class="chart"><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span></figcaption>{json_block(data)}'
        f'<svg class="heat" viewBox="0 -0.5 {WIDTH} {rows}" preserveAspectRatio="none">'
        f'<rect class="ground h{EVEN}" x="0" y="-0.5" width="{WIDTH}" height="{rows}"/>{paths}</svg></figure>'
    )


def _strokes(mask_CR: NDArray[np.bool_], edges_C: NDArray[np.int64]) -> Iterator[str]:
    """One stroke for each run of adjacent columns, row by row."""
    left_C = np.concatenate([[0], edges_C])
    border_R = np.zeros((1, mask_CR.shape[1]), bool)
    turns = np.diff(np.concatenate([border_R, mask_CR, border_R]).astype(np.int8), axis=0).T
    for row in np.flatnonzero(mask_CR.any(axis=0)):
        begins, ends = np.flatnonzero(turns[row] > 0), np.flatnonzero(turns[row] < 0)
        yield from (f"M{left_C[a]} {row}h{left_C[b] - left_C[a]}" for a, b in zip(begins, ends, strict=True))


def layers_section(runs: Sequence[Run]) -> str:
    """HTML for a single run with records of figures of layers; "" for any other."""
    if len(runs) != 1:
        return ""
    maps = "".join(_layer_map(runs[0], name) for name in runs[0].metrics)
    keys = "".join(f'<li><span class="swatch h{k}"></span>{label}</li>' for k, label in enumerate(("zero", *LABELS[1:])))
    hint = "Colours: in times the median of the same layer; what is not finite is over 4x. A row is a layer, the first one at the top."
    legend = f'<p class="note">{hint}</p><ul class="keys scale">{keys}</ul>'
    return f'<section><h2>Layers over steps</h2>{legend}<div class="grid2 maps">{maps}</div></section>' if maps else ""


def _layer_map(run: Run, name: str) -> str:
    declared = run.metrics[name]
    layers = sum(entry.startswith("layer ") for entry in declared.entries)
    series = [run.get(f"{name}_{i}") for i in range(1, layers + 1)]
    found = [one for one in series if len(one.steps_N)]
    if not 1 < layers <= MAX_LAYERS or len(found) < 2:
        return ""
    steps_N = found[0].steps_N
    for one in found:
        steps_N = steps_N if np.array_equal(one.steps_N, steps_N) else np.union1d(one.steps_N, steps_N)
    if len(steps_N) < 2:
        return ""
    times_NL = np.full((len(steps_N), layers), np.inf)  # records hold all layers of a step, but for what is not finite
    for i, one in enumerate(series):
        if not len(one.steps_N):  # never finite
            continue
        times_NL[np.searchsorted(steps_N, one.steps_N), i] = one.values_N / max(float(np.median(one.values_N)), 1e-30)
    starts_C = np.unique(np.linspace(0, len(steps_N), min(len(steps_N), MAX_LAYER_COLUMNS), endpoint=False).astype(int))
    ends_C = steps_N[[*(starts_C[1:] - 1), -1]]  # columns of about equally many records, with the largest values of each
    first = max(0.0, float(steps_N[0] - np.median(np.diff(steps_N))))
    cells, values_CL = Columns(first, ends_C, np.zeros((len(ends_C), 0, 0))), np.maximum.reduceat(times_NL, starts_C, axis=0)
    return heat(declared.title, "a row a layer", f"{declared.title} of {layers} layers over steps", cells, values_CL, 0)
