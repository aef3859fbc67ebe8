"""The objectives: contents of a batch, and the loss."""

from maxlm.config.part import ObjectiveFacts, Part
from maxlm.config.sections.objective import DpoConfig, NextTokenConfig, SftConfig

PARTS = (
    Part(
        kind="objective",
        name="next_token",
        place="maxlm.objectives.objective:NextToken",
        section=NextTokenConfig,
        about="Next-token prediction.",
        facts=ObjectiveFacts(further="maxlm.objectives.further_tokens:FurtherTokens"),
    ),
    Part(
        kind="objective",
        name="sft",
        place="maxlm.objectives.supervised:Supervised",
        section=SftConfig,
        about="Supervised fine-tuning: next-token prediction of responses only.",
        facts=ObjectiveFacts("conversations", further="maxlm.objectives.supervised:SupervisedFurther"),
    ),
    Part(
        kind="objective",
        name="dpo",
        place="maxlm.objectives.preferences:Preferences",
        section=DpoConfig,
        about="Direct preference optimization (arXiv 2305.18290).",
        facts=ObjectiveFacts("preferences", reference=True),
    ),
)
