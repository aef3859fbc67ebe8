"""Label smoothing (Szegedy 2015, arXiv 1512.00567, section 7): the target is 1 - e times the next token and e times a uniform one.

objective: {kind: label_smoothing, smoothing: 0.1}
"""

from typing import Annotated

from pydantic import Field

import maxlm
from maxlm.config.capability import Problems
from maxlm.config.fields import Float, Section
from maxlm.config.part import Part


class LabelSmoothingConfig(Section):
    """Next-token prediction with smoothed labels."""

    smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    """Share of the target that is uniform over the vocabulary. Unit: share."""


def _problems(own: LabelSmoothingConfig, model_logits_softcap: float | None) -> Problems:
    if model_logits_softcap is not None:
        yield "model.softcap.logits", model_logits_softcap, "is not known to objective.kind = label_smoothing", "remove it"


maxlm.register(
    Part(
        kind="objective",
        name="label_smoothing",
        place="maxlm_label_smoothing.loss:LabelSmoothing",
        about="Next-token prediction with smoothed labels (arXiv 1512.00567).",
        section=LabelSmoothingConfig,
        rules=(_problems,),
        identity=lambda own: {"objective.smoothing": own.smoothing},
    )
)
