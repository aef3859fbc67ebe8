"""Traces of a few steps of the run (docs/how-to/profile.md)."""

import itertools
from typing import Annotated

from pydantic import Field, Strict, model_validator

from maxlm.base import paths
from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Positive, Section


class ProfileConfig(Section):
    """Traces of a few steps of the run, each reduced to a page in `profile/` of its folder (docs/how-to/profile.md)."""

    at: Annotated[tuple[Positive, ...], Field(min_length=1)] = (100,)
    """Updates that are done before the first step of each trace, in increasing order. Unit: updates."""
    steps: Annotated[int, Strict(), Field(ge=1, le=100)] = 3
    """Length of each trace. Unit: steps."""

    @model_validator(mode="after")
    def _apart(self) -> "ProfileConfig":
        if any(later - earlier <= self.steps for earlier, later in itertools.pairwise(self.at)):
            paths.refuse(
                f"name steps in increasing order, more than {self.steps} (steps of a trace) apart", "change `at`, or lower `steps`"
            )
        return self


def _problems(settings: ProfileConfig, total_steps: int) -> Problems:
    if settings.at[-1] + settings.steps >= total_steps:
        rule = f"with {settings.steps} steps a trace must end before the run does, at step {total_steps}"
        yield "run.profile.at", list(settings.at), rule, "trace earlier steps, or fewer"


CAPABILITY = Capability(key="run.profile", rules=(_problems,))
