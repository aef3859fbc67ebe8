"""Alarms on figures of single layers: one that changes suddenly and stays so, and one that gets no gradient."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.alarms import JUMP_FEWEST, JUMP_STEPS, JUMP_WINDOW
from maxlm.telemetry.observer import Event

DEAD_STEPS = 20  # in a row without a gradient, while other layers have one
RENEWED = 10  # steps after which limits are taken anew
NAMED = 3  # layers that an alarm names; the others are counted
KINDS = ("gradient norm", "update/weight ratio")

# G layers in depth order, then parameters outside of layers; K kinds of figures; W window


class LayerFigures(NamedTuple):
    """One update. `gradient_G`: norms of the gradient before clipping; `ratio_G`: norms of the change over norms of the weights."""

    names: Sequence[str]
    gradient_G: NDArray[np.float32]
    ratio_G: NDArray[np.float32]


class LayerAlarms:
    """Call `update` with the figures of every finite update. Natural logarithms are judged, by median and median absolute deviation.

    Causes: `layer_jump` after `JUMP_STEPS` in a row, with `since`, the first of them; `dead_layer`. A layer is named once, and again only
    after it was as usual in between. Limits are taken from all values of the window, so a lasting change becomes the usual.
    """

    def __init__(self, spreads: float, least_spread: float) -> None:
        """`spreads` and `least_spread`, of a logarithm: as in `JumpAlarm`."""
        self._spreads, self._least = spreads, least_spread
        self._begin()

    def _begin(self) -> None:
        """Know no update yet."""
        self._window: list[NDArray[np.float64]] = []  # of [K, G]
        self._usual: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # medians and limits, [K, G]
        self._above_KG: NDArray[np.int64] | int = 0  # steps in a row
        self._dead_G: NDArray[np.int64] | int = 0
        self._seen = 0

    @property
    def window(self) -> dict[str, Any] | None:
        """All by which the next update is judged, for a checkpoint, arrays as base64; None before the first update."""
        if not self._window:
            return None
        kinds, layers = self._window[0].shape
        counts = [*np.broadcast_to(self._above_KG, (kinds, layers)), np.broadcast_to(self._dead_G, layers)]
        arrays = {"values": np.stack(self._window), "counts": np.stack(counts).astype(np.float64)}
        arrays |= {} if self._usual is None else {"usual": np.stack(self._usual)}
        return {
            "layers": layers,
            "seen": self._seen,
            **{name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()},
        }

    def restore(self, window: Mapping[str, Any]) -> None:
        """Continue from the `window` of another attempt."""
        layers, kinds = window["layers"], len(KINDS)
        values, counts, usual = (np.frombuffer(base64.b64decode(window.get(name, ""))) for name in ("values", "counts", "usual"))
        self._window, self._seen = list(values.reshape(-1, kinds, layers)), window["seen"]
        *above, dead = counts.reshape(-1, layers).astype(np.int64)
        self._above_KG, self._dead_G = np.stack(above), dead
        median, limit = usual.reshape(2, kinds, layers) if usual.size else (None, None)
        self._usual = None if median is None or limit is None else (median, limit)

    def update(self, step: int, figures: LayerFigures) -> list[Event]:
        """The alarms of this step."""
        value_KG = np.log(np.maximum(np.stack(figures[1:]).astype(np.float64), 1e-30))
        if self._window and self._window[0].shape != value_KG.shape:  # of an attempt that trained other parameters
            self._begin()
        alarms = self._jumps(step, value_KG, figures.names) + self._dead(step, figures)
        self._window = [*self._window[1 - JUMP_WINDOW :], value_KG]
        self._seen += 1
        if self._seen >= JUMP_FEWEST and self._seen % RENEWED == 0:
            window_WKG = np.stack(self._window)
            median_KG = np.median(window_WKG, axis=0)
            spread_KG = 1.4826 * np.median(np.abs(window_WKG - median_KG), axis=0)  # 1.4826: of a normal deviation
            self._usual = median_KG, median_KG + self._spreads * np.maximum(spread_KG, self._least)
        return alarms

    def _jumps(self, step: int, value_KG: NDArray[np.float64], names: Sequence[str]) -> list[Event]:
        if self._usual is None:
            return []
        median_KG, limit_KG = self._usual
        self._above_KG = np.where(value_KG > limit_KG, self._above_KG + 1, 0)
        alarms = []
        for k, kind in enumerate(KINDS):
            found: list[int] = np.flatnonzero(self._above_KG[k] == JUMP_STEPS).tolist()
            if not found:
                continue
            texts = [f"{names[g]} from {np.exp(median_KG[k, g]):.3g} to {np.exp(value_KG[k, g]):.3g}" for g in found]
            reason = f"the {kind} jumped and stayed there for {JUMP_STEPS} steps: {_some(texts)}"
            data = {"cause": "layer_jump", "reason": reason, "layer": names[found[0]], "since": step - JUMP_STEPS + 1}
            alarms.append(Event("alarm", step, data=data))
        return alarms

    def _dead(self, step: int, figures: LayerFigures) -> list[Event]:
        zero_G = figures.gradient_G == 0
        self._dead_G = np.where(zero_G & ~zero_G.all(), self._dead_G + 1, 0)
        dead = [figures.names[g] for g in np.flatnonzero(self._dead_G == DEAD_STEPS).tolist()]
        if not dead:
            return []
        reason = f"no gradient for {DEAD_STEPS} steps, while other layers had one: {_some(dead)}; nothing is learned there"
        return [Event("alarm", step, data={"cause": "dead_layer", "reason": reason, "layer": dead[0]})]


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:NAMED]) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")
