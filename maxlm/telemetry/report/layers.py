"""Section on layers of one run: heat maps of their figures over steps, in times the median of each layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.report.experts import LABELS, Columns, heat
from maxlm.telemetry.report.load import Run

MAX_COLUMNS = 120
MAX_LAYERS = 512  # of all maps together some hundred kilobytes

# N records, C columns, L layers


def section(runs: Sequence[Run]) -> str:
    """HTML for a single run with records of figures of layers; "" for any other."""
    if len(runs) != 1:
        return ""
    maps = "".join(_map(runs[0], name) for name in runs[0].metrics)
    keys = "".join(f'<li><span class="swatch h{k}"></span>{label}</li>' for k, label in enumerate(("zero", *LABELS[1:])))
    hint = "Colours: in times the median of the same layer; what is not finite is over 4x. A row is a layer, the first one at the top."
    legend = f'<p class="note">{hint}</p><ul class="keys scale">{keys}</ul>'
    return f'<section><h2>Layers over steps</h2>{legend}<div class="grid2 maps">{maps}</div></section>' if maps else ""


def _map(run: Run, name: str) -> str:
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
    cells, values_CL = _columns(steps_N, times_NL)
    return heat(declared.title, "a row a layer", f"{declared.title} of {layers} layers over steps", cells, values_CL, 0)


def _columns(steps_N: NDArray[np.float64], values_NL: NDArray[np.float64]) -> tuple[Columns, NDArray[np.float64]]:
    """Columns of about equally many records, and of each the largest values."""
    starts_C = np.unique(np.linspace(0, len(steps_N), min(len(steps_N), MAX_COLUMNS), endpoint=False).astype(int))
    ends_C = steps_N[[*(starts_C[1:] - 1), -1]]
    first = max(0.0, float(steps_N[0] - np.median(np.diff(steps_N))))
    return Columns(first, ends_C, np.zeros((len(ends_C), 0, 0))), np.maximum.reduceat(values_NL, starts_C, axis=0)
