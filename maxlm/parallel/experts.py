"""Tokens travel to their experts and back.

On a device, the choices of its tokens are sorted by expert, and each expert computes rows that lie side by side: none is dropped and none
is padded. Over the mesh axis `expert` each device holds its share of the experts: it gathers the tokens of all devices along the axis,
computes what falls to its experts, and what they make of a token is summed while it is scattered back. How many rows fall to a device is
known only when it runs: it computes them in rounds of a fixed number of rows, of which one is enough while load is about even. So nothing
is ever dropped, and memory does not depend on the load.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.collectives import gather, scatter_sum
from maxlm.kernels.platform import LANES, device, logged
from maxlm.parallel.sharding import mesh_axes

# B batch, S sequence, T tokens of a device, D width, K choices of a token, E experts, R rows: choices, sorted by expert

AXIS = "expert"
FURTHER = "further_rounds_of_experts"  # what loops that an even load does not enter are called in a program
SLACK = 1.125  # rows of a round, of those that an even load would be

Axes = tuple[str, ...]
Weights = Mapping[str, jax.Array]
Compute = Callable[[Weights, jax.Array, jax.Array, jax.Array], jax.Array]  # (weights, x_RD, weight_R, rows of each expert) -> out_RD


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
    split = {name: tuple(mesh_axes(logical, mesh) for logical in of) for name, of in axes.items()}
    exchanged = mesh_axes("expert", mesh)
    if exchanged:
        logged("experts", "tokens are gathered", f"mesh.expert = {mesh.shape[AXIS]} splits the {n_experts} experts")
    else:
        logged("experts", "tokens stay", f"every device computes all {n_experts} experts")

    def local(weights: Weights, x_BSD: Array, experts_BSK: Array, weights_BSK: Array) -> Array:
        whole = {name: _whole(weight, axes[name], split[name]) for name, weight in weights.items()}
        if inside:
            x_BSD, experts_BSK, weights_BSK = (gather(x, inside, 1) for x in (x_BSD, experts_BSK, weights_BSK))
        x_TD, experts_TK, weights_TK = (x.reshape(-1, x.shape[-1]) for x in (x_BSD, experts_BSK, weights_BSK))
        run = _gathered if exchanged else _at_home
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
    if axes[0] != "expert_embed":
        return weight
    weight = weight.reshape(len(weight), -1)
    return gather(weight, split[0], 0) if split[0] else weight


def _at_home(compute: Compute, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int) -> Array:
    """Every expert is here."""
    return _round(compute, x_TD.shape[0] * experts_TK.shape[1], weights, x_TD, weights_TK, _sort(experts_TK, n_experts), 0)


def _gathered(compute: Compute, weights: Weights, x_TD: Array, experts_TK: Array, weights_TK: Array, n_experts: int) -> Array:
    """Tokens of all devices along the axis come here, to those experts that are."""
    size = jax.lax.axis_size(AXIS)
    tokens, choices = experts_TK.shape
    own, rows = n_experts // size, rows_of_round(tokens, choices, n_experts, size)
    x_TD, experts_TK, weights_TK = (gather(x, AXIS, 0) for x in (x_TD, experts_TK, weights_TK))
    mine_TK = experts_TK - jax.lax.axis_index(AXIS) * own
    mine_TK = jnp.where((mine_TK >= 0) & (mine_TK < own), mine_TK, own)
    y_TD = _in_rounds(compute, rows, weights, x_TD, weights_TK, mine_TK, own)
    return scatter_sum(y_TD, AXIS, 0)


def rows_of_round(tokens: int, choices: int, n_experts: int, size: int) -> int:
    """Rows that a device computes at a time, where the axis has `size` of them and each has so many tokens."""
    if size == 1:
        return tokens * choices
    most = tokens * size * min(choices, n_experts // size)
    return min(most, -(-math.ceil(SLACK * tokens * choices) // 128) * 128)


# One device: rows in order of their expert.

# The choice at each place, the place of each choice, rows of each expert
Sorted = tuple[Int[Array, " N"], Int[Array, "T K"], Int[Array, " E"]]


def _sort(experts_TK: Int[Array, "T K"], n_experts: int) -> Sorted:
    flat_N = experts_TK.reshape(-1)
    choices_N = jnp.arange(flat_N.size, dtype=jnp.int32)
    _, order_N = jax.lax.sort_key_val(flat_N, choices_N)
    _, places_N = jax.lax.sort_key_val(order_N, choices_N)
    sizes_E = jnp.sum(flat_N[:, None] == jnp.arange(n_experts), axis=0, dtype=jnp.int32)
    return order_N, places_N.reshape(experts_TK.shape), sizes_E


def _round(
    compute: Compute, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, order: Sorted, start: Int[Array, ""] | int
) -> Float[Array, "T D"]:
    """What the experts make of the `rows` sorted choices from `start` on, added up for every token."""
    order_N, places_TK, sizes_E = order
    choices_R = jax.lax.dynamic_slice_in_dim(jnp.pad(order_N, (0, -order_N.size % rows)), start, rows)
    ends_E = jnp.clip(jnp.cumsum(sizes_E) - start, 0, rows)
    at_TK = places_TK - start
    x_RD, weight_R = _spread(x_TD, weights_TK, choices_R, at_TK)
    out_RD = compute(weights, x_RD, weight_R, jnp.diff(ends_E, prepend=0))
    return _collect(out_RD, choices_R, at_TK)


@jax.custom_vjp
def _spread(
    x_TD: Array, weights_TK: Array, choices_R: Int[Array, " R"], at_TK: Int[Array, "T K"]
) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
    """The token and the weight of every row. Its gradient is read from the rows, too: adding to places that repeat is slow everywhere."""
    return x_TD[choices_R // weights_TK.shape[1]], weights_TK.reshape(-1)[choices_R]


def _spread_forward(x_TD: Array, weights_TK: Array, choices_R: Array, at_TK: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return _spread(x_TD, weights_TK, choices_R, at_TK), (choices_R, at_TK)


def _spread_backward(saved: tuple[Array, Array], gradients: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    (choices_R, at_TK), (dx_RD, dweight_R) = saved, gradients
    there_TK = (at_TK >= 0) & (at_TK < dweight_R.size)
    dweights_TK = jnp.where(there_TK, dweight_R[jnp.where(there_TK, at_TK, 0)], 0)
    return _collect(dx_RD, choices_R, at_TK), dweights_TK, None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _collect(out_RD: Array, choices_R: Int[Array, " R"], at_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
    """The sum of each token's rows, in float32. Choices lead: a TPU adds whole tiles of tokens, and few of two rows."""
    at_KT = at_TK.T
    there_KT = (at_KT >= 0) & (at_KT < out_RD.shape[0])
    rows_KTD = out_RD[jnp.where(there_KT, at_KT, 0).reshape(-1)].reshape(*at_KT.shape, -1)
    return jnp.sum(jnp.where(there_KT[..., None], rows_KTD.astype(jnp.float32), 0), axis=0).astype(out_RD.dtype)


