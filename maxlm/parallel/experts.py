"""Expert parallelism: tokens are sent to their experts and outputs back.

On a device, the choices of its tokens are sorted by expert, and each expert computes contiguous rows: none is dropped and none is padded
(`expert_rows`). Over the mesh axis `expert` each device holds its share of the experts. Either it gathers the tokens of all devices along
the axis, computes the choices of its own experts, and the outputs are reduce-scattered; or every choice is sent to the device of its expert
by an all-to-all, and its output back.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.collectives import gather, scatter_sum
from maxlm.kernels.platform import LANES, device, logged
from maxlm.parallel.expert_rows import Compute, Sorted, Weights, collect, compute_rows, even_load, in_rounds, sort, spread
from maxlm.parallel.quantized_rows import RowFormats, exchange, exchange_in, gather_in, scatter_sum_from
from maxlm.parallel.sharding import mesh_axes, split_axes
from maxlm.precision import ExpertWeight, Quantized

# B batch, S sequence, T tokens of a device, D width, K choices of a token, E experts, P devices of the axis, R rows

AXIS = "expert"
SLACK = 1.125  # rows of a round, of those that an even load would be

Axes = tuple[str, ...]
_OWN = RowFormats()  # the dtype of the rows


def through_experts(
    compute: Compute,
    weights: Weights,
    axes: Mapping[str, Axes],
    x_BSD: Float[Array, "B S D"],
    experts_BSK: Int[Array, "B S K"],
    weights_BSK: Float[Array, "B S K"],
    n_experts: int,
    formats: RowFormats = _OWN,
) -> Float[Array, "B S D"]:
    """Weighted sum of the outputs of each token's experts; choice `n_experts` is none. `formats`: of rows that travel along the axis.

    `compute` gets rows sorted by expert and weights [width, expert, hidden] as [width, expert x hidden] with the width whole; it returns
    the output of each row times the row's weight, 0 for rows beyond all groups; a partial sum where `tensor` splits the hidden dim.
    x and the result are split as between tensor-parallel regions. `axes`: logical axes of each of the `weights`, of which some
    may be quantized (`ExpertWeight`), and are then gathered in 8 bits.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, seq, between = (mesh_axes(name, mesh) for name in ("batch", "seq", "seq_between"))
    inside = tuple(axis for axis in between if axis not in seq)
    alone = x_BSD.shape[1] == 1  # a token at a time: there is no sequence to split
    split = {name: split_axes(of, mesh) for name, of in axes.items()}
    exchanged = mesh_axes("expert", mesh)
    choices = experts_BSK.shape[-1]
    if not exchanged:
        run = _local
        logged("experts", "tokens stay", f"every device computes all {n_experts} experts")
    elif sends(mesh.shape[AXIS], choices, device()[0]):
        run = _send_choices
        logged(
            "experts",
            "choices are sent",
            f"mesh.expert = {mesh.shape[AXIS]} splits the {n_experts} experts, of which a token is routed to {choices}",
        )
    else:
        run = _gather_tokens
        logged("experts", "tokens are gathered", f"mesh.expert = {mesh.shape[AXIS]} splits the {n_experts} experts")

    def local(weights: Weights, x_BSD: Array, experts_BSK: Array, weights_BSK: Array) -> Array:
        whole = {name: _whole_or_quantized(weight, axes[name], split[name]) for name, weight in weights.items()}
        if inside and not alone:
            x_BSD, experts_BSK, weights_BSK = (gather(x, inside, 1) for x in (x_BSD, experts_BSK, weights_BSK))
        x_TD, experts_TK, weights_TK = (x.reshape(-1, x.shape[-1]) for x in (x_BSD, experts_BSK, weights_BSK))
        y_BSD = run(compute, formats, whole, x_TD, experts_TK, weights_TK, n_experts).reshape(x_BSD.shape)
        if alone and inside:
            return jax.lax.psum(y_BSD, inside)
        return scatter_sum(y_BSD, inside, 1) if inside else y_BSD

    if mesh.empty:
        return local(weights, x_BSD, experts_BSK, weights_BSK)
    rows = P(batch or None, None if alone else between or None)
    specs = {name: _specs(weight, split[name]) for name, weight in weights.items()}
    island = jax.shard_map(local, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False)
    return island(weights, x_BSD, experts_BSK, weights_BSK)


