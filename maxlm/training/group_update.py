"""The optimizer of a few parameters at a time, by the arithmetic of the plain step: only what belongs to them has to be on the device.

A refused update (not finite, or a spike) gives back what it was given.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import Config
from maxlm.models import parameter_axes
from maxlm.training.ema import EMA, kept_share
from maxlm.training.optimizer import build_optimizer
from maxlm.training.split_masters import RESIDUAL, join, stored
from maxlm.training.state_paths import Leaves, Name, flat_params, keys_of, nested


class Group(NamedTuple):
    """Parameters that are updated together: equal layers, or all that are in none. `leaves`: paths of all that belongs to them in a state.

    One call of the optimizer sees several matrices, as in the plain step: XLA divides by a number that one array uses in another way.
    """

    names: tuple[Name, ...]
    leaves: tuple[Name, ...]
    pieces: int


class Scalars(NamedTuple):
    """Inputs that all parameters share. `clip`: factor of the gradient, or None."""

    good: Bool[Array, ""]
    clip: Float[Array, ""] | None
    step: Array
    skipped: Array


class GroupUpdate:
    """The optimizer of some parameters: (their leaves, their gradients, first row of the piece) -> their leaves updated."""

    def __init__(self, config: Config, group: Group, leaves: Mapping[Name, Any], scalars: Scalars) -> None:
        self._config, self._group, self._leaves, self._scalars = config, group, leaves, scalars
        axes = flat_params(parameter_axes(config.model))
        self._axes = nested({name: axes[name] for name in group.names})
        self.shared: Leaves = {}  # new values of the leaves that belong to no parameter: counters, equal for all

    def __call__(self, changed: Sequence[jax.Array], read: Sequence[jax.Array], first_row: Array | int) -> list[jax.Array]:
        own, names = dict(zip(self._group.leaves, changed, strict=True)), self._group.names
        optimizer = build_optimizer(self._config, self._axes, first_row)
        params = nested({name: join(own["params", *name], own.get(("updater", RESIDUAL, *name))) for name in names})
        grads = nested({name: self._clipped(gradient) for name, gradient in zip(names, read, strict=True)})
        shape = jax.eval_shape(optimizer.init, params)
        paths = [("opt_state", *keys_of(path)) for path, _ in jax.tree_util.tree_flatten_with_path(shape)[0]]
        old = {path: self._leaves[path] for path in paths if path not in own} | own
        before = jax.tree.unflatten(jax.tree.structure(shape), [old[path] for path in paths])
        updates, after = optimizer.update(grads, before, params)
        new = dict(zip(paths, jax.tree.leaves(after), strict=True))
        new |= self._parameters(own, flat_params(optax.apply_updates(params, updates)), first_row)
        chosen = {path: jnp.where(self._scalars.good, new[path], leaf) for path, leaf in old.items()}
        self.shared = {path: leaf for path, leaf in chosen.items() if path not in own}
        return [chosen[path] for path in self._group.leaves]

    def _clipped(self, gradient: jax.Array) -> jax.Array:
        gradient = gradient.astype(jnp.float32)
        return gradient if self._scalars.clip is None else gradient * self._scalars.clip

    def _parameters(self, own: Leaves, masters: Leaves, first_row: Array | int) -> Leaves:
        """The leaves of new parameters as the state holds them, and of their averages."""
        found: Leaves = {}
        for name, master in masters.items():
            residual = own.get(("updater", RESIDUAL, *name))
            found["params", *name] = master
            if residual is not None:
                parts = stored(self._config, name, master, self._scalars.step, first_row)
                found |= dict(zip((("params", *name), ("updater", RESIDUAL, *name)), parts, strict=True))
            if self._config.ema is not None:
                kept = kept_share(self._config.ema, self._scalars.step - self._scalars.skipped)
                found["updater", EMA, *name] = kept * own["updater", EMA, *name] + (1 - kept) * master
        return found
