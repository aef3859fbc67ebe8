"""Step times of published runs beside our estimates of them, and the correction that they suggest for other estimates. No jax here.

The rows are those of docs/truth.md (MaxText's own programs, compiled for TPUs) and docs/truth_gpu.md (the analytic model of `maxlm plan`).
No price, share or other constant of an estimate is fitted to them: a correction is stated beside the estimate that it leaves as it is.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maxlm.hardware.chips import PEAK_NAMES, Chip, MatmulFormat, chip_named

ENOUGH = 3  # runs of a chip and format, for a correction of its own
APART = 0.15  # of the median ratio: runs that differ more are stated one by one, beside the range of the others


@dataclass(frozen=True)
class PublishedRun:
    """A row: chip, format of its matmuls, seconds of a step as predicted and as published."""

    name: str
    chip: str
    format: str  # as in PEAK_NAMES
    predicted_s: float
    published_s: float

    @property
    def ratio(self) -> float:
        """Published over predicted seconds."""
        return self.published_s / self.predicted_s


# Written by `python tools/published_runs.py` from the tables of the two pages.
RUNS: tuple[PublishedRun, ...] = (
    PublishedRun("llama3.1-8b-v6e-8", "v6e", "bf16", 4.542, 3.443),
    PublishedRun("llama3.1-8b-v6e-256", "v6e", "bf16", 6.310, 4.546),
    PublishedRun("llama3.1-70b-v6e-128", "v6e", "bf16", 30.922, 34.786),
    PublishedRun("llama3.1-70b-v6e-256", "v6e", "bf16", 37.302, 42.656),
    PublishedRun("llama2-70b-v6e-256", "v6e", "bf16", 7.692, 9.052),
    PublishedRun("gpt3-175b-v6e-256", "v6e", "bf16", 16.344, 17.182),
    PublishedRun("32b-v5p-128", "v5p", "bf16", 7.112, 7.357),
    PublishedRun("64b-v5p-128", "v5p", "bf16", 9.476, 7.419),
    PublishedRun("128b-v5p-256", "v5p", "bf16", 5.008, 5.043),
    PublishedRun("256b-v5p-1024", "v5p", "bf16", 9.392, 10.154),
    PublishedRun("16b-v5e-256", "v5e", "bf16", 9.955, 10.354),
    PublishedRun("32b-v5e-256", "v5e", "bf16", 13.627, 12.216),
    PublishedRun("64b-v5e-256", "v5e", "bf16", 13.836, 13.527),
    PublishedRun("llama2-70b-v5p-1024", "v5p", "bf16", 23.681, 24.347),
    PublishedRun("llama3.1-405b-v5p-1024", "v5p", "bf16", 125.837, 131.474),
    PublishedRun("llama3.1-70b-tpu7x-4x4x4", "tpu7x", "bf16", 10.387, 12.200),
    PublishedRun("llama3.1-70b-tpu7x-4x8x8", "tpu7x", "bf16", 10.383, 12.270),
    PublishedRun("llama3.1-405b-tpu7x-4x8x8", "tpu7x", "bf16", 92.593, 98.340),
    PublishedRun("llama2-7b-256-h100", "H100", "bf16", 1.227, 1.500),
    PublishedRun("llama2-70b-64-h100", "H100", "bf16", 6.347, 7.908),
    PublishedRun("llama3.1-70b-256-h200", "H200", "bf16", 13.366, 15.516),
    PublishedRun("llama3-70b-128-h100", "H100", "bf16", 14.320, 15.570),
    PublishedRun("llama3-8b-64-a100", "A100-80GB", "bf16", 2.446, 2.755),
    PublishedRun("llama3-70b-64-a100", "A100-80GB", "bf16", 22.456, 24.749),
    PublishedRun("llama2-13b-64-a100", "A100-80GB", "bf16", 3.531, 3.789),
    PublishedRun("mpt-70b-64-a100", "A100-80GB", "bf16", 144.431, 159.844),
    PublishedRun("mpt-30b-8-a100", "A100-80GB", "bf16", 132.896, 140.856),
    PublishedRun("mpt-7b-8-h100", "H100", "bf16", 0.911, 1.155),
    # end of rows
)


@dataclass(frozen=True)
class Correction:
    """What published runs took, as multiples of our estimates of them, for estimates of one chip and format.

    `ratios`: of the runs that it rests on, ascending; none for GPUs whose shares of peak were measured. `own`: runs of the chip and format
    themselves. `basis`: which others it rests on, if those are too few.
    """

    chip: str
    format: str
    ratios: tuple[float, ...]
    own: int
    basis: str = ""

    @cached_property
    def middle(self) -> float:
        """Median ratio: the factor of the step time that days and costs are counted with."""
        return statistics.median(self.ratios) if self.ratios else 1.0

    @property
    def near(self) -> tuple[float, ...]:
        """Ratios within `APART` of the median; all if there are none."""
        return tuple(ratio for ratio in self.ratios if abs(ratio / self.middle - 1) <= APART) or self.ratios

    @property
    def apart(self) -> tuple[float, ...]:
        """The other ratios."""
        return tuple(ratio for ratio in self.ratios if ratio not in self.near)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest of the near ratios."""
        return (self.near[0], self.near[-1]) if self.near else (1.0, 1.0)

    @property
    def sentence(self) -> str:
        """`5 of 6 published runs on v5p took 1% to 8% more time than such estimates, the other 22% less`, or what is not known."""
        what = self.chip if self.format == "bf16" else f"{self.chip} in {self.format}"
        if not self.ratios:
            return f"no published run checks shares of peak that were measured on this machine ({what})"
        few = {0: "no published run checks", 1: "only one published run checks"}.get(self.own, f"only {self.own} published runs check")
        head = f"{few} {what}; " if self.basis else ""
        return f"{head}{self._counts(self.basis or what)}"

    def _counts(self, where: str) -> str:
        near, apart = self.near, self.apart
        count = f"{len(near)} of {len(self.ratios)}" if apart else f"{len(near)}"
        text = f"{count} published runs on {where} took {_between(near[0], near[-1])} time than such estimates"
        *more, last = [_off(ratio) for ratio in apart] or [""]
        each = f"{', '.join(more)} and {last}" if more else last
        return f"{text}, the other{'s' if more else ''} {each}" if apart else text

    def to_json(self) -> dict[str, Any]:
        """Plain values: ratios of published to predicted seconds."""
        low, high = self.range
        figures = {"low": low, "middle": self.middle, "high": high, "apart": list(self.apart)}
        return {"runs": len(self.ratios), "runs_of_chip_and_format": self.own, **figures, "says": self.sentence}


