"""Training objectives. A new objective is a module here, and its record in `maxlm/config/parts/objectives.py` with its section."""

from maxlm.config.capability import load
from maxlm.config.choices import blamed, implementation, part
from maxlm.config.schema import Config
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import ArraySpec, NextToken, Objective, Sums
from maxlm.objectives.preferences import LogProbabilities, Preferences, with_reference
from maxlm.objectives.supervised import Supervised


def build_objective(config: Config) -> Objective:
    """The objective that `config` names; next-token prediction if it names none, of tokens further ahead with `model.mtp`."""
    kind = "next_token" if config.objective is None else config.objective.kind
    found = part("objective", kind)
    with blamed(found, f"place {found.place}"):
        built: Objective = (implementation(found) if config.model.mtp is None else load(found.facts.further))(config)
        return built


__all__ = [
    "ArraySpec",
    "FurtherTokens",
    "LogProbabilities",
    "NextToken",
    "Objective",
    "Preferences",
    "Sums",
    "Supervised",
    "build_objective",
    "with_reference",
]
