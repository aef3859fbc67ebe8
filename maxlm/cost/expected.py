"""Expected time of a step: the estimate corrected by what published runs took, in the words and the JSON of every report.

An estimate is the time of a compiled program's schedule, or of the analytic model. `maxlm.hardware.published_runs` has the correction: a
factor, and the range in which runs lie around it. Reports show the corrected step first and the estimate after it. With speeds that were
measured on this machine nothing is corrected, and the report says so.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.hardware.chips import Chip, MatmulFormat
from maxlm.hardware.published_runs import Correction, best_published, correction
from maxlm.hardware.topologies import Topology, is_tpu
from maxlm.models import mfu_format, step_flops
from maxlm.telemetry.formatting import count, duration, percent

# Cost models count no turn of the loops that compute rows above an even load (`maxlm.parallel.expert_rows`).
EVEN_LOADS = "Every expert is assumed to get the same number of tokens; an uneven load takes further rounds, which are not counted."


@dataclass(frozen=True)
class StepScale:
    """Converts estimated seconds of a step into expected seconds, MFU and tokens/s. All figures are for all devices together."""

    tokens_per_step: int
    model_flops: float  # of a step
    chip: Chip
    devices: int
    format: MatmulFormat  # of the matmuls: MFU is a share of its peak
    experts: bool

    @cached_property
    def correction(self) -> Correction:
        """Ratios of published runs to their estimates, which correct this one."""
        return correction(self.chip, self.format, experts=self.experts)

    @property
    def assumes(self) -> tuple[str, ...]:
        """Assumptions behind the figures, a sentence each."""
        return (EVEN_LOADS,) if self.experts else ()

    @property
    def corrected_by(self) -> str:
        """The published runs that correct an estimate, or why none do."""
        return f"{'' if self.correction.ratios else 'nothing is corrected: '}{self.correction.sentence}"

    @property
    def peak_name(self) -> str:
        """Format of the peak that MFU is a share of: "bf16", also where the chip has no published peak of the matmuls' format."""
        return self.chip.peak_name(self.format)

    def expected_s(self, step_s: float) -> float:
        """Seconds that a step is expected to take; run times and costs are computed from it."""
        return self.correction.middle * step_s

    def expected_times(self, step_s: float) -> dict[str, float]:
        """Expected seconds of a step: `middle`, and the `low` and `high` ends of their range."""
        low, high = self.correction.range
        return {"low": low * step_s, "middle": self.expected_s(step_s), "high": high * step_s}

    def mfu(self, step_s: float, format: MatmulFormat | None = None) -> float:
        """Model FLOPs over the devices' peak FLOPs in that time: of the matmuls' format or another, or bf16's where none is published."""
        return self.model_flops / (step_s * self.devices * self.chip.peak_flops_per_device(format or self.format))

    def mfu_text(self, step_s: float) -> str:
        """`57.5%`, or of a peak of 8 bits `31.2% of the fp8 peak, 62.4% of bf16's`."""
        if self.peak_name == "bf16":
            return percent(self.mfu(step_s))
        return f"{percent(self.mfu(step_s))} of the {self.peak_name} peak, {percent(self.mfu(step_s, 'bf16'))} of bf16's"

    def seconds_text(self, step_s: float) -> str:
        """`4.44 s a step (4.42 s to 4.67 s)`: the expected time and its range."""
        if not self.correction.ratios:
            return f"{duration(step_s)} a step"
        low, middle, high = map(duration, self.expected_times(step_s).values())
        return f"{middle} a step ({low} to {high})"

    def both(self, step_s: float, source: str) -> str:
        """`4.44 s a step (4.42 s to 4.67 s) expected, 4.27 s by the schedule alone`, or one figure where nothing corrects it."""
        alone = f" expected, {duration(step_s)} by {source} alone" if self.correction.ratios else f" by {source}"
        return self.seconds_text(step_s) + alone

    def headline(self, step_s: float) -> str:
        """The expected step with its range, MFU and tokens/s."""
        expected_s = self.expected_s(step_s)
        return f"{self.seconds_text(step_s)}, MFU {self.mfu_text(expected_s)}, {count(self.tokens_per_step / expected_s)} tokens/s"

    def notes(self, step_s: float, source: str) -> list[str]:
        """Sentences below the headline: the estimate by itself and the runs that correct it, an MFU that no published run reached, and
        assumptions. `source`: origin of the estimate, as in "the schedule".
        """
        return [self.basis(step_s, source), *filter(None, [self.above_best(step_s, source)]), *self.assumes]

    def basis(self, step_s: float, source: str) -> str:
        """The estimate by itself and the published runs that correct it, or the reason why nothing does."""
        if not self.correction.ratios:
            return f"By {source}; {self.corrected_by}."
        alone = f"{source[0].upper()}{source[1:]} alone says {duration(step_s)}, MFU {self.mfu_text(step_s)}"
        return f"{alone}; {self.corrected_by}."

    def above_best(self, step_s: float, source: str) -> str:
        """The sentence on an MFU above the best published on the chip; empty if it is not, or nothing comparable is published."""
        best = best_published(self.chip, self.format)
        expected, alone = self.mfu(self.expected_s(step_s)), self.mfu(step_s)
        if best is None or best.mfu is None or max(expected, alone) <= best.mfu:
            return ""
        which = "The expected MFU is" if expected > best.mfu else f"The MFU by {source} alone is"
        return f"{which} above the best published on {self.chip.name} ({percent(best.mfu)}, {best.name})."

    def to_json(self, step_s: float) -> dict[str, Any]:
        """Plain values, the expected ones first. `low`, `middle` and `high` are of the step time: the lowest time has the highest MFU.
        `step_s`, `mfu` and `tokens_per_s` are of the estimate by itself.
        """
        times, best = self.expected_times(step_s), best_published(self.chip, self.format)
        return {
            "expected_step_s": times,
            "expected_mfu": {name: self.mfu(seconds) for name, seconds in times.items()},
            "expected_tokens_per_s": {name: self.tokens_per_step / seconds for name, seconds in times.items()},
            "best_published_mfu": best.mfu if best else None,
            "step_s": step_s,
            "mfu": self.mfu(step_s),
            "tokens_per_s": self.tokens_per_step / step_s,
        }


def source_of(chip: Chip, *, compiled: bool) -> str:
    """Origin of an estimate, for `StepScale.notes`."""
    return "the analytic model" if not compiled else "the schedule" if is_tpu(chip) else "the compiled program"


def step_scale(model: ModelConfig, matmul: QuantizedConfig | None, seq_len: int, tokens_per_step: int, topology: Topology) -> StepScale:
    """The scale of a step of `tokens_per_step` tokens in sequences of `seq_len`, with matmuls in the format of `matmul`, on `topology`."""
    return StepScale(
        tokens_per_step=tokens_per_step,
        model_flops=step_flops(model, seq_len, tokens_per_step),
        chip=topology.chip,
        devices=topology.devices,
        format=mfu_format(matmul),
        experts=model.moe is not None,
    )
