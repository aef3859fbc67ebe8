"""The two compiled programs of generation: prompts in one pass, and a loop over single tokens with caches that are updated in place.

Prompts end at the same slot: they are padded on the left, so that each token is written to one slot for all rows. A slot before a row's
first is padding, which nothing attends to; a row's positions count from its first slot.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.inference.sampling import Numbers, Shape, sample
from maxlm.kernels.platform import device, multiplied
from maxlm.models import Caches, Decoder, bind, parameter_axes
from maxlm.models.adapters import merge
from maxlm.models.decoder import Block
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.parallel import constrain

# B batch, S slots of the prompts, T slots of the caches, V vocabulary


class Weights(NamedTuple):
    """Weights as they are read: the model without its layers, and every layer by itself, on CPUs with its matrices turned (`_turn`)."""

    model: Decoder
    blocks: tuple[Block, ...]


class Rows(NamedTuple):
    """Constants of the rows, and of their sampling."""

    first_B: Int[Array, " B"]  # slot of the first token
    seeds_B2: UInt32[Array, "B 2"]
    start: Int[Array, ""]  # slot of the first new token
    end: Int[Array, ""]  # token that ends a continuation
    numbers: Numbers


class State(NamedTuple):
    """State of the loop: tokens by slot, of which `slot` are known, and the caches of all but the last."""

    slot: Int[Array, ""]
    tokens_BT: Int[Array, "B T"]
    done_B: Bool[Array, " B"]
    seen_BV: Bool[Array, "B V"] | None  # tokens of the row so far, for the repetition penalty
    caches: Caches


@partial(jax.jit, static_argnums=(0, 1))
def prepare(config: ModelConfig, dtype: str, params: Parameters, model_state: Parameters) -> Weights:
    """Merge adapters, cast matrices to `dtype` and take the layers apart, once for all tokens: XLA:CPU copies what a loop takes out of a
    stack.
    """
    (params, model_state), config = merge(config, params, model_state), config.merged.dropless
    axes = parameter_axes(config)
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    cast = jax.tree.map(lambda axes, leaf: leaf.astype(dtype) if is_matrix(axes) else leaf, axes, params, is_leaf=is_axes)
    model = bind(config, cast, model_state)
    blocks = model.blocks()
    model.head, model.layers, model.tail, model.ahead = nnx.List([]), nnx.List([]), nnx.List([]), nnx.List([])
    return Weights(model, _turn(blocks, config.n_heads))


def _turn(blocks: tuple[Block, ...], heads: int, *, back: bool = False) -> tuple[Block, ...]:
    """On CPUs the matrices of these layers with the summed dims last in memory (see `_weights_first`), or the inverse."""
    if device()[0] != "cpu":
        return blocks

    def turn(variable: Any) -> Any:
        axes, value = variable.axes, variable[...]
        if not is_matrix(axes) or "expert" in axes:
            return variable
        if axes[-1] != "embed":
            return variable.replace(jnp.moveaxis(value, -1 if back else 0, 0 if back else -1))
        if back:  # heads were merged: XLA would transpose them apart in memory
            return variable.replace(value.T if len(axes) == 2 else value.T.reshape(heads, -1, len(value)))
        return variable.replace(value.reshape(-1, value.shape[-1]).T)

    return jax.tree.map(turn, blocks, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _weights_first(spec: str, x: Array, w: Array, precision: jax.lax.Precision | None = None) -> Array:
    """`jnp.einsum` with w as the first operand: XLA:CPU then takes two thirds of the time for a few rows, if w lies in memory with the
    summed dims last.
    """
    operands, result = spec.split("->")
    of_x, of_w = operands.split(",")
    first = "".join(dim for dim in of_w if dim in result) + "".join(dim for dim in of_x if dim in result)
    return jnp.einsum(f"{first}->{result}", jnp.einsum(f"{of_w},{of_x}->{first}", w, x, precision=precision))


@partial(jax.jit, static_argnums=(0, 1, 2))
def prefill(
    shape: Shape,
    precision: PrecisionConfig,
    length: int,
    weights: Weights,
    rows: Rows,
    tokens_BS: Int[Array, "B S"],
    done_B: Bool[Array, " B"],
) -> State:
    """Read the prompts, with caches for `length` slots, and draw the first token. `done_B`: rows that are there to fill the batch."""
    batch, slots = tokens_BS.shape
    seen_BV = None
    if shape.penalty:
        token_BS = jnp.where(jnp.arange(slots) < rows.first_B[:, None], weights.model.config.vocab_size, tokens_BS)  # padding is none
        seen_BV = jnp.zeros((batch, weights.model.config.vocab_size), bool)
        seen_BV = seen_BV.at[jnp.arange(batch)[:, None], token_BS].set(True, mode="drop")
    caches = weights.model.empty_caches(batch, length)
    state = State(jnp.int32(slots), jnp.pad(tokens_BS, ((0, 0), (0, length - slots))), done_B, seen_BV, caches)
    return _draw(shape, rows, *_advance(precision, weights, rows, tokens_BS, jnp.int32(0), state))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def decode(shape: Shape, precision: PrecisionConfig, weights: Weights, rows: Rows, state: State, until: Int[Array, ""]) -> State:
    """Generate until `until` slots are known, or all rows are done."""

    def one(state: State) -> State:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BT, state.slot - 1, 1, axis=1)
        known_B1 = jnp.minimum(last_B1, weights.model.config.vocab_size - 1)  # an end that is no token of the model is not looked up
        return _draw(shape, rows, *_advance(precision, weights, rows, known_B1, state.slot - 1, state))

    return _whole(jax.lax.while_loop(lambda state: (state.slot < until) & ~jnp.all(state.done_B), one, state))


@partial(jax.jit, static_argnums=(1,))
def grow(state: State, length: int) -> State:
    """The same state with room for `length` slots; old and new caches are there together."""
    more = length - state.tokens_BT.shape[1]

    tokens_BT = jnp.pad(state.tokens_BT, ((0, 0), (0, more)))
    return _whole(state._replace(tokens_BT=tokens_BT, caches=tuple(cache.grown(more) for cache in state.caches)))


def _advance(
    precision: PrecisionConfig, weights: Weights, rows: Rows, tokens_BS: Int[Array, "B S"], slot: Int[Array, ""], state: State
) -> tuple[State, Float[Array, "B V"]]:
    """Logits after the last of the tokens, the first of which is in `slot`, and the state with their keys and values."""
    model = weights.model
    slots_S, slots_T = slot + jnp.arange(tokens_BS.shape[1]), jnp.arange(state.tokens_BT.shape[1])
    positions_BS = slots_S - rows.first_B[:, None]
    with jax.default_matmul_precision(precision.float32_matmul):
        output = model(
            constrain(tokens_BS, "batch", "seq"),
            jnp.maximum(positions_BS, 0),
            (positions_BS >= 0).astype(jnp.int32),
            cached_BT=(slots_T >= rows.first_B[:, None]).astype(jnp.int32),
            caches=state.caches,
            precision=precision,
            einsum=_weights_first if device()[0] == "cpu" and tokens_BS.shape[1] == 1 else jnp.einsum,
            blocks=_turn(weights.blocks, model.config.n_heads, back=True),
        )
        operands = multiplied(model.unembedding_VD, output.x_BSD[:, -1])
        scores_VB = jnp.einsum("VD,BD->VB", *operands, preferred_element_type=jnp.float32)
    cap = model.config.logits_softcap
    return state._replace(caches=output.caches), scores_VB.T if cap is None else cap * jnp.tanh(scores_VB.T / cap)


def _draw(shape: Shape, rows: Rows, state: State, last_BV: Float[Array, "B V"]) -> State:
    """Draw the token of the next slot."""
    token_B = sample(shape, rows.numbers, rows.seeds_B2, state.slot - rows.start, last_BV, state.seen_BV)
    token_B = jnp.where(state.done_B, rows.end, token_B)
    seen_BV = None if state.seen_BV is None else state.seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)
    tokens_BT = jax.lax.dynamic_update_slice_in_dim(state.tokens_BT, token_B[:, None], state.slot, axis=1)
    done_B = state.done_B | (token_B == rows.end)
    return _whole(State(state.slot + 1, tokens_BT, done_B, seen_BV, state.caches))


def _whole(state: State) -> State:
    """The state with what the host reads on every device: of an array that is split over processes, each could read its part alone."""
    return state._replace(tokens_BT=constrain(state.tokens_BT, None, None), done_B=constrain(state.done_B, None))
