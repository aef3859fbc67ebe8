"""Seconds without progress after which a run counts as hung."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability
from maxlm.config.fields import AtLeastOne, Bool, Float, PositiveFloat, Section


class WatchdogConfig(Section):
    """Seconds without progress after which a run counts as hung: it shows where, ends with 5, and `maxlm launch` starts it again.

    Time in which the process did not run counts for nothing. None: learned from the run (docs/explanation/watchdog.md).
    """

    enabled: Bool = True
    """Watch for hangs; false: a hang is not noticed."""
    step_seconds: PositiveFloat | None = None
    """Least limit for the time of a step; null: learned from the steps of the run. Unit: seconds."""
    step_factor: AtLeastOne = 20.0
    """Limit for the time of a step as a multiple of the 99th percentile of step times, where that is longer than `step_seconds`. Unit:
    factor.
    """
    data_seconds: PositiveFloat | None = None
    """Limit for the wait for a batch; null: learned from the run. Unit: seconds."""
    save_seconds: PositiveFloat | None = None
    """Limit for a save of a checkpoint, also one in the background; null: learned from the run. Unit: seconds."""
    eval_seconds: PositiveFloat | None = None
    """Limit for the time between two batches of an evaluation; null: learned from the run. Unit: seconds."""
    startup_seconds: PositiveFloat = 7200.0
    """Limit for the start, with compilation, up to the end of the first step; also the largest limit for a restore. Unit: seconds."""
    interpreter_seconds: PositiveFloat = 300.0
    """Limit for the time in which no Python thread runs because C code holds the interpreter's lock. Unit: seconds."""
    slow_share: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """Share of a step's time by which a host must be behind the others to be named as slow. Unit: share."""


CAPABILITY = Capability(key="watchdog")
