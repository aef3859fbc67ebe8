"""Arrays made in host memory, some at a time: together they may be larger than a device's memory, or, kept in files, than the host's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxlm.memory.pieces import bytes_on_device
from maxlm.memory.spaces import is_on_host, to_device

GROUP_BYTES = 1 << 30  # of host arrays that one program makes, on a device


def create(make: Callable[..., Any], shardings: Any, *arguments: Any, keep: Callable[[Any, jax.Array], Any]) -> Any:
    """`make(*arguments)` on these shardings. It is traced once for each group of leaves, and makes only those, from copies on the device of
    those arguments in host memory that they need.

    `keep`: given a leaf's path in the tree and the leaf, what stands for it in the result; called before other leaves are made.
    """

    def on_device(*arguments: Any) -> Any:
        return make(*jax.tree.map(lambda leaf: to_device(leaf) if is_on_host(leaf) else leaf, arguments))

    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(on_device, *arguments),
        shardings,
    )
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    leaves: dict[int, Any] = {}
    for group in _groups(jax.tree.leaves(shapes)):

        def some(*arguments: Any, group: Sequence[int] = group) -> list[jax.Array]:
            made = jax.tree.leaves(on_device(*arguments))
            return [made[i] for i in group]

        out = [jax.tree.leaves(shapes)[i].sharding for i in group]
        made = jax.jit(some, out_shardings=out)(*arguments)
        for i in reversed(group):
            leaves[i] = keep(paths[i], made.pop())
    return jax.tree.unflatten(jax.tree.structure(shapes), [leaves[i] for i in range(len(leaves))])


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Numbers of the leaves that one program makes: all of the device's, then the host's."""
    groups = [[i for i, leaf in enumerate(leaves) if not is_on_host(leaf)]]
    size = GROUP_BYTES
    for i, leaf in enumerate(leaves):
        if is_on_host(leaf):
            size += bytes_on_device(leaf)
            if size > GROUP_BYTES:
                groups.append([])
                size = bytes_on_device(leaf)
            groups[-1].append(i)
    return [group for group in groups if group]
