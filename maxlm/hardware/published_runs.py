"""Step times of published runs with our estimates of them, and the correction that they suggest for other estimates. No jax here.

The rows are the rows of docs/truth.md (MaxText's own programs, compiled for TPUs), and, by the analytic model of `maxlm plan`, of
docs/truth_gpu.md and docs/low_precision_speed.md. No share or other constant of an estimate is fitted to them: a correction is stated
in addition to the estimate, which stays as it is.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maxlm.hardware.chips import PEAK_NAMES, Chip, MatmulFormat, chip_named

ENOUGH = 3  # runs of a chip and format, for a correction of its own
APART = 0.15  # of the median ratio: runs that differ more are stated one by one, after the range of the others


@dataclass(frozen=True)
class PublishedRun:
    """A row: chip, format of its matmuls, seconds of a step as predicted and as published.

    `experts`: of a mixture of experts. `modelled`: predicted by the analytic model, not from a compiled program. `waits`: for its host, by
    the estimate, for more than a tenth of the step; such estimates err in copies that others lack, so no correction counts it.
    """

    name: str
    chip: str
    format: str  # as in PEAK_NAMES
    predicted_s: float
    published_s: float
    experts: bool = False
    modelled: bool = False
    waits: bool = False

    @property
    def ratio(self) -> float:
        """Published over predicted seconds."""
        return self.published_s / self.predicted_s


# Written by `python tools/published_runs.py` from the tables of the three pages.
RUNS: tuple[PublishedRun, ...] = (
    PublishedRun("llama3.1-8b-v6e-8", "v6e", "bf16", 4.561, 3.443, waits=True),
    PublishedRun("llama3.1-8b-v6e-16", "v6e", "bf16", 4.532, 3.393, waits=True),
    PublishedRun("llama3.1-8b-v6e-32", "v6e", "bf16", 4.543, 3.495, waits=True),
    PublishedRun("llama3.1-8b-v6e-64", "v6e", "bf16", 7.275, 5.652, waits=True),
    PublishedRun("llama3.1-8b-v6e-128", "v6e", "bf16", 5.919, 4.602, waits=True),
    PublishedRun("llama3.1-8b-v6e-256", "v6e", "bf16", 6.332, 4.546, waits=True),
    PublishedRun("llama3.1-70b-v6e-32", "v6e", "bf16", 15.502, 17.790),
    PublishedRun("llama3.1-70b-v6e-64", "v6e", "bf16", 17.351, 18.688),
    PublishedRun("llama3.1-70b-v6e-128", "v6e", "bf16", 31.042, 34.786),
    PublishedRun("llama3.1-70b-v6e-256", "v6e", "bf16", 37.970, 42.656),
    PublishedRun("mistral-7b-v6e-8", "v6e", "bf16", 8.800, 6.320, waits=True),
    PublishedRun("llama2-70b-v6e-256", "v6e", "bf16", 7.253, 9.052),
    PublishedRun("gpt3-175b-v6e-256", "v6e", "bf16", 15.672, 17.182),
    PublishedRun("32b-v5p-128", "v5p", "bf16", 7.020, 7.357),
    PublishedRun("64b-v5p-128", "v5p", "bf16", 9.363, 7.419),
    PublishedRun("128b-v5p-256", "v5p", "bf16", 4.872, 5.043),
    PublishedRun("256b-v5p-1024", "v5p", "bf16", 9.282, 10.154),
    PublishedRun("16b-v5e-256", "v5e", "bf16", 10.014, 10.354),
    PublishedRun("32b-v5e-256", "v5e", "bf16", 12.940, 12.216),
    PublishedRun("64b-v5e-256", "v5e", "bf16", 13.811, 13.527),
    PublishedRun("llama2-70b-v5p-1024", "v5p", "bf16", 23.327, 24.347),
    PublishedRun("llama3.1-405b-v5p-1024", "v5p", "bf16", 126.301, 131.474),
    PublishedRun("llama3.1-70b-tpu7x-4x4x4", "tpu7x", "bf16", 11.004, 12.200),
    PublishedRun("llama3.1-70b-tpu7x-4x8x8", "tpu7x", "bf16", 10.998, 12.270),
    PublishedRun("llama3.1-405b-tpu7x-4x8x8", "tpu7x", "bf16", 92.596, 98.340),
    PublishedRun("llama3.1-70b-fp8-tpu7x-4x4x4", "tpu7x", "fp8", 7.092, 7.930),
    PublishedRun("llama3.1-70b-fp8-tpu7x-4x8x8", "tpu7x", "fp8", 7.086, 7.950),
    PublishedRun("llama3.1-405b-fp8-tpu7x-4x8x8", "tpu7x", "fp8", 58.389, 64.370),
    PublishedRun("llama3.1-70b-128k-tpu7x-4x8x8", "tpu7x", "bf16", 37.127, 34.020),
    PublishedRun("llama3.1-70b-128k-fp8-tpu7x-4x8x8", "tpu7x", "fp8", 33.254, 30.110),
    PublishedRun("llama2-7b-256-h100", "H100", "bf16", 1.165, 1.500, modelled=True),
    PublishedRun("llama2-70b-64-h100", "H100", "bf16", 6.191, 7.908, modelled=True),
    PublishedRun("llama3.1-70b-256-h200", "H200", "bf16", 12.745, 15.516, modelled=True),
    PublishedRun("llama3-70b-128-h100", "H100", "bf16", 13.630, 15.570, modelled=True),
    PublishedRun("llama3-8b-64-a100", "A100-80GB", "bf16", 2.227, 2.755, modelled=True),
    PublishedRun("llama3-70b-64-a100", "A100-80GB", "bf16", 21.363, 24.749, modelled=True),
    PublishedRun("llama2-13b-64-a100", "A100-80GB", "bf16", 3.377, 3.789, modelled=True),
    PublishedRun("mpt-70b-64-a100", "A100-80GB", "bf16", 142.242, 159.844, modelled=True),
    PublishedRun("mpt-30b-8-a100", "A100-80GB", "bf16", 130.634, 140.856, modelled=True),
    PublishedRun("mpt-7b-8-h100", "H100", "bf16", 0.888, 1.155, modelled=True),
    PublishedRun("deepseek-v3-128", "tpu7x", "bf16", 18.950, 27.020, experts=True, modelled=True),
    PublishedRun("deepseek-v3-128-fp8", "tpu7x", "fp8", 16.290, 22.470, experts=True, modelled=True),
    PublishedRun("deepseek-v3-256", "tpu7x", "bf16", 18.930, 26.790, experts=True, modelled=True),
    PublishedRun("deepseek-v3-256-fp8", "tpu7x", "fp8", 16.270, 22.080, experts=True, modelled=True),
    PublishedRun("qwen3-235b-256", "tpu7x", "bf16", 21.800, 30.870, experts=True, modelled=True),
    PublishedRun("qwen3-235b-256-fp8", "tpu7x", "fp8", 19.650, 27.670, experts=True, modelled=True),
    PublishedRun("gpt-oss-120b-64", "tpu7x", "bf16", 8.710, 14.930, experts=True, modelled=True),
    PublishedRun("gpt-oss-120b-256", "tpu7x", "bf16", 8.630, 15.160, experts=True, modelled=True),
    # end of rows
)


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
