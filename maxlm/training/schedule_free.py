"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1): an average of the iterates in place of a decaying rate.

Three points: z takes the steps of AdamW without a first moment, x is the mean of all z, and gradients are of y = (1 - beta1) z + beta1 x.
The parameters of a run are y; z is state, and x follows from both. x is what is evaluated, exported and read by other runs.

The correction of v for its first updates divides v, as in optax, and does not change the weights of z.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32

from maxlm.config.sections.model import ModelConfig
from maxlm.models import parameter_specs
from maxlm.models.parameters import Parameters
from maxlm.training.stored_form import StoredForm

Z = "z"  # name of the point in the state
ROOT = ("opt_state", "2", Z)  # path of z in a training state: the last part of the chain of `build_optimizer`


class ScheduleFreeState(NamedTuple):
    """`rate`: the last one. `weight`: the sum of the squares of all rates so far, as a multiple of the square of the last one; with
    constant rates it grows by 1 an update, which float32 holds exactly.
    """

    updates: Int32[Array, ""]
    rate: Float[Array, ""]
    weight: Float[Array, ""]
    z: Parameters


def at_rate_and_averaged(rate: optax.Schedule, beta1: float) -> optax.GradientTransformation:
    """Move z against the given direction at the learning rate, and y with it and the average, in which z weighs the square of its rate.

    x is not computed: y' - y = c (z - y) + (1 - beta1 (1 - c)) (z' - z), where c is the weight of z' in the mean.
    """

    def init(params: Parameters) -> ScheduleFreeState:
        zero = jnp.zeros((), jnp.float32)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, zero, params)

    def update(directions: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, ScheduleFreeState]:
        lr = jnp.asarray(rate(state.updates), jnp.float32)
        weight = state.weight * jnp.square(state.rate / lr) + 1
        c = 1 / weight
        steps = jax.tree.map(lambda direction: -lr * direction, directions)
        updates = jax.tree.map(lambda step, z, y: c * (z - y) + (1 - beta1 * (1 - c)) * step, steps, state.z, params)
        return updates, ScheduleFreeState(state.updates + 1, lr, weight, jax.tree.map(jnp.add, state.z, steps))

    return optax.GradientTransformation(init, update)


def averaged(beta1: float, params: Parameters, z: Parameters) -> Parameters:
    """x, from parameters y and z."""
    return jax.tree.map(lambda y, z: (y - (1 - beta1) * z) / beta1, params, z)


_in_place = jax.jit(averaged, static_argnums=0, donate_argnums=1)


class AveragedPoint(StoredForm):
    """Parameters y of a state, where x is what is evaluated and exported."""

    def __init__(self, beta1: float, model: ModelConfig, mesh: Mesh | None) -> None:
        split = None if mesh is None else jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(model, mesh))
        self._beta1, self._averaged = beta1, jax.jit(averaged, static_argnums=0, out_shardings=split)

    @classmethod
    def from_config(cls, own: None, optimizer_beta1: float, device_mesh: Mesh | None, model: ModelConfig) -> Self:
        return cls(optimizer_beta1, model, device_mesh)

    def asked(self, entries: Parameters) -> Parameters:
        """Add z, from which x follows."""
        entry, place, name = ROOT
        return {**entries, entry: {place: {name: entries["params"]}}} if "params" in entries else entries

    def restored(self, entries: Parameters) -> Parameters:
        """Compute x in place of z."""
        entry, place, name = ROOT
        if entry not in entries:
            return entries
        return {**entries, "params": _in_place(self._beta1, entries["params"], entries[entry][place][name])}

    def evaluated(self, params: Parameters, opt_state: Any) -> Parameters:
        """The averaged point x."""
        point: Parameters = self._averaged(self._beta1, params, opt_state[-1].z)
        return point
