"""Training objectives. A new objective is a module here, its row in the table, and its name in `objective.kind`."""

from maxlm.config.schema import Config
from maxlm.objectives.next_token import NextToken
from maxlm.objectives.objective import ArraySpec, Inputs, Objective, Sums

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextToken,
}


def build_objective(config: Config) -> Objective:
    """The objective that `config` names; next-token prediction if it names none."""
    return OBJECTIVES[config.objective.kind if config.objective is not None else "next_token"](config)


__all__ = ["OBJECTIVES", "ArraySpec", "Inputs", "Objective", "Sums", "build_objective"]
