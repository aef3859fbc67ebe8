"""Figures of a batch while they are reduced over microbatches, devices and workers."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.models import Routing
from maxlm.telemetry.metric import Metric


class Sums(NamedTuple):
    """Figures of a part of a batch, float32, by the names of their declarations. `added` holds sums, of means as well; `largest` maxima."""

    denominator: Float[Array, ""]  # of means: tokens that count, or as the objective says
    added: dict[str, Array]
    largest: dict[str, Array]
    routing: Routing | None = None  # of layers with experts

    def plus(self, other: "Sums") -> "Sums":
        """Of both parts together."""
        sums = jax.tree.map(jnp.add, self._additive(), other._additive())
        return sums._replace(largest=jax.tree.map(jnp.maximum, self.largest, other.largest))

    def over_devices(self, axes: tuple[str, ...]) -> "Sums":
        """Of all devices along the mesh `axes`, inside a `jax.shard_map`."""
        return jax.lax.psum(self._additive(), axes)._replace(largest=jax.lax.pmax(self.largest, axes))

    def over_leading_dim(self) -> "Sums":
        """Of all parts that are stacked along a leading dim."""
        sums = jax.tree.map(lambda a: jnp.sum(a, 0), self._additive())
        return sums._replace(largest=jax.tree.map(lambda a: jnp.max(a, 0), self.largest))

    def empty(self) -> "Sums":
        """Of no part at all, with shapes and dtypes as here."""
        sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._additive())
        return sums._replace(largest=jax.tree.map(lambda a: jnp.full(a.shape, -jnp.inf, a.dtype), self.largest))

    def values(self, metrics: Iterable[Metric]) -> dict[str, Array]:
        """The figures of the whole batch: means are divided by `denominator`."""
        found = {**self.added, **self.largest}
        denominator = jnp.maximum(self.denominator, 1)
        return {m.name: found[m.name] / denominator if m.reduce == "mean" else found[m.name] for m in metrics if m.name in found}

    def _additive(self) -> "Sums":
        return self._replace(largest={})
