"""Parameters and model state as plain nested dicts, and everything derived from their one declaration: shapes, axes, shardings."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxlm.config.schema import ModelConfig
from maxlm.models.adapted_matrix import adapt
from maxlm.models.decoder import Decoder
from maxlm.models.layers import StateVariable
from maxlm.models.parametrization import factors
from maxlm.models.stack import group_of
from maxlm.parallel import partition_spec

Parameters = dict[str, Any]  # nested by module; leaves are arrays, specs, axes ...


def cast_matrices(model: ModelConfig, compute: str, parameters: Parameters, *, state: bool = False) -> Parameters:
    """Parameters, or model state, as the forward pass reads them: matrices in the dtype `compute`, scales and biases unchanged."""
    matrix = _tree(model, lambda _, variable: is_matrix(variable.axes), state=state)
    return jax.tree.map(lambda leaf, cast: leaf.astype(compute) if cast else leaf, parameters, matrix)


def is_matrix(axes: tuple[str, ...]) -> bool:
    """True for the logical axes of a matrix; False for a norm's scale, a bias, and a router, which is read in float32."""
    return any(name in axes for name in ("embed", "position", "rank")) and "choices" not in axes


def bind(config: ModelConfig, parameters: Parameters, model_state: Parameters | None = None) -> Decoder:
    """Build the model with these arrays in place of its shapes. `model_state`: None for a model without state."""
    trees = {False: parameters, True: model_state or {}}
    leaves = [reduce(getitem, name, trees[isinstance(variable, StateVariable)]) for name, variable in declarations(config)]
    return jax.tree.unflatten(jax.tree.structure(abstract_decoder(config)), leaves)


def declarations(config: ModelConfig) -> list[tuple[tuple[str, ...], nnx.Variable]]:
    """(name, declaration) of every parameter and of the model state, in the order of the model's leaves."""
    paths = jax.tree_util.tree_flatten_with_path(abstract_decoder(config), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    return [(_name(path), variable) for path, variable in paths]


@lru_cache(maxsize=16)
def abstract_decoder(config: ModelConfig) -> Decoder:
    """The model with shapes for arrays."""
    return jax.eval_shape(lambda: Decoder(config) if config.lora is None else adapt(Decoder(config), config.lora))


def parameter_axes(config: ModelConfig, *, state: bool = False) -> Parameters:
    """Logical axes of every parameter, or of the model state, one name a dim; stacked blocks lead with `stack.STACKED`."""
    return _tree(config, partial(_axes, config), state=state)


def _axes(config: ModelConfig, name: tuple[str, ...], variable: nnx.Variable) -> tuple[str, ...]:
    group = group_of(config, name)
    return (() if group is None else group.axes) + variable.axes


def _tree(config: ModelConfig, leaf: Callable[[tuple[str, ...], nnx.Variable], Any], *, state: bool = False) -> Parameters:
    """`leaf(name, declaration)` for every parameter, or for the model state."""
    tree: Parameters = {}
    for name, variable in declarations(config):
        if isinstance(variable, StateVariable) == state:
            branch = reduce(lambda branch, part: branch.setdefault(part, {}), name[:-1], tree)
            branch[name[-1]] = leaf(name, variable)
    return tree


def _name(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A pytree path as the parts of a parameter's name; values add no part."""
    parts = tuple(str(getattr(entry, "name", getattr(entry, "idx", getattr(entry, "key", "")))) for entry in path)
    return parts[:-1] if parts[-1] == "value" else parts


# Initial values, shapes and shardings.


def init_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Fresh float32 parameters, each a function of the seed and its own name.

    The same values on any mesh: jit it with `out_shardings`, and no device ever holds a whole array.
    """
    return _tree(config, partial(_initial, config, seed))


def init_model_state(config: ModelConfig, seed: int) -> Parameters:
    """Fresh model state, as `init_parameters`: variables that training updates without a gradient. Empty for a model without any."""
    return _tree(config, partial(_initial, config, seed), state=True)


def _initial(config: ModelConfig, seed: int, name: tuple[str, ...], variable: nnx.Variable) -> jax.Array:
    values = jnp.full(variable.shape, variable.mean, jnp.float32)
    if variable.std:
        std = variable.std * factors(config, name, variable.axes).std
        values += std * jax.random.normal(_key(seed, name), variable.shape, jnp.float32)
    return values


def _key(seed: int, name: Sequence[str]) -> jax.Array:
    data = hashlib.sha256(f"{seed} {'/'.join(name)}".encode()).digest()[:8]
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, "<u4")), impl="threefry2x32")


def abstract_parameters(config: ModelConfig) -> Parameters:
    """Shapes and dtypes of `init_parameters`; no memory is used."""
    return _tree(config, lambda name, variable: variable.get_value())


def abstract_model_state(config: ModelConfig) -> Parameters:
    """Shapes and dtypes of `init_model_state`; no memory is used."""
    return _tree(config, lambda name, variable: variable.get_value(), state=True)


def parameter_specs(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Parameters:
    """PartitionSpec of every parameter over `mesh`. Raises ConfigError for a dim that does not divide."""
    return _tree(config, partial(_spec, config, mesh))


def model_state_specs(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Parameters:
    """PartitionSpec of the model state over `mesh`, as `parameter_specs`."""
    return _tree(config, partial(_spec, config, mesh), state=True)


def _spec(config: ModelConfig, mesh: Mesh | AbstractMesh, name: tuple[str, ...], variable: nnx.Variable) -> PartitionSpec:
    return partition_spec(_axes(config, name, variable), variable.shape, mesh, "/".join(name))
