"""Step times of published runs with our estimates of them, and the correction that they suggest for other estimates. No jax here.

The rows, in published_runs.toml, are the rows of docs/truth.md (MaxText's own programs, compiled for TPUs), and, by the analytic model of
`maxlm plan`, of docs/truth_gpu.md and docs/low_precision_speed.md. No share or other constant of an estimate is fitted to them: a
correction is stated in addition to the estimate, which stays as it is.
"""

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxlm.hardware.chips import PEAK_NAMES, Chip, MatmulFormat, chip_named

ENOUGH = 3  # runs of a chip and format, for a correction of its own
APART = 0.15  # of the median ratio: runs that differ more are stated one by one, after the range of the others


@dataclass(frozen=True)
class PublishedRun:
    """A row: chip, format of its matmuls, seconds of a step as predicted and as published.

    `experts`: of a mixture of experts. `modelled`: predicted by the analytic model, not from a compiled program. `waits`: for its host, by
    the estimate, for more than a tenth of the step; such estimates err in copies that others lack, so no correction counts it. `mfu`: as
    published, counted as ours; None where it is not known.
    """

    name: str
    chip: str
    format: str  # as in PEAK_NAMES
    predicted_s: float
    published_s: float
    experts: bool = False
    modelled: bool = False
    waits: bool = False
    mfu: float | None = None

    @property
    def ratio(self) -> float:
        """Published over predicted seconds."""
        return self.published_s / self.predicted_s


ROWS = Path(__file__).with_name("published_runs.toml")  # written by `python tools/published_runs.py` from the tables of the three pages
RUNS = tuple(PublishedRun(**row) for row in tomllib.loads(ROWS.read_text(encoding="utf-8"))["run"])


@dataclass(frozen=True)
class Correction:
    """Ratios of published runs to our estimates of them, for estimates of one chip and format.

    `of`: what is estimated, as in `v5p` or `experts on tpu7x in fp8`. `ratios`: of the runs that it rests on, ascending; none for GPUs
    with measured shares of peak. `own`: runs of just that. `basis`: what it rests on if there are too few of them. `modelled`: True if the
    analytic model predicted all of them.
    """

    of: str
    ratios: tuple[float, ...]
    own: int
    basis: str = ""
    modelled: bool = False

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
        if not self.ratios:
            return f"no published run checks shares of peak that were measured on this machine ({self.of})"
        few = {0: "no published run checks", 1: "only one published run checks"}.get(self.own, f"only {self.own} published runs check")
        head = f"{few} {self.of}; " if self.basis else ""
        return f"{head}{self._counts(self.basis or self.of)}"

    def _counts(self, what: str) -> str:
        near, apart = self.near, self.apart
        count = f"{len(near)} of {len(self.ratios)}" if apart else f"{len(near)}"
        estimates = "the analytic model's estimates" if self.modelled else "such estimates"
        link = "of" if what.startswith("experts") else "on"
        text = f"{count} published runs {link} {what} took {_between(near[0], near[-1])} time than {estimates}"
        *more, last = [_off(ratio) for ratio in apart] or [""]
        each = f"{', '.join(more)} and {last}" if more else last
        return f"{text}, the other{'s' if more else ''} {each}" if apart else text

    def to_json(self) -> dict[str, Any]:
        """Plain values: ratios of published to predicted seconds."""
        low, high = self.range
        figures = {"low": low, "middle": self.middle, "high": high, "apart": list(self.apart)}
        return {"of": self.of, "runs": len(self.ratios), "own_runs": self.own, "modelled": self.modelled, **figures, "says": self.sentence}


def correction(chip: Chip, format: MatmulFormat, *, experts: bool, runs: Sequence[PublishedRun] = RUNS) -> Correction:
    """The correction of estimates of `chip` with matmuls in `format`: by its own published runs if there are `ENOUGH`, else by runs of the
    chip in bf16, else by runs of all TPUs or all GPUs. For models with `experts` in this order by runs of experts, then by the others.
    """
    name = PEAK_NAMES[format]
    of = _what(chip.name, name, experts)
    if chip.achieved.source:
        return Correction(of, (), 0)
    kind = "GPUs" if chip.clock_hz is None else "TPUs"
    alike = [run for run in runs if (chip_named(run.chip).clock_hz is None) == (chip.clock_hz is None) and not run.waits]
    choices: list[tuple[str, list[PublishedRun]]] = []
    for mixed in (True, False) if experts else (False,):
        some = [run for run in alike if run.experts == mixed]
        choices += [
            (_what(chip.name, one, mixed), [run for run in some if (run.chip, run.format) == (chip.name, one)]) for one in (name, "bf16")
        ]
        choices.append((_what(kind, "bf16", mixed), some))
    own = len(choices[0][1])
    basis, chosen = next((basis, some) for basis, some in choices if len(some) >= ENOUGH)
    ratios = tuple(sorted(run.ratio for run in chosen))
    return Correction(of, ratios, own, "" if basis == of else basis, all(run.modelled for run in chosen))


def best_published(chip: Chip, format: MatmulFormat, runs: Sequence[PublishedRun] = RUNS) -> PublishedRun | None:
    """The run of the highest MFU on `chip` with matmuls in `format`; None where no row has one."""
    found = [run for run in runs if (run.chip, run.format) == (chip.name, PEAK_NAMES[format]) and run.mfu is not None]
    return max(found, key=lambda run: run.mfu or 0.0, default=None)


def _what(where: str, format: str, experts: bool) -> str:
    """`experts on tpu7x in fp8`, `v5p`."""
    return f"{'experts on ' if experts else ''}{where}{'' if format == 'bf16' else f' in {format}'}"


def _off(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'more' if ratio >= 1 else 'less'}"


def _between(low: float, high: float) -> str:
    """`1% to 8% more`, `10% less to 4% more`."""
    if (low >= 1) != (high >= 1):
        return f"{_off(low)} to {_off(high)}"
    first, last = sorted((low, high), key=lambda ratio: abs(ratio - 1))
    return f"{abs(first - 1):.0%} to {_off(last)}"
