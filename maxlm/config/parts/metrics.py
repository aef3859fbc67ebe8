"""Metrics of a batch, in addition to those of its objective."""

from maxlm.config.part import Part

PARTS = (
    Part(
        kind="metric",
        name="token_accuracy",
        place="maxlm.objectives.batch_metric:TokenAccuracy",
        about="Share of tokens that the model finds most likely; it computes the logits once more.",
    ),
)
