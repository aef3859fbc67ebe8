"""Tokens travel to their experts and back.

On a device, the choices of its tokens are sorted by expert, and each expert computes rows that lie side by side: none is dropped and none
is padded (`expert_rows`). Over the mesh axis `expert` each device holds its share of the experts. Either it gathers the tokens of all
devices along the axis, computes what falls to its experts, and what they make of a token is summed while it is scattered back. Or every
choice is sent to where its expert is, and what that made of it is sent back.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.collectives import gather, scatter_sum
from maxlm.kernels.platform import LANES, device, logged
from maxlm.parallel.expert_rows import Compute, Sorted, Weights, collect, compute_rows, even_load, in_rounds, sort, spread
from maxlm.parallel.sharding import mesh_axes, split_axes

# B batch, S sequence, T tokens of a device, D width, K choices of a token, E experts, P devices of the axis, R rows

AXIS = "expert"
SLACK = 1.125  # rows of a round, of those that an even load would be

Axes = tuple[str, ...]


def through_experts(
    compute: Compute,
    weights: Weights,
    axes: Mapping[str, Axes],
    x_BSD: Float[Array, "B S D"],
    experts_BSK: Int[Array, "B S K"],
    weights_BSK: Float[Array, "B S K"],
    n_experts: int,
) -> Float[Array, "B S D"]:
    """The sum over a token's choices of what those experts make of it; choice `n_experts` is none.

    `compute` is given rows sorted by expert and, of weights [width, expert, inside], [width, expert x inside] with the width whole; it
    multiplies what it makes of a row by the row's weight; rows beyond all groups give 0.
    Where `tensor` splits what is inside an expert, it gives a part of the sum. x is split as between tensor-parallel regions, and so is the
    result. `axes`: logical axes of each of the `weights`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, seq, between = (mesh_axes(name, mesh) for name in ("batch", "seq", "seq_between"))
    inside = tuple(axis for axis in between if axis not in seq)
    split = {name: split_axes(of, mesh) for name, of in axes.items()}
    exchanged = mesh_axes("expert", mesh)
    choices = experts_BSK.shape[-1]
    if not exchanged:
        run = _at_home
        logged("experts", "tokens stay", f"every device computes all {n_experts} experts")
    elif sends(mesh.shape[AXIS], choices, device()[0]):
        run = _sent
        logged(
            "experts",
            "choices are sent",
            f"mesh.expert = {mesh.shape[AXIS]} splits the {n_experts} experts, of which a token meets {choices}",
        )
    else:
        run = _gathered
        logged("experts", "tokens are gathered", f"mesh.expert = {mesh.shape[AXIS]} splits the {n_experts} experts")

    def local(weights: Weights, x_BSD: Array, experts_BSK: Array, weights_BSK: Array) -> Array:
        whole = {name: _whole(weight, axes[name], split[name]) for name, weight in weights.items()}
        if inside:
            x_BSD, experts_BSK, weights_BSK = (gather(x, inside, 1) for x in (x_BSD, experts_BSK, weights_BSK))
        x_TD, experts_TK, weights_TK = (x.reshape(-1, x.shape[-1]) for x in (x_BSD, experts_BSK, weights_BSK))
        y_BSD = run(compute, whole, x_TD, experts_TK, weights_TK, n_experts).reshape(x_BSD.shape)
        return scatter_sum(y_BSD, inside, 1) if inside else y_BSD

    if mesh.empty:
        return local(weights, x_BSD, experts_BSK, weights_BSK)
    rows = P(batch or None, between or None)
    specs = {name: P(*(dim or None for dim in of)) for name, of in split.items()}
    island = jax.shard_map(local, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False)
    return island(weights, x_BSD, experts_BSK, weights_BSK)


def _whole(weight: Array, axes: Axes, split: tuple[Axes, ...]) -> Array:
    """A weight with its width, the first dim, gathered, and experts side by side; they and what is inside them stay split.

    What is inside is padded to whole lanes on a TPU. All of it is done to what is here: a TPU moves what is gathered no further.
    """
    if axes[-1] == "mlp" and device()[0] == "tpu":
        weight = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[-1] % LANES)])
    if axes[0] != "embed":
        return weight
    weight = weight.reshape(len(weight), -1)
    return gather(weight, split[0], 0) if split[0] else weight


def _at_home(compute: Compute, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int) -> Array:
    """Every expert is here."""
    return compute_rows(compute, experts_TK.size, weights, x_TD, weights_TK, sort(experts_TK, n_experts), 0)


