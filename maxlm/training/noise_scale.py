"""Gradient noise scale (McCandlish 2018, arXiv 1812.06162, appendix A.1): the batch, in tokens, beyond which larger ones pay ever less.

The norm of the gradient is compared between parts of a batch and the whole of it: a part of n tokens has |G|^2 + S / n in the mean, where
G is the true gradient and S the trace of the covariance of one token's. The scale is S / |G|^2. Both are averaged over updates before
they are divided, since an estimate from one update is noise. Parts are microbatches, and of gradients that are reduced once an update the
microbatches of each device: their gradients are computed anyway; only their norms are added.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.config.sections.noise_scale import NoiseScaleConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.training.reader import Reader
from maxlm.training.step import GradFn, Metrics
from maxlm.training.transform import Transform

NOISE_SCALE = Metric("noise_scale", "Gradient noise scale", "tokens")
# Of the parts of a batch: how many have tokens, and the sum of their squared norms, each times its share of the tokens.
PARTS, SQUARES = "gradient_parts", "gradient_squares"
PART_METRICS = (Metric(PARTS, "", reduce="sum"), Metric(SQUARES, "", reduce="sum"))
LEVELS = "gradient_noise"  # entry of the levels of a checkpoint


def with_part_norms(grad_fn: GradFn) -> GradFn:
    """`grad_fn` of a part of a batch, with the figures that the noise scale needs."""

    def gradients(params: Parameters, model_state: Parameters, batch: Any, denominator: Float[Array, ""]) -> tuple[Sums, Parameters]:
        sums, grads = grad_fn(params, model_state, batch, denominator)
        share = sums.denominator / denominator
        # `grads` are the gradient of the part's own mean loss times its share.
        square = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads))
        found = {PARTS: jnp.where(share > 0, 1.0, 0.0), SQUARES: jnp.where(share > 0, square / jnp.maximum(share, 1e-30), 0.0)}
        return sums._replace(added={**sums.added, **found}), grads

    return gradients


class PartNorms(Transform):
    """Declare the figures of `with_part_norms`, from which the host computes the scale."""

    name, phase, metrics = "noise_scale", "measure", PART_METRICS
    recorded = ()

    @classmethod
    def from_config(cls, settings: NoiseScaleConfig) -> Self:
        return cls()


class NoiseScale(Reader):
    """Averages over the updates of a run, on the host."""

    metrics, level = (NOISE_SCALE,), LEVELS

    def __init__(self, settings: NoiseScaleConfig, levels: Sequence[float] = ()) -> None:
        """`levels`: of the checkpoint that training continues."""
        self._kept = 1 - 1 / settings.updates
        self._trace, self._square = levels or (0.0, 0.0)

    @classmethod
    def from_config(cls, settings: NoiseScaleConfig, levels: Mapping[str, Any]) -> Self:
        """The reader of the section `train.noise_scale`."""
        return cls(settings, levels.get(LEVELS, ()))

    @property
    def levels(self) -> list[float]:
        """Averages of S and of |G|^2 so far, both times the same factor."""
        return [self._trace, self._square]

    def update(self, step: int, metrics: Metrics) -> tuple[()]:
        """Add an update. One of a single part, or that is not finite, tells nothing."""
        values = metrics.values
        parts, squares, whole = (float(values[name]) for name in (PARTS, SQUARES, "grad_norm"))
        trace, square = estimates(parts, squares, whole**2, float(values["tokens"])) if parts > 1 else (float("nan"),) * 2
        if abs(trace) + abs(square) < float("inf"):
            self._trace = self._kept * self._trace + (1 - self._kept) * trace
            self._square = self._kept * self._square + (1 - self._kept) * square
        return ()

    def record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the figures of the parts by the scale."""
        return {name: value for name, value in values.items() if name not in (PARTS, SQUARES)} | self.figures

    @property
    def figures(self) -> dict[str, float]:
        """The scale, in tokens; nothing while the noise hides the gradient."""
        return {NOISE_SCALE.name: self._trace / self._square} if self._square > 0 and self._trace > 0 else {}


def estimates(parts: float, squares: float, whole: float, tokens: float) -> tuple[float, float]:
    """Estimates of (S, |G|^2) without bias. `whole`: squared norm of the gradient of the batch of `tokens` tokens; others as in `PARTS`.

    With part m of n_m tokens, weights w_m = n_m / N: E sum w_m |g_m|^2 = |G|^2 + parts * S / N, and E |g|^2 = |G|^2 + S / N.
    """
    return (squares - whole) * tokens / (parts - 1), (parts * whole - squares) / (parts - 1)
