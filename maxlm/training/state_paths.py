"""Leaves of a training state by their paths, and the shardings that follow from them."""

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.schema import ModelConfig
from maxlm.models import abstract_parameters, model_state_specs, parameter_specs
from maxlm.models.parameters import Parameters

Name = tuple[str, ...]  # of a parameter, as in the tree
Leaves = dict[Name, Any]  # by path in the state


def flat_params(tree: Parameters) -> Leaves:
    """Name -> leaf of a tree of parameters; a tuple is a leaf."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    return {path_of(path): leaf for path, leaf in found}


def flat_state(state: Any) -> Leaves:
    """Path -> leaf of a state, or of a part of it."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def path_of(path: tuple[Any, ...]) -> Name:
    """The names along a pytree path; an optimizer keeps a moment under the name of its parameter."""
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def nested(leaves: Leaves) -> Parameters:
    """The inverse of `flat_params`."""
    tree: Parameters = {}
    for name, leaf in leaves.items():
        reduce(lambda branch, part: branch.setdefault(part, {}), name[:-1], tree)[name[-1]] = leaf
    return tree


def owner_of(path: Name, names: Mapping[Name, Any]) -> Name | None:
    """The parameter that a leaf of the state belongs to: its name is a part of the path. None for counters."""
    spans = ((start, end) for start in range(1, len(path)) for end in range(len(path), start, -1))
    return next((path[start:end] for start, end in spans if path[start:end] in names), None)


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[NamedSharding, NamedSharding, Any, Any, Any]:
    """A NamedSharding for every leaf of the counters, parameters, the optimizer's state and the model state of a `TrainState`: what the
    optimizer keeps under the name of a parameter is split as it is.
    """
    abstract = abstract_parameters(config)
    shardings, of_model_state = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for specs in (parameter_specs(config, mesh), model_state_specs(config, mesh))
    )
    whole = NamedSharding(mesh, PartitionSpec())
    by_name = {path_of(path): sharding for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]}

    def of_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = path_of(path)
        own = next((by_name[keys[start:]] for start in range(len(keys)) if keys[start:] in by_name), None)
        return whole if own is None else _of_parts(own, leaf.shape)

    opt_state = jax.tree_util.tree_map_with_path(of_moment, jax.eval_shape(optimizer.init, abstract))
    return whole, whole, shardings, opt_state, of_model_state


def _of_parts(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """`sharding` of a parameter, for an array with the same dims, some of them shorter (scales, row means): split as far as they go."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    sizes = [[math.prod(sharding.mesh.shape[axis] for axis in axes[:n]) for n in range(len(axes) + 1)] for axes in entries]
    fitting = [max(n for n, parts in enumerate(each) if size % parts == 0) for each, size in zip(sizes, shape, strict=False)]
    kept = [axes[:n] for axes, n in zip(entries, fitting, strict=True)]
    return sharding if kept == entries else NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in kept)))
