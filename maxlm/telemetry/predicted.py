"""Memory and time of a step predicted before the first step, compared with the measured ones.

The event `start` holds them as `predicted`: `memory_bytes` that the compiled step needs on a device, by the compiler, and if the config
names what was measured on such a machine (`cost.calibration`), `expected_step_s` (`low`, `middle`, `high`: the seconds that published runs
let one expect), `step_s` (seconds by the estimate alone), `basis` (the runs that correct it, or why none do) and `assumes` (sentences).
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxlm.base.host import in_bytes
from maxlm.base.strict_json import is_finite, is_number, read_objects
from maxlm.hardware.chips import GIB
from maxlm.telemetry.course import first_step_since
from maxlm.telemetry.device_memory import PEAK, PROCESS
from maxlm.telemetry.formatting import duration
from maxlm.telemetry.ledger import read_events
from maxlm.telemetry.run_dir import RunDirectory

SMALLEST_BYTES = GIB  # of a memory that the end of a run tells
MEMORY, STEP, EXPECTED, BASIS, ASSUMES = "memory_bytes", "step_s", "expected_step_s", "basis", "assumes"  # keys of `predicted`


class Compared(NamedTuple):
    """A figure of a run; `measured` and `predicted` in the unit that `text` writes, None where unknown. `estimate`: the prediction before
    its correction, if there is one.
    """

    name: str
    text: Callable[[float], str]
    measured: float | None
    predicted: float | None
    estimate: float | None = None

    @property
    def matters(self) -> bool:
        """True for a time, and for memory that a device or host could lack: of a small model on a CPU it is the noise of the process."""
        return self.text is not in_bytes or max(self.measured or 0, self.predicted or 0) >= SMALLEST_BYTES

    def sentence(self) -> str:
        """Such as "peak memory 12.3 GB, predicted 12.0 GB (2.5% more than predicted)", with the estimate after a corrected prediction; ""
        unless both are known.
        """
        if not self.measured or not self.predicted:
            return ""
        corrected = self.estimate is not None and self.estimate != self.predicted
        said = f"{self.name} {self.text(self.measured)}, {self._against(self.predicted, 'expected' if corrected else 'predicted')}"
        return f"{said}; {self._against(self.estimate, 'estimated')}" if corrected and self.estimate else said

    def _against(self, value: float, what: str) -> str:
        assert self.measured
        error = self.measured / value - 1
        return f"{what} {self.text(value)} ({abs(error):.1%} {'more' if error >= 0 else 'less'} than {what})"


def predicted_of(start: Mapping[str, Any], key: str) -> float | None:
    """A figure that the data of a `start` event predicts."""
    value = _stated(start, key)
    return float(value) if is_finite(value) else None


def expected_of(start: Mapping[str, Any]) -> dict[str, float]:
    """`low`, `middle` and `high` seconds of a step that the data of a `start` event expects; the estimate for all of them in runs of older
    versions, and none without a prediction.
    """
    stated, estimate = _stated(start, EXPECTED), predicted_of(start, STEP)
    names = ("low", "middle", "high")
    if isinstance(stated, Mapping) and all(is_finite(stated.get(name)) for name in names):
        return {name: float(stated[name]) for name in names}
    return dict.fromkeys(names, estimate) if estimate is not None else {}


def sentences_of(start: Mapping[str, Any]) -> list[str]:
    """Sentences on the runs that correct the predicted step, or why none do, and on its assumptions."""
    basis, assumes = _stated(start, BASIS), _stated(start, ASSUMES)
    said = [f"{basis[0].upper()}{basis[1:]}."] if isinstance(basis, str) and basis else []
    return said + [str(one) for one in assumes] if isinstance(assumes, list) else said


def _stated(start: Mapping[str, Any], key: str) -> Any:
    stated = start.get("predicted")
    return stated.get(key) if isinstance(stated, Mapping) else None


def read_compared(run: RunDirectory) -> list[Compared]:
    """Figures of the newest attempt of a run. Raises OSError."""
    events = read_events(run)
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    if not starts:
        return []
    start, since = events[starts[-1]].data, first_step_since(events, starts[-1])
    records = [item for item in read_objects(run.metrics) if is_number(item.get("step")) and item["step"] > since]
    peaks = [item[PEAK] for item in records if is_number(item.get(PEAK))]
    grown = [item[PROCESS] for item in records if is_number(item.get(PROCESS))]
    steps = [item["step_time_s"] for item in records if is_number(item.get("step_time_s"))]
    memory, step, expected = predicted_of(start, MEMORY), predicted_of(start, STEP), expected_of(start).get("middle")
    return [
        Compared("peak memory of a device", in_bytes, max(peaks, default=None), memory),
        # Every step needs as much; saves, evaluations and compilations between two records only add to it.
        Compared("memory of a step, by the least growth of the process", in_bytes, min(grown, default=None), memory),
        Compared("median step", duration, statistics.median(steps) if steps else None, expected, step),
    ]
