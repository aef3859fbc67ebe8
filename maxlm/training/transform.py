"""The interface of a transform: one part of an update, with a file and a state of its own (update.py calls the hooks)."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import Config
from maxlm.models import Parameters
from maxlm.objectives import Sums
from maxlm.telemetry.metric import Metric
from maxlm.training.step import TrainState


class Pending(NamedTuple):
    """An update before its parameters are computed. `good`: it is applied; `clip`: factor of the gradient; `after`: the new state
    without parameters and what is kept for each of them.
    """

    gradient: Parameters
    good: Bool[Array, ""]
    clip: Float[Array, ""]
    after: TrainState

    @property
    def skipped(self) -> Any:
        """Updates that were not applied, this one included."""
        return self.after.skipped


class Transform:
    """One part of an update. A hook that a subclass leaves out changes nothing; `own` is the transform's state.

    `by_parameter`: the state has an array for each parameter, and `write` updates it by groups; other states are updated in `reduce` or
    `judge`. `kept_if_refused`: the new state is kept although the update is not applied.
    """

    name: str
    by_parameter = False
    kept_if_refused = False
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def from_config(cls, config: Config, mesh: Mesh) -> Self | None:
        """The transform that `config` asks for; None if it asks for none."""
        raise NotImplementedError

    def first(self, params: Parameters) -> tuple[Parameters, Any]:
        """(parameters as the state holds them, own state before the first update; None if there is none)."""
        return params, None

    def shardings(self, params: Parameters, mesh: Mesh) -> Any:
        """A NamedSharding for every leaf of the own state, from the shardings of the parameters: by default whole on every device."""
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, self.first(params)[1])

    # Once an update, with what concerns all parameters.

    def loss_scale(self, own: Any) -> Array | float:
        """Factor of the loss that is differentiated; `reduce` takes it out of the gradient."""
        return 1.0

    def reduce(self, state: TrainState, sums: Sums, gradient: Parameters) -> tuple[Sums, Parameters, Any]:
        """(figures of the batch, its gradient, own state)."""
        return sums, gradient, state.extra.get(self.name)

    def judge(self, own: Any, state: TrainState, loss: Array, norm: Array) -> tuple[Bool[Array, ""], Any]:
        """(True if the update must not be applied, own state if it is)."""
        return jnp.bool_(False), own

    # For each group of parameters: `state` before the update has their part alone.

    def read(self, params: Parameters, own: Any) -> Parameters:
        """Parameters as the optimizer updates them."""
        return params

    def write(self, params: Parameters, own: Any, state: TrainState, first_row: Array | int) -> tuple[Parameters, Any]:
        """(updated parameters, own state). `first_row`: of a piece of stacked parameters."""
        return params, own

    def figures(self, before: Parameters, after: Parameters) -> dict[str, Array]:
        """Figures of the change, by the names of their metrics."""
        return {}
