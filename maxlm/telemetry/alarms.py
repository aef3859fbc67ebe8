"""Alarms on a figure of every update that jumps, each raised once: where it stays, or for a single value that is far away."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from maxlm.telemetry.observer import Event

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
