"""Memory and time of a step that were predicted before the first one, beside those of the run.

The event `start` holds them as `predicted`: `memory_bytes` that the compiled step needs on a device, by the compiler.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlm.hardware.host import in_bytes
from maxlm.telemetry.device_memory import PEAK
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import is_number, read_objects

MEMORY = "memory_bytes"  # key of `predicted`


class Compared(NamedTuple):
    """A figure of a run; `measured` and `predicted` in the same unit, None where unknown."""

    name: str
    measured: float | None
    predicted: float | None

    def sentence(self) -> str:
        """Such as "peak memory 12.3 GiB, predicted 12.0 GiB (2.5% more than predicted)"; "" unless both are known."""
        if not self.measured or not self.predicted:
            return ""
        error = self.measured / self.predicted - 1
        return f"{self.name} {in_bytes(int(self.measured))}, predicted {in_bytes(int(self.predicted))} ({_difference(error)})"


def _difference(error: float) -> str:
    return f"{abs(error):.1%} {'more' if error >= 0 else 'less'} than predicted"


def predicted_of(start: Mapping[str, Any], key: str) -> float | None:
    """A figure that the data of a `start` event predicts."""
    stated = start.get("predicted")
    value = stated.get(key) if isinstance(stated, Mapping) else None
    return float(value) if is_number(value) else None


def read_compared(run: RunDirectory) -> list[Compared]:
    """Figures of the newest attempt of a run. Raises OSError."""
    starts = [item for item in read_objects(run.events) if item.get("kind") == "start"]
    if not starts:
        return []
    since = starts[-1].get("step", 0)
    records = [item for item in read_objects(run.metrics) if is_number(item.get("step")) and item["step"] > since]
    peak = max((item[PEAK] for item in records if is_number(item.get(PEAK))), default=None)
    return [Compared("peak memory of a device", peak, predicted_of(starts[-1], MEMORY))]