def _specs(weight: Any, split: tuple[Axes, ...]) -> Any:
    """Partition spec of a weight, or of each array of a quantized one: not along dims with one scale."""
    return jax.tree.map(lambda leaf: P(*(None if size == 1 else dim or None for size, dim in zip(leaf.shape, split, strict=True))), weight)


def _whole_or_quantized(weight: Any, axes: Axes, split: tuple[Axes, ...]) -> Any:
    """`_whole` of a weight; of a quantized one each of its arrays, and scales for every number of a result."""
    if not isinstance(weight, ExpertWeight):
        return _whole(weight, axes, split)

    def whole(form: Quantized | None, summed: int) -> Quantized | None:
        if form is None:
            return None
        (width, experts, hidden), axis = form.values.shape, split[0]
        if summed == 0:
            scale_EN = jnp.broadcast_to(form.scale[0], (experts, hidden))
            return Quantized(_whole(form.values, axes, split), jnp.pad(scale_EN, [(0, 0), (0, _padding(scale_EN))]))
        scale_KE = jnp.broadcast_to(form.scale[..., 0], (width, experts))
        return Quantized(_whole(form.values, axes, split), (gather(scale_KE, axis, 0) if axis else scale_KE).T)

    size, hidden = weight.config.hadamard, weight.w.shape[2]
    if weight.transposed and size is not None and hidden % size:
        raise ValueError(f"precision.matmul.hadamard = {size} does not divide the {hidden} hidden units of an expert that a device has")
    inner, outer = (2, 0) if weight.transposed else (0, 2)
    forward, backward = whole(weight.forward, inner), whole(weight.backward, outer)
    assert forward is not None
    return replace(weight, w=_whole(weight.w, axes, split), forward=forward, backward=backward)


def _whole(weight: Array, axes: Axes, split: tuple[Axes, ...]) -> Array:
    """A weight with its width, the first dim, gathered, and experts side by side; experts and hidden dim stay split.

    On TPU the hidden dim is padded to a multiple of `LANES`. Padding and reshaping come before the gather, so that the gathered array
    is not copied again.
    """
    if axes[-1] == "mlp":
        weight = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, _padding(weight))])
    if axes[0] != "embed":
        return weight
    weight = weight.reshape(len(weight), -1)
    return gather(weight, split[0], 0) if split[0] else weight


def _padding(x: Array) -> int:
    """Hidden units, the last dim, that are added on TPU."""
    return -x.shape[-1] % LANES if device()[0] == "tpu" else 0


def _local(
    compute: Compute, formats: RowFormats, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int
) -> Array:
    """Compute with all experts on this device."""
    return compute_rows(compute, experts_TK.size, weights, x_TD, weights_TK, sort(experts_TK, n_experts), 0)


def _gather_tokens(
    compute: Compute, formats: RowFormats, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int
) -> Array:
    """Gather the tokens of all devices along the axis, and compute the choices of this device's experts."""
    size = jax.lax.axis_size(AXIS)
    tokens, choices = experts_TK.shape
    own, rows = n_experts // size, rows_of_round(tokens, choices, n_experts, size)
    x_TD = gather_in(x_TD, AXIS, formats.rows)
    experts_TK, weights_TK = (gather(x, AXIS, 0) for x in (experts_TK, weights_TK))
    mine_TK = experts_TK - jax.lax.axis_index(AXIS) * own
    order = sort(jnp.where((mine_TK >= 0) & (mine_TK < own), mine_TK, own), own)
    with even_load(tokens * choices):
        y_TD = in_rounds(partial(compute_rows, compute, rows), rows, weights, x_TD, weights_TK, order, jnp.sum(order[2]))
    return scatter_sum_from(y_TD, AXIS, formats.gradients)


