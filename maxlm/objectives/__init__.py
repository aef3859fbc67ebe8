"""Training objectives. A new objective is a module here, and its record in `maxlm/config/parts/objectives.py` with its section."""

from maxlm.config.capability import load
from maxlm.config.choices import blamed, implementation, part, parts
from maxlm.config.schema import Config
from maxlm.config.table import build_part
from maxlm.objectives.batch_metric import BatchMetric, ModelOutput, with_metrics
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import ArraySpec, NextToken, Objective, Sums
from maxlm.objectives.preferences import LogProbabilities, Preferences, with_reference
from maxlm.objectives.supervised import Supervised


def build_objective(config: Config) -> Objective:
    """The objective that `config` names; next-token prediction if it names none, of tokens further ahead with `model.mtp`."""
    kind = "next_token" if config.objective is None else config.objective.kind
    found = part("objective", kind)
    made: type[Objective] = implementation(found)
    with blamed(found, f"place {found.place}", made):
        made = made if config.model.mtp is None else load(found.facts.further)
        metrics = [(one, build_part(config, "metric", one.name)) for one in parts("metric") if one.chosen(config)]
        return (with_metrics(made, metrics) if metrics else made)(config)


__all__ = [
    "ArraySpec",
    "BatchMetric",
    "FurtherTokens",
    "LogProbabilities",
    "ModelOutput",
    "NextToken",
    "Objective",
    "Preferences",
    "Sums",
    "Supervised",
    "build_objective",
    "with_reference",
]
