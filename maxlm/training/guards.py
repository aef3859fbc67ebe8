"""Guards against values that are not finite: such an update is skipped, such a state is not saved."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.training.state import TrainState


def keep_if_finite(state: TrainState, proposed: TrainState, loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> TrainState:
    """`proposed` if loss and gradient norm are finite; else `state` with the batch counted as consumed and skipped.

    The norm is a reduction over every gradient, so all devices agree.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    chosen = jax.tree.map(lambda new, old: jnp.where(finite, new, old), proposed, state)
    return replace(chosen, step=state.step + 1, skipped=state.skipped + jnp.where(finite, 0, 1))


def not_finite(state: TrainState, mesh: Mesh) -> list[str]:
    """Names of the leaves that hold an infinity or a NaN. Waits for the devices and reads all of it: for saves, not for steps."""
    leaves = {name: leaf for name, leaf in named_leaves(state).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    finite = jax.device_get(_compiled(NamedSharding(mesh, PartitionSpec()))(tuple(leaves.values())))
    return [name for name, whole in zip(leaves, finite, strict=True) if not whole]


@functools.cache
def _compiled(everywhere: NamedSharding) -> Any:
    return jax.jit(lambda leaves: tuple(_finite(leaf) for leaf in leaves), out_shardings=everywhere)


def _finite(array: Array) -> Bool[Array, ""]:
    return jnp.all(jnp.isfinite(array))
