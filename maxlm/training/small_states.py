"""Moments of an optimizer in bfloat16 or 8 bits: read as float32 before each update, and rounded after it.

Any optax transformation whose state keeps a moment under `mu` or `nu` and the name of its parameter can be wrapped. Codes have the shape of
their parameter, scales are shorter along one dim; both lie under its name, so they are split as it is (`program.state_shardings`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from maxlm.config.axes import RULES
from maxlm.config.optimizer_state import OptimizerStateConfig
from maxlm.config.schema import Config
from maxlm.models import abstract_parameters, parameter_axes
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import STACKED
from maxlm.training.dynamic_map import Blocks, blocks_of, decode, encode
from maxlm.training.rounding import random_bits, to_bfloat16

FIRST, SECOND = "mu", "nu"  # names of the moments in the states of optax
# Dims whose elements are of different things: tokens, positions and experts have scales of their own.
APART = ("vocab", "position", "expert", "choices", *STACKED)


class SmallState(NamedTuple):
    """State of the transformation within, its moments rounded. `scales`: the same tree, with the scales of 8-bit moments alone."""

    updates: Int32[Array, ""]  # so far: the random bits of rounding are a function of it
    inner: Any
    scales: Any


@dataclass(frozen=True)
class Storage:
    """Form in which one leaf is stored. `name`: its path, of which random bits are a function; no `blocks`: bfloat16."""

    name: str
    signed: bool
    blocks: Blocks | None

    def read(self, stored: Array, scales: Array | None) -> Float[Array, "..."]:
        return stored.astype(jnp.float32) if self.blocks is None or scales is None else decode(stored, scales, self.blocks)

    def write(self, moment: Array, seed: int, updates: Int32[Array, ""] | None) -> tuple[Array, Array | None]:
        """(stored array, scales). Rounded to the nearest without `updates`."""
        random = None if updates is None else random_bits(seed, self.name, updates, moment.shape)
        if self.blocks is None:
            return to_bfloat16(moment, random), None
        return encode(moment, self.blocks, signed=self.signed, random=random)


def in_small_state(config: Config, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with its moments stored as `optimizer.state` says; itself if they are float32."""
    settings = config.optimizer.state
    if settings is None or {settings.moments, settings.second} <= {"float32", "factored"}:
        return inner
    forms, tree = _forms(config, settings, inner)
    seed, by_chance = config.train.seed, settings.rounding == "stochastic"

    def write(moments: Any, updates: Int32[Array, ""]) -> SmallState:
        leaves = tree.flatten_up_to(moments)
        pairs = [
            (leaf, None) if form is None else form.write(leaf, seed, updates if by_chance else None)
            for form, leaf in zip(forms, leaves, strict=True)
        ]
        stored, scales = zip(*pairs, strict=True)
        return SmallState(updates, tree.unflatten(stored), tree.unflatten(scales))

    def init(params: Parameters) -> SmallState:
        return write(inner.init(params), jnp.zeros((), jnp.int32))

    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, SmallState]:
        stored, scales = tree.flatten_up_to(state.inner), tree.flatten_up_to(state.scales)
        wide = [leaf if form is None else form.read(leaf, scale) for form, leaf, scale in zip(forms, stored, scales, strict=True)]
        updates, moments = inner.update(grads, tree.unflatten(wide), params)
        return updates, write(moments, state.updates + 1)

    return optax.GradientTransformation(init, update)


def _forms(config: Config, settings: OptimizerStateConfig, inner: optax.GradientTransformation) -> tuple[list[Storage | None], Any]:
    """(form of every leaf of the state of `inner`, None for what stays as it is; structure of that state)."""
    named = jax.tree_util.tree_flatten_with_path(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    axes = {path_of(path): names for path, names in named}
    leaves, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(inner.init, abstract_parameters(config.model)))
    chosen = {FIRST: settings.moments, SECOND: settings.second}

    def form(path: tuple[str, ...], shape: tuple[int, ...]) -> Storage | None:
        start = next((i for i in range(1, len(path)) if path[i:] in axes and path[i - 1] in chosen), None)
        if start is None or not is_matrix(axes[path[start:]]):
            return None
        names, kind = axes[path[start:]], chosen[path[start - 1]]
        whole, allowed = tuple(not RULES[name] for name in names), tuple(name not in APART for name in names)
        stored = partial(Storage, ".".join(path), path[start - 1] == FIRST)
        if kind == "bfloat16":
            return stored(None)
        blocks = blocks_of(shape, whole, allowed) if kind == "int8" else None
        return None if blocks is None else stored(blocks)

    return [form(path_of(path), leaf.shape) for path, leaf in leaves], structure


def path_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names along a pytree path; an optimizer keeps a moment under the name of its parameter."""
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)