def _gathered(compute: Compute, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int) -> Array:
    """Tokens of all devices along the axis come here, to those experts that are."""
    size = jax.lax.axis_size(AXIS)
    tokens, choices = experts_TK.shape
    own, rows = n_experts // size, rows_of_round(tokens, choices, n_experts, size)
    x_TD, experts_TK, weights_TK = (gather(x, AXIS, 0) for x in (x_TD, experts_TK, weights_TK))
    mine_TK = experts_TK - jax.lax.axis_index(AXIS) * own
    order = sort(jnp.where((mine_TK >= 0) & (mine_TK < own), mine_TK, own), own)
    with even_load(tokens * choices):
        y_TD = in_rounds(partial(compute_rows, compute, rows), rows, weights, x_TD, weights_TK, order, jnp.sum(order[2]))
    return scatter_sum(y_TD, AXIS, 0)


def _sent(compute: Compute, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int) -> Array:
    """Every choice goes to the device that has its expert, and what that makes of it comes back."""
    size = jax.lax.axis_size(AXIS)
    tokens, choices = experts_TK.shape
    rows = rows_of_round(tokens, choices, n_experts, size) // size
    order = sort(experts_TK, n_experts)
    mesh = jax.sharding.get_abstract_mesh()
    most = jnp.max(jnp.sum(order[2].reshape(size, -1), axis=1))
    due = jax.lax.pmax(most, tuple(axis for axis, devices in mesh.shape.items() if devices > 1))  # all meet in every round
    with even_load(tokens * choices):
        return in_rounds(partial(_exchange, compute, rows), rows, weights, x_TD, weights_TK, order, due)


def _exchange(
    compute: Compute, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, order: Sorted, start: Int[Array, ""] | int
) -> Float[Array, "T D"]:
    """Of the choices for each device `rows`, from `start` on, there and back. They arrive by sender, and are sorted by expert again."""
    size = jax.lax.axis_size(AXIS)
    choices_N, places_TK, sizes_E = order
    ends_PE = jnp.cumsum(sizes_E.reshape(size, -1), axis=1)
    first_P = jnp.cumsum(ends_PE[:, -1]) - ends_PE[:, -1] + start
    there_TK = jnp.sum(places_TK[..., None] >= (jnp.cumsum(ends_PE[:, -1])), axis=-1)  # the device of each choice; `size`: none
    at_TK = places_TK - first_P[jnp.minimum(there_TK, size - 1)]
    at_TK = jnp.where((at_TK >= 0) & (at_TK < rows) & (there_TK < size), there_TK * rows + at_TK, -1)
    choices_R = choices_N[jnp.minimum(first_P[:, None] + jnp.arange(rows), choices_N.size - 1).reshape(-1)]

    def over(rows_RX: Array) -> Array:
        return jax.lax.all_to_all(rows_RX.reshape(size, -1, *rows_RX.shape[1:]), AXIS, 0, 0).reshape(rows_RX.shape)

    x_RD, weight_R = (over(sent) for sent in spread(x_TD, weights_TK, choices_R, at_TK))
    ends_PE = over(jnp.clip(ends_PE - start, 0, rows))
    expert_PR = jnp.sum(jnp.arange(rows)[:, None] >= ends_PE[:, None], axis=-1)  # beyond a sender's rows: none
    arrived = sort(expert_PR.reshape(-1, 1), ends_PE.shape[1])
    return collect(over(compute_rows(compute, len(x_RD), weights, x_RD, weight_R[:, None], arrived, 0)), choices_R, at_TK)


def sends(size: int, choices: int, platform: str) -> bool:
    """Whether to send `choices` of every token to experts split over so many devices, rather than every token to all of them.

    By the busiest link. To a device, size - 1 tokens arrive for each of its own if all are gathered, and about `choices` if they are sent.
    A switch takes either straight there. On a torus a gathered token is handed on from neighbour to neighbour, while what is sent to one
    device passes those between: with a square of devices, a link carries (size - 1) / 4 gathered tokens, and choices sqrt(size) / 8 sent.
    """
    if platform == "tpu":
        return size - 1 > choices * max(1.0, math.sqrt(size) / 2)
    return size - 1 > choices


def rows_of_round(tokens: int, choices: int, n_experts: int, size: int) -> int:
    """Rows that a device computes at a time, where the axis has `size` of them and each has so many tokens: a multiple of `size`."""
    if size == 1:
        return tokens * choices
    most = tokens * size * min(choices, n_experts // size)
    multiple = math.lcm(128, size)
    return min(most, -(-math.ceil(SLACK * tokens * choices) // multiple) * multiple)
