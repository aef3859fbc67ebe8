"""Step times of published runs, our estimates of them, and the correction that they give to other estimates. No jax here.

The rows, in published_runs.toml, are the tables of docs/lab/truth.md (MaxText's own programs, compiled for TPUs) and of
docs/lab/truth_gpu.md (the analytic model of `maxlm plan`). A correction is fitted to all of them by one rule, and its error is how far it
misses rows that it was not fitted to: each is left out in turn and predicted from the others.
"""

import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from maxlm.hardware.chips import CHIPS, PEAK_NAMES, Chip, MatmulFormat, chip_named

OTHERS = 1  # weight, in runs of the chip itself, of the median over all chips of its family
FAMILIES = ("TPUs", "GPUs")
COVERAGE = 0.9  # share of the runs that lie inside the stated error when they are left out


def family_of(chip: Chip) -> str:
    """`TPUs` or `GPUs`."""
    return "GPUs" if chip.clock_hz is None else "TPUs"


@dataclass(frozen=True)
class PublishedRun:
    """A row: chip, format of its matmuls, seconds of a step as predicted and as published.

    `host_s`: seconds of the prediction in which the chip waits for its host as today's compiler schedules the copies, where the run's own,
    older compiler hid them (`host_hidden` in tools/truth_rows.yml); `ratio` is without them. `experts`: of a mixture of experts.
    `modelled`: predicted by the analytic model, not from a compiled program. `mfu`: as published, causal attention counted half; None where
    the page of the run does not have what it takes to compute it.
    """

    name: str
    chip: str
    format: str  # as in PEAK_NAMES
    predicted_s: float
    published_s: float
    host_s: float = 0.0
    experts: bool = False
    modelled: bool = False
    mfu: float | None = None

    def __post_init__(self) -> None:
        if self.chip not in {chip.name for chip in CHIPS}:
            raise ValueError(f"{self.name}: no chip {self.chip!r} is known")
        if self.format not in PEAK_NAMES.values():
            raise ValueError(f"{self.name}: format = {self.format!r} must be one of {', '.join(sorted({*PEAK_NAMES.values()}))}")
        if not (0 <= self.host_s < self.predicted_s < math.inf and 0 < self.published_s < math.inf):
            raise ValueError(f"{self.name}: predicted_s must be above host_s, and published_s above 0")
        if self.mfu is not None and not 0 < self.mfu < 1:
            raise ValueError(f"{self.name}: mfu = {self.mfu} must lie between 0 and 1")

    @property
    def ratio(self) -> float:
        """Published over predicted seconds."""
        return self.published_s / (self.predicted_s - self.host_s)

    @property
    def family(self) -> str:
        """`TPUs` or `GPUs`."""
        return family_of(chip_named(self.chip))


ROWS = Path(__file__).with_name("published_runs.toml")  # written by `python tools/published_runs.py` from the tables of the pages


