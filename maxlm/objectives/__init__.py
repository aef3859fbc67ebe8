"""Training objectives. A new objective is a module here, its rows in the tables, and its section in `config.schema.ObjectiveConfig`."""

from maxlm.config.schema import Config
from maxlm.data.marks import Content
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import ArraySpec, NextToken, Objective, Sums
from maxlm.objectives.preferences import LogProbabilities, Preferences, with_reference
from maxlm.objectives.supervised import Supervised, SupervisedFurther

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextToken,
    "sft": Supervised,
    "dpo": Preferences,
}
CONTENT: dict[str, Content] = {"next_token": "text", "sft": "conversations", "dpo": "preferences"}  # of the stores that it reads
FURTHER: dict[type[Objective], type[Objective]] = {NextToken: FurtherTokens, Supervised: SupervisedFurther}  # with `model.mtp`


def build_objective(config: Config) -> Objective:
    """The objective that `config` names; next-token prediction if it names none, of tokens further ahead with `model.mtp`."""
    kind = OBJECTIVES[kind_of(config)]
    return (FURTHER[kind] if config.model.mtp is not None else kind)(config)


def kind_of(config: Config) -> str:
    """Name of the objective."""
    return "next_token" if config.objective is None else config.objective.kind


__all__ = [
    "CONTENT",
    "OBJECTIVES",
    "ArraySpec",
    "FurtherTokens",
    "LogProbabilities",
    "NextToken",
    "Objective",
    "Preferences",
    "Sums",
    "Supervised",
    "build_objective",
    "kind_of",
    "with_reference",
]
