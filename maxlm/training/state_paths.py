"""Leaves of a training state by their paths."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import jax

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