def correction(chip: Chip, format: MatmulFormat, runs: Sequence[PublishedRun] = RUNS) -> Correction:
    """The correction of estimates of `chip` with matmuls in `format`: by its own published runs if there are `ENOUGH`, else by those of the
    chip in bf16, else by those of all TPUs or all GPUs.
    """
    name = PEAK_NAMES[format]
    if chip.achieved.source:
        return Correction(chip.name, name, (), 0)
    own = [run for run in runs if (run.chip, run.format) == (chip.name, name)]
    bf16 = [run for run in runs if (run.chip, run.format) == (chip.name, "bf16")]
    alike = [run for run in runs if (chip_named(run.chip).clock_hz is None) == (chip.clock_hz is None)]
    kind = "GPUs" if chip.clock_hz is None else "TPUs"
    choices = (("", own), (f"{chip.name} in bf16", bf16), (kind, alike))
    basis, chosen = next((basis, some) for basis, some in choices if len(some) >= ENOUGH)
    return Correction(chip.name, name, tuple(sorted(run.ratio for run in chosen)), len(own), basis)


def _off(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'more' if ratio >= 1 else 'less'}"


def _between(low: float, high: float) -> str:
    """`1% to 8% more`, `10% less to 4% more`."""
    if (low >= 1) != (high >= 1):
        return f"{_off(low)} to {_off(high)}"
    first, last = sorted((low, high), key=lambda ratio: abs(ratio - 1))
    return f"{abs(first - 1):.0%} to {_off(last)}"