def _send_choices(
    compute: Compute, formats: RowFormats, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int
) -> Array:
    """Send every choice to the device of its expert by an all-to-all, and the output back."""
    size = jax.lax.axis_size(AXIS)
    tokens, choices = experts_TK.shape
    rows = rows_of_round(tokens, choices, n_experts, size) // size
    order = sort(experts_TK, n_experts)
    mesh = jax.sharding.get_abstract_mesh()
    most = jnp.max(jnp.sum(order[2].reshape(size, -1), axis=1))
    due = jax.lax.pmax(most, tuple(axis for axis, devices in mesh.shape.items() if devices > 1))  # every device takes part in every round
    with even_load(tokens * choices):
        return in_rounds(partial(_exchange_round, compute, formats, rows), rows, weights, x_TD, weights_TK, order, due)


def _exchange_round(
    compute: Compute,
    formats: RowFormats,
    rows: int,
    weights: Weights,
    x_TD: Array,
    weights_TK: Array,
    order: Sorted,
    start: Int[Array, ""] | int,
) -> Float[Array, "T D"]:
    """One round: `rows` choices for each device, from `start` on, sent there and back. On arrival they are sorted by expert again."""
    size = jax.lax.axis_size(AXIS)
    choices_N, places_TK, sizes_E = order
    ends_PE = jnp.cumsum(sizes_E.reshape(size, -1), axis=1)
    first_P = jnp.cumsum(ends_PE[:, -1]) - ends_PE[:, -1] + start
    device_TK = jnp.sum(places_TK[..., None] >= (jnp.cumsum(ends_PE[:, -1])), axis=-1)  # the device of each choice; `size`: none
    at_TK = places_TK - first_P[jnp.minimum(device_TK, size - 1)]
    at_TK = jnp.where((at_TK >= 0) & (at_TK < rows) & (device_TK < size), device_TK * rows + at_TK, -1)
    choices_R = choices_N[jnp.minimum(first_P[:, None] + jnp.arange(rows), choices_N.size - 1).reshape(-1)]

    x_RD, weight_R = spread(x_TD, weights_TK, choices_R, at_TK)
    x_RD, weight_R = exchange_in(x_RD, AXIS, formats.rows, formats.gradients), exchange(weight_R, AXIS)
    ends_PE = exchange(jnp.clip(ends_PE - start, 0, rows), AXIS)
    expert_PR = jnp.sum(jnp.arange(rows)[:, None] >= ends_PE[:, None], axis=-1)  # beyond a sender's rows: none
    arrived = sort(expert_PR.reshape(-1, 1), ends_PE.shape[1])
    out_RD = compute_rows(compute, len(x_RD), weights, x_RD, weight_R[:, None], arrived, 0)
    return collect(exchange_in(out_RD, AXIS, formats.outputs, formats.gradients), choices_R, at_TK)


def sends(size: int, choices: int, platform: str) -> bool:
    """True if an all-to-all of `choices` a token is cheaper than an all-gather of tokens, with experts split over `size` devices.

    By the busiest link. A device receives size - 1 tokens for each of its own by an all-gather, about `choices` by an all-to-all. A switch
    delivers either directly. On a torus a gathered token is passed from neighbour to neighbour, while what is sent to one device passes
    those in between: with a square of devices, a link carries (size - 1) / 4 gathered tokens, and choices sqrt(size) / 8 sent.
    """
    if platform == "tpu":
        return size - 1 > choices * max(1.0, math.sqrt(size) / 2)
    return size - 1 > choices


def rows_of_round(tokens: int, choices: int, n_experts: int, size: int) -> int:
    """Rows that a device computes in one round, with `size` devices of `tokens` tokens each: a multiple of `size`."""
    if size == 1:
        return tokens * choices
    most = tokens * size * min(choices, n_experts // size)
    multiple = math.lcm(128, size)
    return min(most, -(-math.ceil(SLACK * tokens * choices) // multiple) * multiple)