def _collect_backward(saved: tuple[Array, Array], dy_TD: Array) -> tuple[Array, None, None]:
    choices_R, at_TK = saved
    return dy_TD[choices_R // at_TK.shape[1]], None, None


_collect.defvjp(lambda out_RD, choices_R, at_TK: (_collect(out_RD, choices_R, at_TK), (choices_R, at_TK)), _collect_backward)


# Rounds: as many as the rows that fell to this device need.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 6))
def _in_rounds(
    compute: Compute, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, experts_TK: Int[Array, "T K"], n_experts: int
) -> Float[Array, "T D"]:
    """`_round` for all choices that are not none."""
    return _in_rounds_forward(compute, rows, weights, x_TD, weights_TK, experts_TK, n_experts)[0]


def _in_rounds_forward(
    compute: Compute, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, experts_TK: Array, n_experts: int
) -> tuple[Array, Any]:
    order = _sort(experts_TK, n_experts)
    y_TD, pull = jax.vjp(lambda *given: _round(compute, rows, *given, order, 0), weights, x_TD, weights_TK)  # type: ignore[call-arg]

    def another(start: Array, y_TD: Array) -> Array:
        return y_TD + _round(compute, rows, weights, x_TD, weights_TK, order, start)

    y_TD = _further(rows, order, another, y_TD)
    return y_TD, (pull, order, weights, x_TD, weights_TK)


def _in_rounds_backward(compute: Compute, rows: int, n_experts: int, saved: Any, dy_TD: Array) -> tuple[Any, ...]:
    pull, order, *given = saved

    def another(start: Array, gradients: Any) -> Any:
        _, pull = jax.vjp(lambda *given: _round(compute, rows, *given, order, start), *given)  # type: ignore[call-arg]
        return jax.tree.map(jnp.add, gradients, pull(dy_TD))

    return *_further(rows, order, another, pull(dy_TD)), None


_in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)


def _further(rows: int, order: Sorted, another: Callable[[Array, Any], Any], first: Any) -> Any:
    """`another(start, total)` for every round after the first, whose result is `first`. An even load needs none: plans know the name."""
    due = jnp.sum(order[2])

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        start, total = carry
        return start + rows, another(start, total)

    with jax.named_scope(FURTHER):
        return jax.lax.while_loop(lambda carry: carry[0] < due, body, (jnp.int32(rows), first))[1]
