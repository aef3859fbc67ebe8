"""A scan over stacked layers whose weights are in host memory, or whose gradients go there: one layer's at a time is on the device.

While a layer is computed, forward or backward, the weights of the next one are fetched, and the gradient of the one before it is written. So
the scan carries the next layer's weights, and its derivative is written by hand: `jax.grad` would keep every layer's. A layer is recomputed
from its input in the backward pass. Of a stack the last fetch of a pass is one of a layer that is there already.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxlm.memory.spaces import is_on_host, to_device, to_host

Leaves = Sequence[jax.Array]
# (hidden states, one layer) -> (hidden states, reports)
Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def empty_on_host(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array in host memory, to be written to. While a program is traced."""
    return lax.broadcast(to_host(jnp.zeros((), dtype)), tuple(shape))


def scan_layers(
    layer: Layer, x: jax.Array, stacked: Any, *, weights: Sequence[jax.Array | None], split: Callable[[Leaves], Leaves], inputs_on_host: bool
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(layer, x, stacked)`.

    Args:
        stacked: a tree of arrays with a leading dim of layers. The gradient of each is in the memory in which it is.
        weights: for each leaf of `stacked` what is read in its place, without a gradient; None for the leaf itself.
        split: pins the shardings of one layer's leaves, which are on the device.
        inputs_on_host: keep the layers' inputs for the backward pass in host memory.
    """
    leaves, tree = jax.tree.flatten(stacked)
    count = leaves[0].shape[0]

    def read(leaves: Leaves) -> list[jax.Array]:
        return [leaf if weight is None else weight for leaf, weight in zip(leaves, weights, strict=True)]

    def one(leaves: Leaves, i: jax.Array, *, host: bool) -> list[jax.Array | None]:
        """Leaves of layer i that are in host memory, or (not `host`) those that are not."""
        return [_fetch(leaf, i) if is_on_host(leaf) == host else None for leaf in leaves]

    def run(fetched: Sequence[jax.Array | None], here: Sequence[jax.Array | None]) -> list[Any]:
        return list(split([a if a is not None else b for a, b in zip(fetched, here, strict=True)]))

    def forward(x: jax.Array, leaves: Leaves, *, keep: bool) -> tuple[jax.Array, Any, Any]:
        sources = read(leaves)

        def body(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[Any, Any]:
            x, fetched = carry
            following = one(sources, jnp.minimum(i + 1, count - 1), host=True)
            y, reports = layer(x, jax.tree.unflatten(tree, run(fetched, one(sources, i, host=False))))
            kept = (to_host(x) if inputs_on_host else x) if keep else None
            return (y, following), (kept, reports)

        (y, last), (inputs, reports) = lax.scan(body, (x, one(sources, jnp.int32(0), host=True)), jnp.arange(count))
        return y, reports, (last, inputs)

    def backward(residuals: Any, cotangents: tuple[jax.Array, Any]) -> tuple[jax.Array, list[Any]]:
        leaves, (last, inputs) = residuals
        sources, (dy, of_reports) = read(leaves), cotangents
        targets = [empty_on_host(leaf.shape, leaf.dtype) if is_on_host(leaf) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]

        def body(n: jax.Array, carry: Any) -> Any:
            i = count - 1 - n
            dy, fetched, x, waiting, targets = carry
            before = jnp.maximum(i - 1, 0)
            following, x_before = one(sources, before, host=True), _fetch(inputs, before)
            targets = [_write(target, new, jnp.minimum(i + 1, count - 1)) for target, new in zip(targets, waiting, strict=True)]
            of_layer = run(fetched, one(sources, i, host=False))
            _, pull = jax.vjp(lambda x, leaves: layer(x, jax.tree.unflatten(tree, leaves)), x, of_layer)
            dx, new = pull((dy, jax.tree.map(partial(_cotangent, i), of_reports)))
            return dx, following, x_before, list(split(new)), targets

        first = [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]  # written to the last layer's place, before its own
        start = dy, last, _fetch(inputs, jnp.int32(count - 1)), first, targets
        dx, _, _, waiting, targets = lax.fori_loop(0, count, body, start)
        return dx, [_write(target, new, jnp.int32(0)) for target, new in zip(targets, waiting, strict=True)]

    @jax.custom_vjp
    def scanned(x: jax.Array, leaves: Leaves) -> tuple[jax.Array, Any]:
        return forward(x, leaves, keep=False)[:2]

    def scanned_forward(x: jax.Array, leaves: Leaves) -> tuple[Any, Any]:
        y, reports, kept = forward(x, leaves, keep=True)
        return (y, reports), (leaves, kept)

    scanned.defvjp(scanned_forward, backward)
    return scanned(x, leaves)


def _fetch(stack: jax.Array, i: jax.Array) -> jax.Array:
    row = lax.dynamic_index_in_dim(stack, i, keepdims=False)
    return to_device(row) if is_on_host(stack) else row


def _write(stack: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, to_host(row) if is_on_host(stack) else row, i, 0)


def _cotangent(i: jax.Array, stacked: Any) -> Any:
    """That of layer i; integers have none."""
    if stacked.dtype == jax.dtypes.float0:
        return np.zeros(stacked.shape[1:], jax.dtypes.float0)
    return lax.dynamic_index_in_dim(stacked, i, keepdims=False)
