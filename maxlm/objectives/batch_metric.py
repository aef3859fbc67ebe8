"""Metrics of a batch: figures of every update and of held-out text, computed from the model's output and without a gradient.

A metric is a class here or in another package, and a `Part` of the kind "metric"; `train.metrics` names the metrics of a run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.base.errors import ConfigError, UserError
from maxlm.base.metric import Metric, records
from maxlm.config.choices import part
from maxlm.config.schema import Config
from maxlm.config.table import blamed, build_part
from maxlm.kernels import TokenScores
from maxlm.models.decoder import Decoder, DecoderOutput, unembedding_scores
from maxlm.telemetry.observer import StepRecord

FIELD = "train.metrics"
TAKEN = {*(item.name for item in fields(StepRecord)), "skipped", "batch_digest"}  # figures of every record


class ModelOutput(NamedTuple):
    """Output of the decoder for a batch, or for one device's rows of it. B batch, S sequence, D model width, V vocabulary."""

    hidden_BSD: Float[Array, "B S D"]  # after the final norm
    unembedding_VD: Float[Array, "V D"]
    config: Config

    def scores(self, targets_BS: Int[Array, "B S"]) -> TokenScores:
        """Negative log-likelihood of every target, and whether no other token is more likely; all logits never exist at once."""
        options = {"chunks": self.config.train.loss_chunks, "softcap": self.config.model.logits_softcap}
        return unembedding_scores(self.config.precision, self.hidden_BSD, self.unembedding_VD, targets_BS, **options)


class BatchMetric:
    """Figures of a batch, by the names of `metrics`. It is made with its section, and with the settings that other parameters name."""

    metrics: ClassVar[tuple[Metric, ...]]

    def __init__(self, own: Any) -> None:
        self.own = own  # section of the part; None if it has none

    def values(self, output: ModelOutput, batch: Any) -> Mapping[str, Array]:
        """Sums over the rows and tokens of `batch`, as its weights count them, and maxima where `metrics` says so. A mean is given as its
        sum; where its declaration has `per`, the sum that divides it is given by that name.
        """
        raise NotImplementedError


class TokenAccuracy(BatchMetric):
    """Share of tokens that the model finds most likely, of all tokens that count in the loss."""

    metrics = (Metric("token_accuracy", "Tokens predicted right", "share of tokens", per="tokens_predicted"),)

    def values(self, output: ModelOutput, batch: Any) -> Mapping[str, Array]:
        """Weights of all tokens, and of those predicted right."""
        right_BS = output.scores(batch.targets_BS).is_greedy_BS
        return {"token_accuracy": jnp.sum(batch.weights_BS * right_BS), "tokens_predicted": jnp.sum(batch.weights_BS)}


class BatchMetrics:
    """The metrics that `train.metrics` names."""

    def __init__(self, config: Config, others: Iterable[Metric]) -> None:
        """`others`: metrics that the run has besides. Raises UserError: two metrics have one name, or one of them cannot be made."""
        self._parts = [(part("metric", name), build_part(config, "metric", name)) for name in config.train.metrics]
        for one, made in self._parts:
            if not isinstance(made, BatchMetric):
                raise UserError(f"{one.key}: {one.place} is no metric of a batch: derive it from maxlm.objectives.BatchMetric.")
            with blamed(one, "metrics"):
                if not all(isinstance(metric, Metric) for metric in made.metrics):
                    raise TypeError("`metrics` must be a tuple of maxlm.base.metric.Metric")
        self.metrics: tuple[Metric, ...] = tuple(metric for _, made in self._parts for metric in made.metrics)
        self.declared = (*others, *self.metrics)
        names = Counter([*(name for metric in self.declared for name in (metric.name, metric.per) if name), *TAKEN])
        for one, made in self._parts:
            if twice := [metric.name for metric in made.metrics if names[metric.name] > 1]:
                rule = f"{one.name} reports {twice[0]}, which is a figure of this run already"
                raise ConfigError(FIELD, list(config.train.metrics), rule, f"remove {one.name}")

    def values(self, output: ModelOutput, batch: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        """(sums, maxima) of a batch, by name. Raises UserError: a metric fails, or reports a figure that it does not declare."""
        added, largest = dict[str, Array](), dict[str, Array]()
        for one, made in self._parts:
            with blamed(one, "values"):
                found = dict(made.values(output, batch))
            maxima = {metric.name for metric in made.metrics if metric.reduce == "max"}
            declared = {name for metric in made.metrics for name in (metric.name, metric.per)}
            if wrong := [name for name in (*found, *(metric.name for metric in made.metrics)) if name not in declared or name not in found]:
                rule = "which it does not declare" if wrong[0] in found else "but gives no value of it"
                raise UserError(f"{one.key}: values() reports {wrong[0]!r}, {rule}; mend {one.place}.")
            added |= {name: value for name, value in found.items() if name not in maxima}
            largest |= {name: value for name, value in found.items() if name in maxima}
        return added, largest


def head_with_metrics(
    objective: Any, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]
) -> tuple[Float[Array, ""], Any]:
    """`Objective.head`, with the figures of `train.metrics` among its `Sums`."""
    total, sums = objective.head(model, output, batch, summed)
    if not objective.measured.metrics:
        return total, sums
    hidden_BSD, table_VD = jax.lax.stop_gradient((model.final_norm(output.x_BSD), model.unembedding_VD))
    added, largest = objective.measured.values(ModelOutput(hidden_BSD, table_VD, objective.config), batch)
    return total, sums._replace(added={**sums.added, **added}, largest={**sums.largest, **largest})


def whole_values(metrics: Iterable[Metric], parts: Iterable[Any]) -> dict[str, float]:
    """Figures of several batches together, by key of a record, from `Sums` on the host."""
    parts, found = list(parts), dict[str, Any]()
    added = {name: sum(np.asarray(part.added[name], np.float64) for part in parts) for name in (parts[0].added if parts else ())}
    per = {"": sum(float(part.denominator) for part in parts), **added}
    for metric in metrics:
        if metric.reduce == "max":
            found[metric.name] = np.max([part.largest[metric.name] for part in parts], axis=0) if parts else np.nan
        else:
            found[metric.name] = added.get(metric.name, 0.0) / (np.maximum(per[metric.per], 1.0) if metric.reduce == "mean" else 1.0)
    return records(found)
