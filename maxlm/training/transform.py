"""The interface of a transform: one part of an update, with a file and a state of its own (update.py calls the hooks)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from maxlm.models import Parameters
from maxlm.objectives import Sums
from maxlm.telemetry.metric import Metric
from maxlm.training.step import TrainState

# Phases of an update, in the order in which transforms see the gradient; parameters are written in the reverse order. Those of one phase
# follow the order of the settings.
PHASES = (
    "scale",  # a factor of the loss, which is taken out of the gradient
    "store",  # parameters are stored in another form between updates
    "measure",  # figures of the gradient and of the change
    "refuse",  # updates that are not applied
    "sum",  # the gradient is summed where links are slow
    "average",  # averages follow the updated parameters
)


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

    `name`: of its state in `TrainState.extra`; `phase`: one of `PHASES`. `by_parameter`: the state has an array for each parameter, and
    `write` updates it by groups; other states are updated in `reduce` or `judge`. `kept_if_refused`: the new state is kept although the
    update is not applied.
    """

    name: str
    phase: str
    by_parameter = False
    kept_if_refused = False
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "Transform | None":
        """The transform that a section asks for; None if it asks for none. Gets the section, the settings that the parameters of the
        subclass name, and the `device_mesh` (`table.build`).
        """
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


def in_order(transforms: Sequence[Transform]) -> list[Transform]:
    """Sort by phase. Raises ValueError for a phase that does not exist, or for two transforms with one name, and so one state."""
    names = [one.name for one in transforms]
    for one in transforms:
        if one.phase not in PHASES:
            raise ValueError(f"{type(one).__name__}.phase = {one.phase!r} is no phase of an update: use one of {', '.join(PHASES)}.")
        if names.count(one.name) > 1:
            raise ValueError(f"{type(one).__name__}.name = {one.name!r} is the name of another transform, too: rename one of them.")
    return sorted(transforms, key=lambda one: PHASES.index(one.phase))
