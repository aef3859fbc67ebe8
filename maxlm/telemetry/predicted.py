"""Memory and time of a step predicted before the first step, compared with the measured ones.

The event `start` holds them as `predicted`: `memory_bytes` that the compiled step needs on a device, by the compiler, and `step_s`, its
seconds, if the config names what was measured on such a machine (`cost.calibration`).
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
MEMORY, STEP = "memory_bytes", "step_s"  # keys of `predicted`


class Compared(NamedTuple):
    """A figure of a run; `measured` and `predicted` in the unit that `text` writes, None where unknown."""

    name: str
    text: Callable[[float], str]
    measured: float | None
    predicted: float | None

    @property
    def matters(self) -> bool:
        """True for a time, and for memory that a device or host could lack: of a small model on a CPU it is the noise of the process."""
        return self.text is not in_bytes or max(self.measured or 0, self.predicted or 0) >= SMALLEST_BYTES

    def sentence(self) -> str:
        """Such as "peak memory 12.3 GB, predicted 12.0 GB (2.5% more than predicted)"; "" unless both are known."""
        if not self.measured or not self.predicted:
            return ""
        error = self.measured / self.predicted - 1
        more = f"{abs(error):.1%} {'more' if error >= 0 else 'less'} than predicted"
        return f"{self.name} {self.text(self.measured)}, predicted {self.text(self.predicted)} ({more})"


def predicted_of(start: Mapping[str, Any], key: str) -> float | None:
    """A figure that the data of a `start` event predicts."""
    stated = start.get("predicted")
    value = stated.get(key) if isinstance(stated, Mapping) else None
    return float(value) if is_finite(value) else None


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
    memory, step = predicted_of(start, MEMORY), predicted_of(start, STEP)
    return [
        Compared("peak memory of a device", in_bytes, max(peaks, default=None), memory),
        # Every step needs as much; saves, evaluations and compilations between two records only add to it.
        Compared("memory of a step, by the least growth of the process", in_bytes, min(grown, default=None), memory),
        Compared("median step", duration, statistics.median(steps) if steps else None, step),
    ]