def read_runs(text: str) -> tuple[PublishedRun, ...]:
    """The rows of a file of published runs. Raises ValueError for text that is not TOML, or a row with a wrong or missing value."""
    runs = []
    for row in tomllib.loads(text).get("run", []):
        try:
            runs.append(PublishedRun(**row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"published_runs.toml: {row}: {error}") from None
    if twice := [name for name, times in Counter(run.name for run in runs).items() if times > 1]:
        raise ValueError(f"published_runs.toml: several rows have the name {twice[0]}")
    if lacking := [family for family in FAMILIES if not any(run.family == family and not run.experts for run in runs)]:
        raise ValueError(f"published_runs.toml: no row without experts is of {lacking[0]}")
    if not any(run.experts for run in runs):
        raise ValueError("published_runs.toml: no row has experts")
    return tuple(runs)


RUNS = read_runs(ROWS.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Correction:
    """Factor of the step time for estimates of one chip and format, and its error.

    `of`: what is estimated, as in `v5p` or `experts on tpu7x in fp8`. `own`: number of runs of that chip and kind, in any format;
    `alike`: number of those runs in the format. `ratios`: published over predicted seconds, ascending, of all runs of that kind that the
    factor rests on; none where shares of peak were measured on the machine. `borrowed`: the runs of that kind are of another family of
    chips; the factor is what experts add there, times the factor of dense runs. `modelled`: the runs were predicted by the analytic
    model. `inside`: number of runs that lie within `error` when they are left out, of `checked`; `whole_chips`: with all other runs of
    their chip.
    """

    of: str
    family: str
    ratios: tuple[float, ...] = ()
    own: int = 0
    alike: int = 0
    borrowed: bool = False
    modelled: bool = False
    middle: float = 1.0
    error: float = 0.0
    inside: int = 0
    checked: int = 0
    whole_chips: bool = False

    @property
    def range(self) -> tuple[float, float]:
        """Factors at both ends of the error."""
        return self.middle * (1 - self.error), self.middle * (1 + self.error)

    @property
    def sentence(self) -> str:
        """`published runs took 1.05 times estimates of compiled programs (6 of v5p, 24 others); each predicted from the others, 27 of 30
        were within 10%`, or what is not known.
        """
        if not self.ratios:
            return f"no published run checks shares of peak that were measured on this machine ({self.of})"
        others, (kind, _, format) = len(self.ratios) - self.own, self.of.partition(" in ")
        counted = f"{self.own or 'none'} of {kind}"
        counted += f", {self.alike or 'none'} of these in {format}" if self.own and format else ""
        counted += f", {others} others{f' on {self._other_family}' if self.borrowed else ''}" if others else ""
        fit = f"each predicted from {'those on other hardware' if self.whole_chips else 'the others'}, "
        fit += f"{self.inside} of {self.checked} were within {self.error:.0%}"
        if self.borrowed:
            rule = f"{self.middle:.2f} is the factor of dense runs on {self.family} times what experts add on {self._other_family}"
            return f"{rule} ({counted}); {fit}"
        estimates = "estimates of the analytic model" if self.modelled else "estimates of compiled programs"
        return f"published runs took {self.middle:.2f} times {estimates} ({counted}); {fit}"

    @property
    def _other_family(self) -> str:
        return next(family for family in FAMILIES if family != self.family)

    def to_json(self) -> dict[str, Any]:
        """Plain values: ratios of published to predicted seconds."""
        low, high = self.range
        figures = {"low": low, "middle": self.middle, "high": high, "error": self.error, "inside": self.inside, "checked": self.checked}
        runs = {"runs": len(self.ratios), "own_runs": self.own, "own_runs_in_format": self.alike, "analytic": self.modelled}
        return {"of": self.of, **runs, **figures, "says": self.sentence}


def correction(chip: Chip, format: MatmulFormat, *, experts: bool, runs: Sequence[PublishedRun] = RUNS) -> Correction:
    """The correction of estimates of `chip` with matmuls in `format`, of a model with `experts` or without."""
    name, family = PEAK_NAMES[format], family_of(chip)
    of = f"{'experts on ' if experts else ''}{chip.name}{'' if name == 'bf16' else f' in {name}'}"
    if chip.achieved.source:
        return Correction(of, family)
    rested = [run for run in runs if run.family == family and run.experts == experts] or [run for run in runs if run.experts == experts]
    own = [run for run in rested if run.chip == chip.name]
    borrowed, whole_chips = rested[0].family != family, False
    fit = stated_error(left_out(tuple(runs), family, experts=experts).values())
    if all(run.chip != chip.name for run in runs):  # as chips of dense runs are predicted that have no run
        apart = stated_error(left_out(tuple(runs), family, experts=False, whole_chips=True).values())
        whole_chips, fit = apart > fit, max(fit, apart)
    return Correction(
        of,
        family,
        tuple(sorted(run.ratio for run in rested)),
        len(own),
        alike=sum(run.format == name for run in own),
        borrowed=borrowed,
        modelled=not borrowed and all(run.modelled for run in rested),
        middle=factor(chip.name, runs, experts=experts),
        error=fit[0],
        inside=fit[1],
        checked=fit[2],
        whole_chips=whole_chips,
    )


def best_published(chip: Chip, format: MatmulFormat, runs: Sequence[PublishedRun] = RUNS) -> PublishedRun | None:
    """The run of the highest MFU on `chip` with matmuls in `format`; None where no row has one."""
    found = [run for run in runs if (run.chip, run.format) == (chip.name, PEAK_NAMES[format]) and run.mfu is not None]
    return max(found, key=lambda run: run.mfu or 0.0, default=None)


def stated_error(errors: Iterable[float]) -> tuple[float, int, int]:
    """(error in whole percent that `COVERAGE` of the errors lie within, number of those within, number of all)."""
    sizes = sorted(abs(error) for error in errors)
    error = math.ceil(100 * sizes[math.ceil(COVERAGE * len(sizes)) - 1]) / 100
    return error, sum(size <= error for size in sizes), len(sizes)


def factor(chip: str, runs: Sequence[PublishedRun], *, experts: bool) -> float:
    """Published over predicted seconds of a step on `chip`: the geometric mean of the median of its own dense runs, as often as there are
    runs, and of the median of all dense runs of its family, as `OTHERS`. Of experts times the same mean of what their runs are above it.
    """
    family = family_of(chip_named(chip))
    dense = [(run.chip, run.ratio) for run in runs if run.family == family and not run.experts]
    if not experts:
        return _mean(chip, dense)
    above = [(run.chip, run.ratio / factor(run.chip, runs, experts=False)) for run in runs if run.experts]
    return _mean(chip, dense) * _mean(chip, above)


def _mean(chip: str, ratios: Sequence[tuple[str, float]]) -> float:
    own = [ratio for where, ratio in ratios if where == chip]
    if not ratios:
        return 1.0
    weighed = OTHERS * math.log(statistics.median(ratio for _, ratio in ratios))
    return math.exp((weighed + (len(own) * math.log(statistics.median(own)) if own else 0.0)) / (OTHERS + len(own)))


@lru_cache(maxsize=32)
def left_out(runs: tuple[PublishedRun, ...], family: str, *, experts: bool, whole_chips: bool = False) -> Mapping[str, float]:
    """Relative error of every run of a family and kind, published over corrected less 1, when the factor is fitted without it, or
    without any run of its chip. GPUs have no published run of experts and take the errors of TPUs.
    """
    kind = [run for run in runs if run.experts == experts]
    found = {}
    for run in [run for run in kind if run.family == family] or kind:
        rest = [other for other in runs if (other.chip != run.chip if whole_chips else other is not run)]
        found[run.name] = run.ratio / factor(run.chip, rest, experts=experts) - 1
    return found
