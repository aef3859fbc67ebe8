"""Limits of the watchdog: seconds that an operation may take without progress, learned from the run itself. Pure: no clock, no file.

Each operation has a histogram of its lengths so far. Its limit is a multiple of their 99th percentile, and of the longest, with a floor;
until there are enough of them, a fixed value instead of the floor. Process 0 learns from the lengths of all, and all judge by its limits.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from maxlm.config.sections.watchdog import WatchdogConfig

BACKGROUND_SAVE = "background_save"  # a save during training steps
DEBUGGER = "debugger"  # operation of a process with a main thread that a debugger has stopped
RATIO = 1.05  # between two edges of a histogram
KEPT = 20_000.0  # lengths, after which older ones count half
FORGOTTEN = 0.1  # count below which a length is forgotten: some 60,000 later ones after it was seen
LONGEST_FACTOR = 3.0  # of the longest length seen
RAISED_FACTOR = 2.0  # of the limit at which a run was ended
RAISED_FOR = 10  # times `enough` lengths, for which that holds
_LARGEST = math.ceil(math.log(1e7, RATIO))
_Count = Annotated[float, Field(ge=0, le=2 * KEPT, allow_inf_nan=False)]


class Phase(NamedTuple):
    """Parameters of the learned limit of an operation, in seconds."""

    setting: str  # seconds in `WatchdogConfig` that are the limit instead, "" for none
    first_s: float  # limit until there are `enough` lengths
    floor_s: float  # afterwards
    enough: int
    factor: float  # of the 99th percentile; of a step `step_factor`


# No compilation: from the cache it takes seconds, without it an hour, and no earlier one tells which.
PHASES: Mapping[str, Phase] = {
    "step": Phase("step_seconds", 300, 60, 200, 20),
    "data_wait": Phase("data_seconds", 900, 300, 1000, 20),
    "save": Phase("save_seconds", 3600, 600, 10, 5),
    BACKGROUND_SAVE: Phase("save_seconds", 3600, 600, 10, 5),
    "eval": Phase("eval_seconds", 3600, 900, 5, 5),
    "restore": Phase("", 7200, 1800, 5, 5),
}


class Lengths:
    """Histogram of seconds with edges RATIO apart and decaying counts. Lengths below a second count as one second."""

    def __init__(self, counts: Mapping[int, float] | None = None) -> None:
        self.counts = dict(counts or {})  # by exponent of RATIO
        self.total = sum(self.counts.values())

    def add(self, seconds: float) -> None:
        """Count a length."""
        exponent = min(_LARGEST, math.ceil(math.log(max(seconds, 1.0), RATIO) - 1e-9))
        self.counts[exponent] = self.counts.get(exponent, 0.0) + 1.0
        self.total += 1.0
        if self.total >= KEPT:
            self.counts = {exponent: count / 2 for exponent, count in self.counts.items() if count / 2 >= FORGOTTEN}
            self.total = sum(self.counts.values())

    def percentile_99(self) -> float:
        """99th percentile, rounded up by less than RATIO; the longest of fewer than a hundred; 0 of none."""
        above = 0.0
        for exponent in sorted(self.counts, reverse=True):
            above += self.counts[exponent]
            if above > self.total / 100:
                return RATIO**exponent
        return 0.0

    def longest(self) -> float:
        """Longest length, rounded up by less than RATIO; 0 of none."""
        return RATIO ** max(self.counts) if self.counts else 0.0


class Limits:
    """Limits by operation, for one config on one mesh."""

    def __init__(self, settings: WatchdogConfig, saved: Any = None) -> None:
        """`saved`: what `to_json` has returned; anything else counts as nothing."""
        self._settings = settings
        self._longest = max(settings.startup_seconds, WatchdogConfig().startup_seconds)  # that a limit is raised to
        self._lengths, self._raised = _read(saved, self._longest)
        self._sequences, self._timed = 0, False  # of a batch; whether a step of this size was timed
        self._mixed = 0  # lengths of steps to come that are partly of another size
        self.agreed: Mapping[str, float] = {}  # limits of process 0, at another one

    def begin_size(self, sequences: int) -> None:
        """Set the sequences of a batch from now on. Steps are learned for each batch size separately."""
        if sequences != self._sequences:
            self._mixed, self._timed = int(self._timed), False
            self._sequences = sequences

    def observe(self, lengths: Mapping[str, float]) -> None:
        """Count the length of one operation of each of these kinds, in seconds."""
        for part, seconds in lengths.items():
            if part == "step":
                self._mixed, counts = max(0, self._mixed - 1), not self._mixed
                if not counts:
                    continue
                self._timed = True
            self._lengths.setdefault(self._name(part), Lengths()).add(seconds)
            until, left = self._raised.pop(part, (0.0, 0))
            if left > 1:
                self._raised[part] = until, left - 1

    def ended(self, part: str, seconds: float) -> None:
        """The run is ended because an operation has taken so long. Should it have been no hang, the next attempts wait longer."""
        if part in PHASES:
            self._raised[part] = min(RAISED_FACTOR * seconds, self._longest), RAISED_FOR * PHASES[part].enough

    def seconds(self, part: str) -> float:
        """Limit of an operation in seconds. Unknown operations, and steps of a size not timed yet, have the limit of the start."""
        if part == DEBUGGER:
            return math.inf
        if part not in PHASES or (part == "step" and not self._timed):
            return self._settings.startup_seconds
        return self.agreed.get(part) or self._learned(part)

    def to_send(self) -> dict[str, int]:
        """Limits for the other processes, in whole seconds."""
        return {part: math.ceil(self._learned(part)) for part in PHASES}

    def _learned(self, part: str) -> float:
        phase, lengths = PHASES[part], self._lengths.get(self._name(part), Lengths())
        fixed: float | None = getattr(self._settings, phase.setting) if phase.setting else None
        multiple = (self._settings.step_factor if part == "step" else phase.factor) * lengths.percentile_99()
        if fixed is not None:
            return max(fixed, multiple) if part == "step" else fixed
        least = phase.floor_s if lengths.total >= phase.enough else phase.first_s
        limit = max(least, multiple, LONGEST_FACTOR * lengths.longest(), self._raised.get(part, (0.0, 0))[0])
        return min(limit, self._settings.startup_seconds) if part == "restore" else limit

    def _name(self, part: str) -> str:
        return f"step {self._sequences}" if part == "step" else part

    def to_json(self) -> dict[str, Any]:
        """All that was learned, for the next attempt."""
        lengths = {name: {str(exponent): count for exponent, count in one.counts.items()} for name, one in self._lengths.items()}
        return {"lengths": lengths, "raised": {part: list(one) for part, one in self._raised.items()}}


class _Saved(BaseModel):
    """Schema of the JSON that `to_json` returns."""

    lengths: dict[str, dict[Annotated[int, Field(ge=0, le=_LARGEST)], _Count]]
    raised: dict[str, tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Annotated[int, Field(ge=0, le=2 * KEPT)]]]


def _read(saved: Any, longest: float) -> tuple[dict[str, Lengths], dict[str, tuple[float, int]]]:
    """Lengths, and raised limits up to `longest`, from a file; nothing, if one of its values makes no sense."""
    try:
        kept = _Saved.model_validate(saved)
    except ValidationError:
        return {}, {}
    raised = {part: (min(until, longest), left) for part, (until, left) in kept.raised.items() if part in PHASES}
    return {name: Lengths(counts) for name, counts in kept.lengths.items()}, raised
