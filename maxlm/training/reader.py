"""Reading the figures of every update on the host, one step late: what records hold of them, alarms, and levels that a checkpoint keeps.

A section names its reader in `Capability.readers`. The meter builds all of them again where training goes back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from maxlm.base.metric import Metric
from maxlm.telemetry.observer import Event
from maxlm.training.step import Metrics


class Reader:
    """Reads `Metrics` on the host, in all processes alike. A hook that a subclass leaves out changes nothing."""

    metrics: tuple[Metric, ...] = ()  # figures that it adds to records
    level = ""  # entry of the levels of a checkpoint that holds `levels`; "": there is none

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "Reader | None":
        """The reader that a section asks for; None if it asks for none. Gets the section, and what the parameters of the subclass name:
        settings, and the `levels` of the checkpoint that training continues (`table.build`).
        """
        raise NotImplementedError

    @property
    def levels(self) -> Any:
        """State as JSON, so that the next update is read as it would be without a restart."""
        return None

    def update(self, step: int, metrics: Metrics) -> Iterable[Event]:
        """Take the figures of an update, before the other hooks are asked about it; return alarms."""
        return ()

    def overflow(self, metrics: Metrics) -> str:
        """Description of an overflow that is no fault of the run, since later updates mend it; "" if there is none."""
        return ""

    def fault(self, metrics: Metrics) -> str:
        """Description of a figure that is not finite; "" if all are finite."""
        return ""

    def must_record(self, metrics: Metrics) -> bool:
        """True if the update needs a record though its step is not logged."""
        return False

    def record(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Figures of a record, from the figures of its update."""
        return values

    def details(self) -> Mapping[str, Any]:
        """Fields of a `StepRecord` that only some records of a run hold, since they are large."""
        return {}
