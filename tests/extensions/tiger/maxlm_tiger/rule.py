"""The update rule."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from maxlm.models import Parameters
from maxlm.training.update_rule import UpdateRule
from maxlm_tiger import TigerConfig


class TigerState(NamedTuple):
    """Updates so far, and the average of gradients under the name that `optimizer.state.moments` stores in fewer bytes."""

    updates: Int32[Array, ""]
    mu: Parameters


class Tiger(UpdateRule):
    """sign(m), m <- b m + (1 - b) g."""

    own: TigerConfig

    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        momentum = self.own.momentum

        def init(params: Parameters) -> TigerState:
            return TigerState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

        def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, TigerState]:
            mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, grads)
            return jax.tree.map(jnp.sign, mu), TigerState(state.updates + 1, mu)

        return optax.GradientTransformation(init, update)
