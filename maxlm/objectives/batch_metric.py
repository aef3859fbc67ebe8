"""Metrics of a batch: figures of every update and of held-out text, computed from the model's output and without a gradient.

A metric is a class here or in another package, and a `Part` of the kind "metric"; the section `metrics` of a config chooses them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.base.errors import ConfigError, UserError
from maxlm.base.metric import Metric, records
from maxlm.config.choices import blamed
from maxlm.config.part import Part
from maxlm.config.schema import Config
from maxlm.kernels import TokenScores
from maxlm.models.decoder import Decoder, DecoderOutput, unembedding_scores
from maxlm.telemetry.observer import StepRecord

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


class BatchMetric(ABC):
    """Figures of a batch, by the names of `metrics`. It is made with its section, and with the settings that other parameters name."""

    metrics: ClassVar[tuple[Metric, ...]]

    def __init__(self, own: Any) -> None:
        self.own = own  # section of the part; None if it has none

    @abstractmethod
    def values(self, output: ModelOutput, batch: Any) -> Mapping[str, Array]:
        """Sums over the rows and tokens of `batch`, as its weights count them, and maxima where `metrics` says so. A mean is given as its
        sum; where its declaration has `per`, the sum that divides it is given by that name.
        """


class TokenAccuracy(BatchMetric):
    """Share of tokens that the model finds most likely, of all tokens that count in the loss."""

    metrics = (Metric("token_accuracy", "Tokens predicted right", "share of tokens", per="tokens_predicted"),)

    def values(self, output: ModelOutput, batch: Any) -> Mapping[str, Array]:
        """Weights of all tokens, and of those predicted right."""
        right_BS = output.scores(batch.targets_BS).is_greedy_BS
        return {"token_accuracy": jnp.sum(batch.weights_BS * right_BS), "tokens_predicted": jnp.sum(batch.weights_BS)}


def with_metrics(objective: type[Any], chosen: Sequence[tuple[Part, Any]]) -> type[Any]:
    """The class of an objective with the figures of `chosen`, parts with the metrics they have made.

    Raises UserError: one of them is no metric, or two figures have one name.
    """
    for one, made in chosen:
        if not isinstance(made, BatchMetric):
            raise UserError(f"{one.key}: {one.place} is no metric of a batch: derive it from maxlm.objectives.BatchMetric.")
        with blamed(one, "metrics"):
            if not all(isinstance(metric, Metric) for metric in made.metrics):
                raise TypeError("`metrics` must be a tuple of maxlm.base.metric.Metric")
    declared = [*objective.metrics, *(replace(metric, held_out=True) for _, made in chosen for metric in made.metrics)]
    names = Counter([*TAKEN.difference(metric.name for metric in objective.metrics), *(n for m in declared for n in (m.name, m.per) if n)])
    for one, made in chosen:
        if twice := [metric.name for metric in made.metrics if names[metric.name] > 1]:
            raise ConfigError(one.key, "set", f"it reports {twice[0]}, which is a figure of this run already", "remove it")

    class Measured(objective):
        """The objective, with figures in addition."""

        metrics = tuple(declared)

        def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Any]:
            """As the objective's own, with the figures."""
            total, sums = super().head(model, output, batch, summed)
            hidden_BSD, table_VD = jax.lax.stop_gradient((model.final_norm(output.x_BSD), model.unembedding_VD))
            found = dict[str, Array]()
            for one, made in chosen:
                found |= _values(one, made, ModelOutput(hidden_BSD, table_VD, self.config), batch)
            maxima = {metric.name for metric in self.metrics if metric.reduce == "max"}
            added = {name: value for name, value in found.items() if name not in maxima}
            largest = {name: value for name, value in found.items() if name in maxima}
            return total, sums._replace(added={**sums.added, **added}, largest={**sums.largest, **largest})

    return Measured


def _values(one: Part, made: BatchMetric, output: ModelOutput, batch: Any) -> dict[str, Array]:
    """Figures of one metric. Raises UserError: it fails, or its figures are not the figures that it declares."""
    with blamed(one, "values"):
        found = dict(made.values(output, batch))
    declared = {name for metric in made.metrics for name in (metric.name, metric.per) if name}
    for name in (*found, *declared):
        if name not in declared or name not in found:
            rule = "which it does not declare" if name in found else "of which it gives no value"
            raise UserError(f"{one.key}: values() reports {name!r}, {rule}; mend {one.place}.")
    return found


def whole_values(metrics: Iterable[Metric], sums: Any) -> dict[str, float]:
    """Figures by key of a record, from `Sums` on the host."""
    per, found = {"": sums.denominator, **sums.added}, dict[str, Any]()
    for metric in metrics:
        value = (sums.largest if metric.reduce == "max" else sums.added)[metric.name]
        found[metric.name] = value / np.maximum(per[metric.per], 1.0) if metric.reduce == "mean" else value
    return records(found)
