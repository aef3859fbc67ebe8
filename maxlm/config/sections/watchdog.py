"""Seconds without progress after which a run counts as hung."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability
from maxlm.config.fields import AtLeastOne, Bool, Float, PositiveFloat, Section


class WatchdogConfig(Section):
    """Seconds without progress after which a run counts as hung: it shows where, ends with 5, and `maxlm launch` starts it again.

    Time in which the process did not run counts for nothing. None: learned from the run (docs/watchdog.md).
    """

    enabled: Bool = True  # false: a hang is not found
    step_seconds: PositiveFloat | None = None  # at least, for a step
    step_factor: AtLeastOne = 20.0  # or so many times the 99th percentile of step times, if that is longer
    data_seconds: PositiveFloat | None = None  # for a batch
    save_seconds: PositiveFloat | None = None  # for a save, also in the background
    eval_seconds: PositiveFloat | None = None  # between two batches of an evaluation
    startup_seconds: PositiveFloat = 7200.0  # compilation, up to the end of the first step; a restore at most
    interpreter_seconds: PositiveFloat = 300.0  # in which no Python thread runs, because C code holds the interpreter's lock
    slow_share: Annotated[Float, Field(gt=0, lt=1)] = 0.2  # of a step's time by which a host that is named as slow is behind the others


CAPABILITY = Capability(key="watchdog")
