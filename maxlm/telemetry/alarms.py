"""Alarms, each raised once: figures that jump and stay there; routers that collapse, idle experts, logits that are not finite.

Of single layers: a figure that changes suddenly and stays so, and a layer without a gradient.
"""

import base64
import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.balance import Balance, collapsed, times_even
from maxlm.telemetry.formatting import percent
from maxlm.telemetry.observer import Event

COLLAPSED_STEPS = 20  # in a row
IDLE_STEPS = 100  # in a row without a token

JUMP_WINDOW = 100  # recent values from which median and spread are taken
JUMP_FEWEST = 20  # of them, before a spread is estimated
JUMP_SPREADS = 8.0  # above the median. For normal noise a chance of 1e-15; losses have longer tails, hence also:
JUMP_STEPS = 5  # in a row: one hard batch, or two, is no alarm
ODD = 2.0  # times JUMP_SPREADS: distance at which one batch is an alarm
LOW = 2.0  # times that distance below: a loss may fall fast by itself
RECENT = 10  # newest values, from which a single one is far
NAMED = 3  # single values in a row of which each is an alarm
KNOWN, KNOWN_STEPS = 5, 1000  # times in so many steps, after which a value as far away is usual: batches of a mixture may differ
AS_FAR = 0.8  # times the distance of a value, from which on an earlier one was as far away
LEAST_LOSS_SPREAD = 0.05  # nats; with JUMP_SPREADS a jump is at least 0.4 nats
LEAST_NORM_SPREAD = 0.3  # of the natural logarithm of a gradient norm; with JUMP_SPREADS a jump is at least elevenfold

HELP = "raise model.moe.router.balance_loss or bias_rate, or lower the learning rate"


class JumpAlarm:
    """Call `update` with a figure of every update. A value far above its own recent spread, `JUMP_STEPS` times in a row, is an alarm.

    The spread is the median absolute deviation, which a few outliers do not move. After an alarm the new level is the usual one, so a
    lasting change raises one alarm. With `odd` a single value that is far from the newest ones is an alarm at once.
    """

    def __init__(
        self,
        cause: str,
        name: str,
        least_spread: float,
        *,
        logarithmic: bool = False,
        spreads: float = JUMP_SPREADS,
        steps: int = JUMP_STEPS,
        odd: str = "",
    ) -> None:
        """`least_spread`: a smaller one counts as this, so that a flat curve raises no alarm by a hair; in the unit of the values, or
        of their natural logarithm if the figure is judged by that. `odd`: cause of the alarm on a single value, "" for none.
        """
        self._cause, self._name, self._least, self._logarithmic = cause, name, least_spread, logarithmic
        self._spreads, self._steps, self._odd = spreads, steps, odd
        self._low = 0  # step of the newest single value that was far below
        self._far: list[list[float]] = []  # [step, distance] of the single values that were far away, the first of each row
        self._usual: deque[float] = deque(maxlen=JUMP_WINDOW)
        self._above: list[float] = []
        self.since = 0  # step of the first value of those that were far above, in a row until now or until the last alarm

    @property
    def suspects(self) -> bool:
        """True while the newest values are far above, and no alarm yet."""
        return bool(self._above)

    @property
    def window(self) -> list[Any]:
        """The values by which the next is judged, for a checkpoint."""
        return [list(self._usual), list(self._above), self.since, self._low, list(self._far)]

    def restore(self, window: Sequence[Any]) -> None:
        """Continue from the `window` of another attempt; an earlier version's has no single values."""
        self._usual.extend(window[0])
        self._above, self.since = list(window[1]), window[2]
        self._low, self._far = (window[3], list(window[4])) if len(window) > 3 else (0, [])

    def forget(self) -> None:
        """Know no value yet, as at a planned change of the data."""
        self._usual.clear()
        self._above.clear()
        self._far.clear()
        self._low = 0

    def update(self, step: int, value: float) -> list[Event]:
        """The alarms of this step. `value` must be finite, and positive if its logarithm is judged."""
        value = math.log(value) if self._logarithmic else value
        if len(self._usual) < JUMP_FEWEST:
            self._usual.append(value)
            return []
        median = statistics.median(self._usual)
        spread = max(1.4826 * statistics.median(abs(value - median) for value in self._usual), self._least)  # 1.4826: of a normal deviation
        odd = self._single(step, value)
        if value <= median + self._spreads * spread:
            self._usual.append(value)
            self._above.clear()
            return odd
        self.since = self.since if self._above else step
        self._above.append(value)
        if len(self._above) < self._steps:
            return odd
        before, after = (math.exp(level) if self._logarithmic else level for level in (median, statistics.median(self._above)))
        reason = (
            f"the {self._name} jumped from {before:.4g} to {after:.4g} and stayed there for {self._steps} steps; "
            "look at the data of these steps and at optimizer.peak_lr"
        )
        self._usual.clear()
        self._usual.extend(self._above)
        self._above.clear()
        return [*odd, Event("alarm", step, data={"cause": self._cause, "reason": reason})]

    def _single(self, step: int, value: float) -> list[Event]:
        """The alarm on this value alone: far from the newest ones, in deviations of neighbours, in which a trend does not count. Above the
        usual the first NAMED in a row; below once in RECENT steps, since a lower level becomes the usual. No alarm where KNOWN were as far.
        """
        recent = statistics.median(list(self._usual)[-RECENT:])
        noise = statistics.median(abs(after - before) for before, after in itertools.pairwise(self._usual)) * 1.4826 / math.sqrt(2)
        distance = ODD * self._spreads * max(noise, self._least)
        low = value < recent - LOW * distance
        if not self._odd or not (low or value > recent + distance) or (self._low > step - RECENT if low else len(self._above) >= NAMED):
            return []
        self._low = step if low else self._low
        away, sign = abs(value - recent), -1 if low else 1
        self._far = [one for one in self._far if one[0] > step - KNOWN_STEPS]
        known = sum(sign * distance >= AS_FAR * away for _, distance in self._far) >= KNOWN
        if low or not self._above:
            self._far.append([step, value - recent])
        if known:
            return []
        reason = f"the {self._name} of update {step:,} is {value:.4g}, where it was {recent:.4g}"
        return [Event("alarm", step, data={"cause": self._odd, "reason": reason})]


