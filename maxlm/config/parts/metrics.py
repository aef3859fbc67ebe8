"""The metrics of a batch."""

from maxlm.config.part import Part
from maxlm.config.sections.metrics import TokenAccuracyConfig

PARTS = (
    Part(
        kind="metric",
        name="token_accuracy",
        place="maxlm.objectives.batch_metric:TokenAccuracy",
        section=TokenAccuracyConfig,
        about="Share of tokens that the model finds most likely; it computes the logits once more.",
    ),
)
