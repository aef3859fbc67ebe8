"""Tasks that are run on the training mesh."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability
from maxlm.config.fields import Positive, Section, Text


class EvaluationConfig(Section):
    """Tasks that are run on the training mesh: likelihoods with the weights where they lie, generation with a copy of them."""

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Task files, or names under configs/tasks/."""
    every: Positive | None = None
    """Updates between two evaluations; null: one at the end. Unit: updates."""


CAPABILITY = Capability(key="evaluation")