class RoutingAlarms:
    """Call `update` after every step. A cause is raised once a layer, and again only after the layer was healthy in between.

    Causes: `collapse` (see balance.collapsed), `idle` (experts without a token) and `unsound` (logits that are not finite; only the first
    such layer is named, since the layers above it read its output).
    """

    def __init__(self) -> None:
        self._collapsed_L: NDArray[np.int64] | int = 0  # steps in a row
        self._idle_LE: NDArray[np.int64] | int = 0
        self._raised: set[tuple[str, int]] = set()

    def update(self, step: int, balance: Balance) -> list[Event]:
        """The alarms of this step."""
        now: dict[tuple[str, int], str] = {}
        for cause, reasons in (("unsound", _unsound(balance)), ("collapse", self._collapse(balance)), ("idle", self._idle(balance))):
            now |= {(cause, layer): reason for layer, reason in reasons.items()}
        news = [Event("alarm", step, data={"cause": key[0], "layer": key[1], "reason": now[key]}) for key in now if key not in self._raised]
        self._raised = set(now)
        return news

    def _collapse(self, balance: Balance) -> dict[int, str]:
        """Layer -> reason, of the routers that collapse."""
        self._collapsed_L = np.where(collapsed(balance.load_LE, balance.tokens_L), self._collapsed_L + 1, 0)
        reasons = {}
        for i in np.flatnonzero(self._collapsed_L >= COLLAPSED_STEPS):
            load_E, tokens = balance.load_LE[i], int(balance.tokens_L[i])
            busiest, layer = int(load_E.argmax()), balance.layers[i]
            reasons[layer] = (
                f"layer {layer}: the router collapses: expert {busiest} is chosen by {percent(load_E[busiest] / tokens)} of the tokens, "
                f"{times_even(load_E)[busiest]:.1f} times its even share, for {COLLAPSED_STEPS} steps; {HELP}"
            )
        return reasons

    def _idle(self, balance: Balance) -> dict[int, str]:
        """Layer -> reason, of the layers with idle experts. A step without tokens counts for nothing."""
        idle_LE = np.where(balance.load_LE == 0, self._idle_LE + (balance.tokens_L > 0)[:, None], 0)
        self._idle_LE = idle_LE
        reasons = {}
        for i in np.flatnonzero(idle_LE.max(axis=1) >= IDLE_STEPS):
            many, layer = int((idle_LE[i] >= IDLE_STEPS).sum()), balance.layers[i]
            have = "has" if many == 1 else "have"
            reasons[layer] = f"layer {layer}: {many} of {idle_LE.shape[1]} experts {have} received no token for {IDLE_STEPS} steps; {HELP}"
        return reasons


def not_finite(balance: Balance) -> str:
    """Reason that names the first layer with router logits that are not finite; "" if all were finite."""
    bad: Sequence[int] = np.flatnonzero(balance.unsound_L > 0).tolist()
    if not bad:
        return ""
    layer, tokens = balance.layers[bad[0]], int(balance.unsound_L[bad[0]])
    return f"the router of layer {layer} gave logits that are not finite for {tokens:,} {'token' if tokens == 1 else 'tokens'}"


def _unsound(balance: Balance) -> dict[int, str]:
    """Layer -> reason, of the first layer in question."""
    reason, layer = not_finite(balance), balance.layers[int((balance.unsound_L > 0).argmax())]
    return {layer: f"{reason}; lower the learning rate, or raise model.moe.router.z_loss"} if reason else {}


DEAD_STEPS = 20  # in a row without a gradient, while other layers have one
RENEWED = 10  # steps after which limits are taken anew
NAMED_LAYERS = 3  # layers that an alarm names; the others are counted
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
    return ", ".join(texts[:NAMED_LAYERS]) + (f" and {len(texts) - NAMED_LAYERS} more" if len(texts) > NAMED_LAYERS else "")
