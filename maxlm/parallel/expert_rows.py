"""Rows of a device: the choices of its tokens sorted by expert, computed together, and summed for each token.

Where the number of rows is known only at run time, they are computed in rounds of a fixed number of rows, of which one is enough while load
is about even. So nothing is ever dropped, and memory does not depend on the load.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.platform import RARELY

# T tokens, D width, K choices of a token, N all choices, E experts, R rows: choices, sorted by expert

# Named scope by which cost models, which assume an even load, find the rows that it fills of a round.
EVEN = re.compile(r"experts_of_(\d+)_rows")

Weights = Mapping[str, Any]  # arrays, or quantized (`maxlm.precision.grouped.ExpertWeight`)
Compute = Callable[[Weights, jax.Array, jax.Array, jax.Array], jax.Array]  # (weights, x_RD, weight_R, rows of each expert) -> out_RD
# The choice at each place, the place of each choice, rows of each expert
Sorted = tuple[Int[Array, " N"], Int[Array, "T K"], Int[Array, " E"]]
Round = Callable[[Weights, jax.Array, jax.Array, Sorted, jax.Array | int], jax.Array]  # (weights, x_TD, weights_TK, order, start) -> y_TD


def sort(experts_TK: Int[Array, "T K"], n_experts: int) -> Sorted:
    """Sort choices by expert; choice `n_experts` is none, and last."""
    flat_N = experts_TK.reshape(-1)
    choices_N = jnp.arange(flat_N.size, dtype=jnp.int32)
    _, order_N = jax.lax.sort_key_val(flat_N, choices_N)
    _, places_N = jax.lax.sort_key_val(order_N, choices_N)
    sizes_E = jnp.sum(flat_N[:, None] == jnp.arange(n_experts), axis=0, dtype=jnp.int32)
    return order_N, places_N.reshape(experts_TK.shape), sizes_E


def even_load(rows: int) -> AbstractContextManager[None]:
    """Named scope of rounds that hold more than the `rows` of an even load."""
    return jax.named_scope(f"experts_of_{rows}_rows")


def compute_rows(
    compute: Compute, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, order: Sorted, start: Int[Array, ""] | int
) -> Float[Array, "T D"]:
    """Outputs of the experts for the `rows` sorted choices from `start` on, summed for every token."""
    order_N, places_TK, sizes_E = order
    choices_R = jax.lax.dynamic_slice_in_dim(jnp.pad(order_N, (0, -order_N.size % rows)), start, rows)
    ends_E = jnp.clip(jnp.cumsum(sizes_E) - start, 0, rows)
    at_TK = places_TK - start
    x_RD, weight_R = spread(x_TD, weights_TK, choices_R, at_TK)
    out_RD = compute(weights, x_RD, weight_R, jnp.diff(ends_E, prepend=0))
    return collect(out_RD, choices_R, at_TK)


@jax.custom_vjp
def spread(
    x_TD: Array, weights_TK: Array, choices_R: Int[Array, " R"], at_TK: Int[Array, "T K"]
) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
    """The token and the weight of every row. Its gradient is a gather from the rows, too: scatter-adds are slow everywhere."""
    return x_TD[choices_R // weights_TK.shape[1]], weights_TK.reshape(-1)[choices_R]


def _spread_backward(saved: tuple[Array, Array], gradients: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    (choices_R, at_TK), (dx_RD, dweight_R) = saved, gradients
    valid_TK = (at_TK >= 0) & (at_TK < dweight_R.size)
    dweights_TK = jnp.where(valid_TK, dweight_R[jnp.where(valid_TK, at_TK, 0)], 0)
    return collect(dx_RD, choices_R, at_TK), dweights_TK, None, None


spread.defvjp(lambda x_TD, weights_TK, choices_R, at_TK: (spread(x_TD, weights_TK, choices_R, at_TK), (choices_R, at_TK)), _spread_backward)


@jax.custom_vjp
def collect(out_RD: Array, choices_R: Int[Array, " R"], at_TK: Int[Array, "T K"]) -> Float[Array, "T D"]:
    """The sum of each token's rows, in float32. Choices are the leading dim: a TPU then adds whole tiles of tokens."""
    at_KT = at_TK.T
    valid_KT = (at_KT >= 0) & (at_KT < out_RD.shape[0])
    rows_KTD = out_RD[jnp.where(valid_KT, at_KT, 0).reshape(-1)].reshape(*at_KT.shape, -1)
    rows_KTD = jax.lax.optimization_barrier(rows_KTD)  # or XLA converts before it reshapes, in an array of float32
    return jnp.sum(jnp.where(valid_KT[..., None], rows_KTD.astype(jnp.float32), 0), axis=0).astype(out_RD.dtype)


def _collect_backward(saved: tuple[Array, Array], dy_TD: Array) -> tuple[Array, None, None]:
    choices_R, at_TK = saved
    return dy_TD[choices_R // at_TK.shape[1]], None, None


collect.defvjp(lambda out_RD, choices_R, at_TK: (collect(out_RD, choices_R, at_TK), (choices_R, at_TK)), _collect_backward)


# Rounds: as many as this device's rows need.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_rounds(
    one: Round, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, order: Sorted, due: Int[Array, ""]
) -> Float[Array, "T D"]:
    """The sum of `one` from every multiple of `rows` below `due` on, and from 0 on in any case."""
    return _in_rounds_forward(one, rows, weights, x_TD, weights_TK, order, due)[0]


def _in_rounds_forward(
    one: Round, rows: int, weights: Weights, x_TD: Array, weights_TK: Array, order: Sorted, due: Array
) -> tuple[Array, Any]:
    y_TD, pull = jax.vjp(lambda *operands: one(*operands, order, 0), weights, x_TD, weights_TK)  # type: ignore[call-arg]

    def another(start: Array, y_TD: Array) -> Array:
        return y_TD + one(weights, x_TD, weights_TK, order, start)

    return _further(rows, due, another, y_TD), (pull, order, due, weights, x_TD, weights_TK)


def _in_rounds_backward(one: Round, rows: int, saved: Any, dy_TD: Array) -> tuple[Any, ...]:
    pull, order, due, *operands = saved

    leaves, structure = jax.tree.flatten(pull(dy_TD))
    real = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]  # integers of quantized weights have no gradient

    def another(start: Array, gradients: list[Array]) -> list[Array]:
        _, pull = jax.vjp(lambda *operands: one(*operands, order, start), *operands)  # type: ignore[call-arg]
        return list(map(jnp.add, gradients, itertools.compress(jax.tree.leaves(pull(dy_TD)), real)))

    total = iter(_further(rows, due, another, list(itertools.compress(leaves, real))))
    return *jax.tree.unflatten(structure, [next(total) if has else leaf for leaf, has in zip(leaves, real, strict=True)]), None, None


in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)


def _further(rows: int, due: Array, another: Callable[[Array, Any], Any], first: Any) -> Any:
    """`another(start, total)` for every round after the first; `first`: the first round's result. An even load needs none."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        start, total = carry
        return start + rows, another(start, total)

    with jax.named_scope(RARELY):
        return jax.lax.while_loop(lambda carry: carry[0] < due, body, (jnp.int32(rows), first))[1]
