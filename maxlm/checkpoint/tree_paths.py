"""A state as a flat dict of named arrays, the form in which a checkpoint holds it.

The names are the paths of the leaves (`params.layers.w_up`, `opt_state.0.mu.layers.w_up`, `step`), so a checkpoint does not
depend on the Python types of the containers, empty ones (`optax.EmptyState`) need no special case, and a subtree
is a prefix.
"""

from typing import Any

import jax
from jax.sharding import Sharding

PARAMS = "params"  # the entry of the state that holds the parameters
OPTIONAL = "guard."  # leaves that a state may gain or lose between two attempts; they begin as zeros


def named_leaves(tree: Any) -> dict[str, Any]:
    """Name -> leaf, in the order of `jax.tree.leaves`. Two leaves of one name are a bug and raise ValueError."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"two leaves of the state are called {name}")
        named[name] = leaf
    return named


def abstract_leaf(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array or of its abstract form. Without a sharding: ValueError, since Orbax would guess one."""
    if not isinstance(getattr(leaf, "sharding", None), Sharding):
        raise ValueError(f"{name} is a {type(leaf).__name__} without a sharding: restore needs to know where it goes")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def bytes_here(leaves: dict[str, jax.Array]) -> int:
    """Bytes this process writes at most: its shards, one replica of each, before compression."""
    return sum(shard.data.nbytes for leaf in leaves.values() for shard in leaf.addressable_shards if shard.replica_id == 0)
