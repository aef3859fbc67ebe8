"""Transforms: the parts of an update, each with its state, the phase that gives its place in the list, and the hooks that it needs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from maxlm.base.errors import UserError
from maxlm.base.metric import Metric
from maxlm.models import Parameters
from maxlm.objectives import Sums
from maxlm.training.step import TrainState
from maxlm.training.update_rule import difference

# Phases of an update, in the order in which its transforms see the gradient; parameters are written in the reverse order. Transforms of one
# phase follow the order of the settings.
PHASES = {
    "scale": "a factor of the loss, which is taken out of the gradient",
    "store": "parameters are stored in another form between updates",
    "measure": "figures of the gradient and of the change",
    "refuse": "updates that are not applied",
    "sum": "the gradient is summed where links are slow",
    "average": "averages follow the updated parameters",
}


class Transform:
    """One part of an update. A hook that a subclass leaves out changes nothing; `own` is the transform's state.

    `name`: of the state; `phase`: one of `PHASES`. `by_parameter`: the state has an array for each parameter, and `write` updates
    it by groups; other states are updated in `reduce` or `judge`. `kept_if_refused`: it is kept although the update is not applied.
    """

    name: str
    phase: str
    by_parameter = False
    kept_if_refused = False
    metrics: tuple[Metric, ...] = ()

    @property
    def recorded(self) -> tuple[Metric, ...]:
        """Figures in the records of a run, by default `metrics`."""
        return self.metrics

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "Transform | None":
        """The transform that a section asks for; None if it asks for none. Gets the section, and what the parameters of the subclass
        name: settings, and the `device_mesh` (`table.build`).
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

    # No hooks.

    def alike(self, after: Any, before: Any) -> Any:
        """Return the own state `after`. Raises UserError if it has another structure, shape or dtype than `before`."""
        if wrong := difference(after, before):
            raise UserError(f"{type(self).__name__} (transform {self.name!r}) returns a state unlike what it was given: {wrong}.")
        return after

    def declared(self, figures: Mapping[str, Any], known: Collection[str] = ()) -> Mapping[str, Any]:
        """Return `figures`. Raises UserError for a figure that is neither `known` nor declared in `metrics`: no record would hold it."""
        names = {name for metric in self.metrics for name in (metric.name, metric.per)}.union(known)
        if undeclared := [name for name in figures if name not in names]:
            raise UserError(
                f"{type(self).__name__} (transform {self.name!r}) reports the figure {undeclared[0]!r}, which it does not declare: "
                f"add Metric({undeclared[0]!r}, ...) to its `metrics`."
            )
        return figures


def in_order(transforms: Sequence[Transform]) -> list[Transform]:
    """Sort by phase. Raises UserError for a class that is no transform, an unknown phase, two transforms with one name (of a state), and a
    state that only `write` could update without `by_parameter`.
    """
    names, phases = [getattr(one, "name", None) for one in transforms], list(PHASES)
    for one, name in zip(transforms, names, strict=True):
        kind = type(one).__name__
        if not isinstance(one, Transform) or not name:
            raise UserError(
                f"{kind} is no transform of an update: derive it from maxlm.training.transform.Transform, with a name and a phase."
            )
        if (phase := getattr(one, "phase", None)) not in phases:
            raise UserError(f"{kind}.phase = {phase!r} is no phase of an update: use one of {', '.join(phases)}.")
        if names.count(name) > 1:
            raise UserError(f"{kind}.name = {name!r} is the name of another transform, too: rename one of them.")
        own = {hook for hook in ("first", "write", "reduce", "judge") if getattr(type(one), hook) is not getattr(Transform, hook)}
        if own == {"first", "write"} and not one.by_parameter:
            raise UserError(
                f"{kind}.by_parameter = False, so the state that {kind}.write returns is dropped, and no other hook changes it: "
                "say by_parameter = True, or make the state in `reduce` or `judge`."
            )
    return sorted(transforms, key=lambda one: phases.index(one.phase))
