"""Moments of an optimizer in bfloat16 or 8 bits: read as float32 before each update, and rounded after it.

Any optax transformation can be wrapped that keeps a moment under one of the names below and the name of its parameter. Codes have the shape
of their parameter, scales are shorter along one dim; both lie under its name, so they are split as it is (`state_shardings`).

The 8 bits are the dynamic map of Dettmers 2021 (arXiv 2110.02861, section 1.3): codes with steps that grow with the number, and a scale
for each row. The largest decade of a row, (0.1, 1] of its scale, has 64 values, the next 32, and so on down to one; a sign takes a bit,
and without one there are twice as many. The values are the upper ends of equal intervals, not their middles as in the paper, so that the
scale, its negative and zero are exact. Both directions are arithmetic: on TPUs a table of 256 values would be read one element at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int8, Int32, UInt8, UInt32

from maxlm.config.part import FAST, FIRST, SECOND, SLOW
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.mesh import RULES
from maxlm.config.sections.optimizer_state import FLOAT32, OptimizerStateConfig
from maxlm.models import abstract_parameters
from maxlm.models.adapters import leaf as leaf_of
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import STACKED, Names
from maxlm.training.rounding import random_bits, to_bfloat16, uniform
from maxlm.training.state_paths import path_of


def decades(signed: bool) -> int:
    """Decades below the scale that have values."""
    return 7 if signed else 8


def scales_of(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """The largest size along `dim` of float32 x, which stays with size 1."""
    return jnp.max(jnp.abs(x), axis=dim, keepdims=True)


def encode(
    x: Float[Array, "..."], scales: Float[Array, "..."], *, signed: bool, random: UInt32[Array, "..."] | None = None
) -> Int8[Array, "..."] | UInt8[Array, "..."]:
    """Codes of float32 x, at most as large as its `scales`: of the nearest value or, with `random`, of one of its two neighbours. Without a
    sign, x >= 0, and only 0 itself is stored as 0: a second moment divides.
    """
    share = jnp.abs(x) / jnp.where(scales > 0, scales, 1.0)
    code = jnp.floor(_place(share, decades(signed)) + (0.5 if random is None else uniform(random)))
    code = jnp.clip(code, 0.0 if signed else (share > 0).astype(jnp.float32), 2.0 ** decades(signed) - 1)
    return (jnp.where(x < 0, -code, code) if signed else code).astype(jnp.int8 if signed else jnp.uint8)


def decode(codes: Array, scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """The numbers that are stored, float32."""
    numbers, signed = codes.astype(jnp.float32), codes.dtype == jnp.int8
    share = _value(jnp.abs(numbers), decades(signed))
    return (jnp.where(numbers < 0, -share, share) if signed else share) * scales


# Decade k of G, the smallest first, ends at 10^(k + 1 - G) and has the codes 2^k to 2^(k+1) - 1, the last of which stands for that end.


def _place(share: Array, count: int) -> Array:
    """The code of a share of the scale, in 0 to 1, with a fraction where it lies between two values."""
    place = share * 10.0 ** (count - 1)
    for k in range(1, count):
        start = 10.0 ** (k - count)
        place = jnp.where(share > start, 2**k - 1 + (share - start) * (2**k / (9 * start)), place)
    return place


def _value(code: Array, count: int) -> Array:
    """The share of the scale that a code >= 0 stands for."""
    value = code * 10.0 ** (1 - count)
    for k in range(1, count):
        start = 10.0 ** (k - count)
        value = jnp.where(code >= 2**k, start + (code - (2**k - 1)) * (9 * start / 2**k), value)
    return value


SHORTEST = 16  # dim that has scales: of shorter ones there would be too many
# Dims with elements of different kinds: tokens, positions and experts have scales of their own.
APART = ("vocab", "position", "expert", "choices", *STACKED)


class SmallState(NamedTuple):
    """State of the transformation within, its moments rounded. `scales`: the same tree, with the scales of 8-bit moments alone."""

    updates: Int32[Array, ""]  # so far: the random bits of rounding are a function of it
    inner: Any
    scales: Any


@dataclass(frozen=True)
class Storage:
    """Form in which one leaf is stored. `name`: its path, which random bits depend on; `dim`: along which 8-bit codes share a
    scale, None for bfloat16; `by_chance`: rounded stochastically.
    """

    name: str
    parameter: Names
    signed: bool
    dim: int | None
    by_chance: bool

    def read(self, stored: Array, scales: Array | None) -> Float[Array, "..."]:
        """The moment in float32."""
        return stored.astype(jnp.float32) if scales is None else decode(stored, scales)

    def scales(self, moment: Array) -> Array | None:
        """New scales of a moment, or None."""
        return None if self.dim is None else scales_of(moment, self.dim)

    def write(self, moment: Array, scales: Array | None, random: Array | None) -> Array:
        """The moment as it is stored."""
        if scales is None:
            return to_bfloat16(moment, random)
        return encode(moment, scales, signed=self.signed, random=random)


def in_small_state(
    inner: optax.GradientTransformation,
    axes: Parameters,
    first_row: Array | int,
    settings: OptimizerStateConfig | None,
    model: ModelConfig,
    seed: int,
) -> optax.GradientTransformation:
    """`inner` with its moments stored as `settings` say; itself if they are float32.

    `axes`: of the parameters. `first_row`: of theirs, if they are pieces of stacked ones. `seed`: of the rounding.
    """
    if settings is None or {settings.moments, settings.second} <= {FLOAT32, "factored"}:
        return inner
    moments = _SmallMoments(_forms(settings, inner, axes, abstract_parameters(model)), inner, seed, first_row)
    return optax.GradientTransformation(moments.init, moments.update)


class _SmallMoments:
    """`inner` and the form of every leaf of its state, None for what stays as it is."""

    def __init__(
        self, forms: tuple[list[Storage | None], Any], inner: optax.GradientTransformation, seed: int, first_row: Array | int
    ) -> None:
        self._inner, self._seed, self._first_row = inner, seed, first_row
        self._forms, self._tree = forms
        self._scaled = any(form is not None and form.dim is not None for form in self._forms)

    def init(self, params: Parameters) -> SmallState:
        """The first state, rounded."""
        moments = self._tree.flatten_up_to(self._inner.init(params))
        return self._stored(moments, self._scales(moments), jnp.zeros((), jnp.int32))

    def update(self, grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, SmallState]:
        """The update is computed twice where there are scales: only for its scales, and then from the same inputs behind a fence. So XLA
        keeps no moment in float32 between the two; both read a byte a number.
        """
        stored, scales = (self._tree.flatten_up_to(tree) for tree in (state.inner, state.scales))
        new = scales
        if self._scaled:
            new = self._scales(self._tree.flatten_up_to(self._inner.update(grads, self._read(stored, scales), params)[1]))
            grads, stored, scales, new = self._fenced(grads, stored, scales, new)
        updates, moments = self._inner.update(grads, self._read(stored, scales), params)
        return updates, self._stored(self._tree.flatten_up_to(moments), new, state.updates + 1)

    def _read(self, stored: list[Any], scales: list[Any]) -> Any:
        leaves = zip(self._forms, stored, scales, strict=True)
        return self._tree.unflatten([leaf if form is None else form.read(leaf, scale) for form, leaf, scale in leaves])

    def _scales(self, moments: list[Any]) -> list[Any]:
        return [None if form is None else form.scales(leaf) for form, leaf in zip(self._forms, moments, strict=True)]

    def _stored(self, moments: list[Any], scales: list[Any], updates: Int32[Array, ""]) -> SmallState:
        def write(form: Storage | None, moment: Array, scale: Array | None) -> Array:
            if form is None:
                return moment
            random = random_bits(self._seed, form.name, updates, moment.shape, self._first_row) if form.by_chance else None
            return form.write(moment, scale, random)

        stored = [write(*leaf) for leaf in zip(self._forms, moments, scales, strict=True)]
        return SmallState(updates, self._tree.unflatten(stored), self._tree.unflatten(scales))

    def _fenced(self, grads: Parameters, *of_state: list[Any]) -> tuple[Any, ...]:
        """The same arrays; those that belong to one parameter can be used once all of them are there."""
        paths: Any = jax.tree_util.tree_flatten_with_path(grads)[0]
        tree: Any = jax.tree.structure(grads)
        given = {path_of(path): leaf for path, leaf in paths}
        fenced = [list(leaves) for leaves in of_state]
        for parameter in dict.fromkeys(form.parameter for form in self._forms if form is not None):
            places = [place for place, form in enumerate(self._forms) if form is not None and form.parameter == parameter]
            group = given[parameter], [[leaves[place] for place in places] for leaves in fenced]
            given[parameter], passed = jax.lax.optimization_barrier(group)
            for leaves, own in zip(fenced, passed, strict=True):
                for place, leaf in zip(places, own, strict=True):
                    leaves[place] = leaf
        return jax.tree.unflatten(tree, list(given.values())), *fenced


def _forms(
    settings: OptimizerStateConfig, inner: optax.GradientTransformation, given: Parameters, shapes: Parameters
) -> tuple[list[Storage | None], Any]:
    """(form of every leaf of the state of `inner`, structure of this state), for parameters with the logical axes `given`. `shapes`: of all
    parameters.
    """
    named: Any = jax.tree_util.tree_flatten_with_path(given, is_leaf=lambda leaf: isinstance(leaf, tuple))
    axes = {path_of(path): names for path, names in named[0]}
    params = jax.tree.unflatten(named[1], [leaf_of(shapes, name) for name in axes])
    leaves, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(inner.init, params))
    chosen = {**dict.fromkeys((FIRST, FAST, SLOW), settings.moments), SECOND: settings.second}

    def form(path: Names, shape: tuple[int, ...]) -> Storage | None:
        start = next((i for i in range(1, len(path)) if path[i:] in axes and path[i - 1] in chosen), None)
        if start is None or not is_matrix(axes[path[start:]]):
            return None
        kind = chosen[path[start - 1]]
        dim = scaled_dim(axes[path[start:]], shape) if kind == "int8" else None
        rounded = kind == "bfloat16" or dim is not None
        by_chance = settings.rounds_by_chance(kind)
        return Storage(".".join(path), path[start:], path[start - 1] != SECOND, dim, by_chance) if rounded else None

    return [form(path_of(path), leaf.shape) for path, leaf in leaves], structure


def scaled_dim(names: Sequence[str], shape: Sequence[int]) -> int | None:
    """The dim of a parameter with these logical axes along which its 8-bit moments share a scale, the same on any mesh: one that no mesh
    splits, such as the dim of a head, or else the one that is split the least; None if all are short.

    Whole dims, since XLA:TPU fuses nothing across a reshape: cut in blocks, it kept every scale as a float32 for each element. Where a mesh
    splits the dim, devices send each other their largest.
    """
    able = [dim for dim, name in enumerate(names) if name not in APART and shape[dim] >= SHORTEST]
    return min(able, key=lambda dim: (bool(RULES[names[dim]]), names[dim] == "embed"), default=None)
