"""A scan over stacked layers with weights or gradients in host memory: one layer at a time is on the device.

While a layer is computed, forward or backward, the weights of the next one are fetched, and the gradient of the one before it is written.
So the scan carries the next layer's weights, and its derivative is written by hand: `jax.grad` would keep all weights. In the backward
pass a layer is recomputed from its input.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from maxlm.memory.spaces import is_on_host, to_device, to_host

Leaves = Sequence[jax.Array]
# (hidden states, one layer) -> (hidden states, reports)
Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def empty_on_host(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array in host memory, to be written to. While a program is traced."""
    return lax.broadcast(to_host(jnp.zeros((), dtype)), tuple(shape))


def scan_layers(
    layer: Layer,
    x: jax.Array,
    stacked: Any,
    *,
    weights: Sequence[jax.Array | None],
    specs: Sequence[PartitionSpec],
    inputs_on_host: bool,
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(layer, x, stacked)`.

    Args:
        stacked: a tree of arrays with a leading dim of layers. The gradient of each is in the memory in which it is.
        weights: for each leaf of `stacked` what is read in its place, without a gradient; None for the leaf itself.
        specs: how the current mesh splits one layer's leaves.
        inputs_on_host: keep the layers' inputs for the backward pass in host memory.
    """
    leaves, tree = jax.tree.flatten(stacked)
    if not leaves[0].shape[0]:
        return lax.scan(layer, x, stacked)
    stream = _LayerStream(lambda x, leaves: layer(x, jax.tree.unflatten(tree, leaves)), weights, specs, inputs_on_host)

    @jax.custom_vjp
    def scanned(x: jax.Array, leaves: Leaves) -> tuple[jax.Array, Any]:
        return stream.forward(x, leaves, keep=False)[0]

    def scanned_forward(x: jax.Array, leaves: Leaves) -> tuple[Any, Any]:
        results, kept = stream.forward(x, leaves, keep=True)
        return results, (leaves, kept)

    scanned.defvjp(scanned_forward, stream.backward)
    return scanned(x, leaves)


class _LayerStream:
    """The two passes of `scan_layers` over the leaves of a stack."""

    def __init__(self, layer: Layer, weights: Sequence[jax.Array | None], specs: Sequence[PartitionSpec], inputs_on_host: bool) -> None:
        self._layer, self._weights, self._specs, self._inputs_on_host = layer, weights, specs, inputs_on_host

    def forward(self, x: jax.Array, leaves: Leaves, *, keep: bool) -> tuple[tuple[jax.Array, Any], Any]:
        """((hidden states, reports), what `backward` needs in addition to the leaves, if `keep`)."""
        read, last = self._read(leaves), leaves[0].shape[0] - 1

        def body(carry: tuple[jax.Array, Leaves], i: jax.Array) -> tuple[Any, Any]:
            x, fetched = carry
            following = _fetch_far(read, jnp.minimum(i + 1, last))
            y, reports = self._layer(x, self._whole(read, fetched, i))
            kept = (to_host(x) if self._inputs_on_host else x) if keep else None
            return (y, following), (kept, reports)

        (y, fetched), (inputs, reports) = lax.scan(body, (x, _fetch_far(read, jnp.int32(0))), jnp.arange(last + 1))
        return (y, reports), (fetched, inputs)

    def backward(self, residuals: Any, cotangents: tuple[jax.Array, Any]) -> tuple[jax.Array, Leaves]:
        """(gradient of the first layer's input, gradients of the leaves)."""
        leaves, (fetched, inputs) = residuals
        read, last, (dy, of_reports) = self._read(leaves), leaves[0].shape[0] - 1, cotangents

        def body(n: jax.Array, carry: Any) -> Any:
            i = last - n
            dy, fetched, x, waiting, stacks = carry
            before = jnp.maximum(i - 1, 0)
            following, x_before = _fetch_far(read, before), _fetch(inputs, before)
            stacks = _write_all(stacks, waiting, jnp.minimum(i + 1, last))
            _, pull = jax.vjp(self._layer, x, self._whole(read, fetched, i))
            dx, gradients = pull((dy, jax.tree.map(partial(_cotangent, i), of_reports)))
            return dx, following, x_before, [_row_major(*one) for one in zip(self._split(gradients), self._specs, strict=True)], stacks

        waiting = [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]  # overwritten by the gradient of the last layer
        x, stacks = _fetch(inputs, jnp.int32(last)), [(empty_on_host if is_on_host(a) else jnp.zeros)(a.shape, a.dtype) for a in leaves]
        dx, _, _, waiting, stacks = lax.fori_loop(0, last + 1, body, (dy, fetched, x, waiting, stacks))
        return dx, _write_all(stacks, waiting, jnp.int32(0))

    def _read(self, leaves: Leaves) -> list[jax.Array]:
        return [leaf if weight is None else weight for leaf, weight in zip(leaves, self._weights, strict=True)]

    def _whole(self, read: Leaves, fetched: Leaves, i: jax.Array) -> list[jax.Array]:
        """All leaves of layer i, of which those in host memory are `fetched`."""
        far = iter(fetched)
        return self._split([next(far) if is_on_host(stack) else _fetch(stack, i) for stack in read])

    def _split(self, leaves: Leaves) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return list(leaves)
        return [lax.with_sharding_constraint(leaf, spec) for leaf, spec in zip(leaves, self._specs, strict=True)]


def _row_major(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`gradient` with its dims in memory in their order, as arguments of programs are. XLA:TPU would write a stack as a matmul makes it,
    and then copy the whole stack through HBM for the update. In a `shard_map`: the partitioner gathers around layout constraints.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None or mesh.abstract_device.platform != "tpu":
        return gradient
    layout = Layout(tuple(range(gradient.ndim)))
    return jax.shard_map(lambda x: with_layout_constraint(x, layout), in_specs=spec, out_specs=spec, check_vma=False)(gradient)


def _fetch_far(stacks: Leaves, i: jax.Array) -> list[jax.Array]:
    """Layer i of the stacks that are in host memory."""
    return [_fetch(stack, i) for stack in stacks if is_on_host(stack)]


def _write_all(stacks: Leaves, rows: Leaves, i: jax.Array) -> list[jax.Array]:
    def write(stack: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, to_host(row) if is_on_host(stack) else row, i, 0)

    return list(map(write, stacks, rows))


def _fetch(stack: jax.Array, i: jax.Array) -> jax.Array:
    row = lax.dynamic_index_in_dim(stack, i, keepdims=False)
    return to_device(row) if is_on_host(stack) else row


def _cotangent(i: jax.Array, stacked: Any) -> Any:
    """Cotangent of layer i; zeros of float0 for integers."""
    if stacked.dtype == jax.dtypes.float0:
        return np.zeros(stacked.shape[1:], jax.dtypes.float0)
    return lax.dynamic_index_in_dim(stacked, i, keepdims=False)
