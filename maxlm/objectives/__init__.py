"""Training objectives. A new objective is a module here, its row in the table, and its name in `objective.kind`."""

from maxlm.config.schema import Config
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import ArraySpec, NextToken, Objective, Sums

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextToken,
}


def build_objective(config: Config) -> Objective:
    """The objective that `config` names; next-token prediction if it names none, of tokens further ahead with `model.mtp`."""
    kind = OBJECTIVES[config.objective.kind if config.objective is not None else "next_token"]
    return (FurtherTokens if kind is NextToken and config.model.mtp is not None else kind)(config)


__all__ = ["OBJECTIVES", "ArraySpec", "FurtherTokens", "NextToken", "Objective", "Sums", "build_objective"]
