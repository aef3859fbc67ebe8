"""Parameters as a plain nested dict, and everything derived from their one declaration: shapes, axes, shardings, count."""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxlm.config import ConfigError
from maxlm.config.schema import ModelConfig
from maxlm.models.decoder import Decoder
from maxlm.parallel import partition_spec

MOST = 2**61  # of a size
STACKED = ("layers", "run")  # logical axes of stacked blocks: periods of the pattern, then the equal blocks of a run in it
Parameters = dict[str, Any]  # nested by module; leaves are arrays, specs, axes ...


def init_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Fresh float32 parameters, each a function of the seed and its own name.

    The same values on any mesh: jit it with `out_shardings` and nothing is ever whole.
    """
    parameters: Parameters = {}
    for name, variable in _variables(config):
        values = jnp.full(variable.shape, variable.mean, jnp.float32)
        if variable.std:
            values += variable.std * jax.random.normal(_key(seed, name), variable.shape, jnp.float32)
        _put(parameters, name, values)
    return parameters


def _key(seed: int, name: Sequence[str]) -> jax.Array:
    data = hashlib.sha256(f"{seed} {'/'.join(name)}".encode()).digest()[:8]
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, "<u4")), impl="threefry2x32")


def abstract_parameters(config: ModelConfig) -> Parameters:
    """Shapes and dtypes of `init_parameters`, with no memory used."""
    shapes: Parameters = {}
    for name, variable in _variables(config):
        _put(shapes, name, variable.get_value())
    return shapes


def bind(config: ModelConfig, parameters: Parameters) -> Decoder:
    """The model that computes with `parameters`."""
    leaves, treedef = jax.tree.flatten(abstract_decoder(config))
    names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(abstract_decoder(config))[0]]
    assert len(names) == len(leaves)
    return jax.tree.unflatten(treedef, [_get(parameters, name) for name in names])


def parameter_axes(config: ModelConfig) -> Parameters:
    """The logical axes of every parameter, a tuple of names one a dim; stacked blocks lead with those of `STACKED`."""
    axes: Parameters = {}
    for name, variable in _variables(config):
        declared = variable.axes
        stacked = STACKED[name[0] in ("head", "tail") :]
        _put(axes, name, stacked[: len(variable.shape) - len(declared)] + declared)
    return axes


def parameter_specs(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Parameters:
    """How every parameter is split over `mesh`. Raises ConfigError for a dim that does not divide."""
    axes, shapes = parameter_axes(config), abstract_parameters(config)
    paths = jax.tree_util.tree_flatten_with_path(shapes)[0]
    specs: Parameters = {}
    for path, shape in paths:
        name = tuple(entry.key for entry in path)
        _put(specs, name, partition_spec(_get(axes, name), shape.shape, mesh, "/".join(name)))
    return specs


def count_parameters(config: ModelConfig) -> int:
    """Trained numbers in the model. Takes no longer for a deep model: blocks of a kind are alike, so two depths say what one more adds.

    Raises ConfigError for a size that alone is more than any memory holds.
    """
    _check_sizes(config)
    dense, ahead = min(config.n_dense, 1), min(config.mtp_depth, 1)
    least = _count(_of_depth(config, dense, ahead))
    total = least
    if config.n_dense > dense:
        total += (config.n_dense - dense) * (_count(_of_depth(config, dense + 1, ahead)) - least)
    if config.mtp_depth > ahead:
        total += (config.mtp_depth - ahead) * (_count(_of_depth(config, dense, ahead + 1)) - least)
    return total


def _check_sizes(config: ModelConfig) -> None:
    """A sum of two sizes must stay below 2^63, which the dims of arrays are counted in."""
    sizes = {f"model.{field}": size for field, size in config if type(size) is int and field != "window"}
    sizes |= {f"model.latent.{field}": size for field, size in config.latent or () if type(size) is int}
    if config.moe is not None:
        sizes |= {f"model.moe.{field}": size for field, size in config.moe if type(size) is int}
        sizes["model.moe.n_shared"] *= config.moe.d_ff
    field = max(sizes, key=lambda field: sizes[field])
    if sizes[field] > MOST:
        raise ConfigError(field, sizes[field], "is more than the memory of any machine holds", "lower it")


def _count(config: ModelConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_parameters(config)))


def count_active_parameters(config: ModelConfig) -> int:
    """Trained numbers that one token meets: all but those of the experts it does not choose, `top_k` of `n_experts` in every layer.

    Embeddings are among them, which some publications leave out.
    """
    if config.moe is None:
        return count_parameters(config)
    idle = 0
    for _, variable in _variables(config):
        if "expert" in variable.axes or variable.axes == ("choices", "embed_act"):  # matrices and biases of experts
            idle += math.prod(variable.shape) // config.moe.n_experts * (config.moe.n_experts - config.moe.top_k)
    return count_parameters(config) - idle


def _of_depth(config: ModelConfig, dense: int, ahead: int) -> ModelConfig:
    """`config` with `dense` layers before as many with experts as it has, and `ahead` modules that predict further ahead."""
    layers = config.n_layers - config.n_dense + dense
    moe = config.moe and config.moe.model_copy(update={"n_dense": dense})
    mtp = config.mtp.model_copy(update={"depth": ahead}) if config.mtp and ahead else None
    return config.model_copy(update={"n_layers": layers, "mtp": mtp, "moe": moe})


@functools.lru_cache(maxsize=16)
def abstract_decoder(config: ModelConfig) -> Decoder:
    """The model with shapes for arrays."""
    return jax.eval_shape(lambda: Decoder(config))


def _variables(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], nnx.Variable]]:
    """(name, declaration) of every parameter."""
    paths = jax.tree_util.tree_flatten_with_path(abstract_decoder(config), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    for path, variable in paths:
        yield _name(path), variable


def cast_matrices(parameters: Parameters, axes: Parameters, dtype: jnp.dtype) -> Parameters:
    """The parameters as the forward pass reads them: matrices in `dtype`, scales and biases as they are."""
    matrix = jax.tree.map(is_matrix, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return jax.tree.map(lambda leaf, cast: leaf.astype(dtype) if cast else leaf, parameters, matrix)


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix, not a norm's scale or a bias, by its logical axes; routers are read in float32 and are none."""
    return ("embed" in axes or "position" in axes) and "choices" not in axes


def _name(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A pytree path as the parts of a name; the entry for a Variable's value is no part of it."""
    parts = [str(getattr(entry, "name", getattr(entry, "idx", getattr(entry, "key", "")))) for entry in path]
    return tuple(parts[:-1] if parts[-1] == "value" else parts)


def _get(tree: Parameters, name: tuple[str, ...]) -> Any:
    return functools.reduce(lambda branch, part: branch[part], name, tree)


def _put(tree: Parameters, name: tuple[str, ...], leaf: Any) -> None:
    for part in name[:-1]:
        tree = tree.setdefault(part, {})
    tree[name[-1]] = leaf
