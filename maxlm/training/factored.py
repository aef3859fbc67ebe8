"""Factored second moments (Adafactor, Shazeer and Stern 2018, arXiv 1804.04235): of a matrix its row and column means, whose product, over
the mean of the rows, stands for it. A stacked matrix is factored in each layer, and one of experts in each expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from maxlm.config.sections.optimizer import AdafactorConfig, OptimizerConfig
from maxlm.models.parameters import Parameters
from maxlm.models.stack import STACKED

Dims = tuple[int, ...]
Axes = tuple[str, ...]  # logical axes of a parameter
TINY = 1e-30  # added to squared gradients of Adafactor (its epsilon_1), and the smallest divisor


class Factored(NamedTuple):
    """Moving averages of squared gradients; each tree has only some of the parameters. Dims that are averaged over stay, with size 1."""

    rows: Parameters  # of matrices
    columns: Parameters
    whole: Parameters  # of all others


class FactoredAdamState(NamedTuple):
    updates: Int32[Array, ""]
    mu: Parameters
    nu: Factored


class AdafactorState(NamedTuple):
    updates: Int32[Array, ""]
    nu: Factored


def matrix_dims(names: Axes) -> tuple[Dims, Dims] | None:
    """The two groups of dims of a matrix: its width in the model and all others, without those along which matrices are stacked. None for a
    vector.
    """
    own = own_dims(names)
    if len(own) < 2 or not any(name in names for name in ("embed", "position", "rank")):
        return None
    width = names.index("embed") if "embed" in names else own[0]
    return (width,), tuple(dim for dim in own if dim != width)


def own_dims(names: Axes) -> Dims:
    """Dims of one matrix or vector, without those along which it is stacked."""
    return tuple(dim for dim, name in enumerate(names) if name not in ("expert", *STACKED))


def _init(axes: Parameters, params: Parameters) -> Factored:
    def mean_of(group: int, names: Axes, param: Array) -> Array | None:
        dims = matrix_dims(names)
        if dims is None:
            return None
        return jnp.zeros([1 if dim in dims[group] else size for dim, size in enumerate(param.shape)], jnp.float32)

    whole = _map(lambda names, param: jnp.zeros_like(param) if matrix_dims(names) is None else None, axes, params)
    return Factored(_map(lambda *of: mean_of(1, *of), axes, params), _map(lambda *of: mean_of(0, *of), axes, params), whole)


def _update(axes: Parameters, moment: Factored, squares: Parameters, decay: Any) -> Factored:
    def average(names: Axes, square: Array, old: Array | None, *, group: int | None) -> Array | None:
        if old is None:
            return None
        dims = matrix_dims(names)
        new = square if dims is None or group is None else jnp.mean(square, axis=dims[group], keepdims=True)
        return decay * old + (1 - decay) * new

    trees = zip(moment, (1, 0, None), strict=True)
    return Factored(*(_map(partial(average, group=group), axes, squares, old) for old, group in trees))


def _estimates(axes: Parameters, moment: Factored) -> Parameters:
    """The second moments, with the shape of the parameters up to broadcasting (equation 4, with means in place of sums)."""

    def estimate(names: Axes, row: Array | None, column: Array | None, whole: Array | None) -> Array:
        dims = matrix_dims(names)
        if dims is None or row is None or column is None:
            assert whole is not None, "a vector has all of it"
            return whole
        return row / jnp.maximum(jnp.mean(row, axis=dims[0], keepdims=True), TINY) * column

    return _map(estimate, axes, *moment)


def factored_adam(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    """Adam whose second moment is factored. `axes`: logical axes of every parameter."""

    def init(params: Parameters) -> FactoredAdamState:
        return FactoredAdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), _init(axes, params))

    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, FactoredAdamState]:
        count, (b1, b2) = state.updates + 1, (settings.beta1, settings.beta2)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = _update(axes, state.nu, jax.tree.map(jnp.square, grads), b2)
        first, second = (1 - jnp.float32(beta) ** count.astype(jnp.float32) for beta in (b1, b2))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + settings.eps), mu, _estimates(axes, nu))
        return updates, FactoredAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adafactor(settings: AdafactorConfig, axes: Parameters) -> optax.GradientTransformation:
    """Adafactor without a first moment (algorithm 4). The learning rate comes after it: of the paper's relative step, or absolute."""

    def init(params: Parameters) -> AdafactorState:
        return AdafactorState(jnp.zeros((), jnp.int32), _init(axes, params))

    def direction(names: Axes, grad: Array, moment: Array, param: Array) -> Array:
        update = grad * jax.lax.rsqrt(jnp.maximum(moment, TINY))
        if settings.clip is not None:
            update /= jnp.maximum(1.0, _rms(names, update) / settings.clip)
        return update * relative_scale(settings, names, param) if settings.relative else update

    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, AdafactorState]:
        count = state.updates + 1
        decay = 1 - count.astype(jnp.float32) ** -settings.decay
        nu = _update(axes, state.nu, jax.tree.map(lambda g: jnp.square(g) + TINY, grads), decay)
        return _map(direction, axes, grads, _estimates(axes, nu), params), AdafactorState(count, nu)

    return optax.GradientTransformation(init, update)


def relative_scale(settings: AdafactorConfig, names: Axes, param: Array) -> Float[Array, "..."]:
    """Factor of the learning rate, of an update and of decay: the root mean square of each stacked matrix or vector, or `least_scale`."""
    return jnp.maximum(_rms(names, param), settings.least_scale)


def _rms(names: Axes, x: Array) -> Float[Array, "..."]:
    """Root mean square of each stacked matrix or vector."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=own_dims(names), keepdims=True))


def _map(function: Callable[..., Any], axes: Parameters, *trees: Any) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter; None where a tree has none."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))
