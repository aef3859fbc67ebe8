"""The training state: everything an update changes, as one pytree; its initial value, its shardings, and the update of the model state."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.schema import ModelConfig
from maxlm.models import Routing, abstract_parameters, init_model_state, init_parameters, model_state_specs, parameter_specs
from maxlm.models.parameters import Parameters
from maxlm.models.stack import by_group, layer_groups
from maxlm.objectives import Sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State after `step` batches, `skipped` of which changed nothing because loss or gradients were not finite."""

    step: Any  # int32 scalar
    skipped: Any  # int32 scalar
    params: Parameters
    opt_state: Any
    model_state: Parameters = field(default_factory=dict)  # not learnt by gradient, e.g. balancing biases of experts
    workers: Any = None  # diloco.WorkerState, with local updates

    def advance(self, params: Parameters, opt_state: Any, model_state: Parameters) -> "TrainState":
        """The state after one more update."""
        return replace(self, step=self.step + 1, params=params, opt_state=opt_state, model_state=model_state)


def update_model_state(config: ModelConfig, model_state: Parameters, sums: Sums) -> Parameters:
    """The model state after an update, from the sums over its batch; without balanced experts it is as before."""
    if config.moe is None or not config.moe.router.bias_rate or sums.routing is None:
        return model_state
    return _balance(config, config.moe.router.bias_rate, model_state, sums.routing)


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update: a pure function of the seed."""
    params = init_parameters(config, seed)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, params, optimizer.init(params), init_model_state(config, seed))


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A TrainState with a NamedSharding for every leaf: optimizer moments are split as the parameter they belong to."""
    abstract = abstract_parameters(config)
    shardings, state_shardings = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for specs in (parameter_specs(config, mesh), model_state_specs(config, mesh))
    )
    whole = NamedSharding(mesh, PartitionSpec())
    by_name = {_keys(path): sharding for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]}

    def of_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = _keys(path)
        own = next((by_name[keys[start:]] for start in range(len(keys)) if keys[start:] in by_name), None)
        return own if own is not None else whole

    opt_state = jax.tree_util.tree_map_with_path(of_moment, jax.eval_shape(optimizer.init, abstract))
    return TrainState(whole, whole, shardings, opt_state, state_shardings)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names along a pytree path; an optimizer keeps a moment under the name of its parameter."""
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def _balance(config: ModelConfig, rate: float, model_state: Parameters, routing: Routing) -> Parameters:
    """Loss-free balancing (Wang 2024, arXiv 2408.15664): every bias moves `rate` towards even load, up where an expert had less than its
    share, down where it had more. Loads are integers summed over all devices, so the biases are the same everywhere.
    """
    groups = [group for group in layer_groups(config) if group.experts]
    updated: Parameters = {}
    for group, load_E in zip(groups, by_group(groups, routing.load_E), strict=True):
        old, new = model_state, updated
        for part in (*group.path, "mlp"):
            old, new = old[part], new.setdefault(part, {})
        even = jnp.mean(load_E.astype(jnp.float32), axis=-1, keepdims=True)
        new["balancing_E"] = old["balancing_E"] + rate * jnp.sign(even - load_E)
    return updated
