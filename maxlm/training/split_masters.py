"""Master weights in two parts: a bfloat16 half that matmuls read as it is, and the difference of the master from it in 16 or 8 bits.

Both parts are integers of the same float32 pattern: master = half * 2^16 + difference * 2^(16 - bits). With 16 bits that is every float32;
with 8 the master has 24 bits, to which it is rounded after each update. The half is the bfloat16 nearest to the master, as a cast would
make it, but for ties: the even neighbour would leave 2^16 + 1 masters to one half, so they go away from zero.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Float, Int32

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.optimizer_state import OptimizerStateConfig
from maxlm.models import parameter_axes
from maxlm.models.adapters import leaf, put
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import Names
from maxlm.training.rounding import random_bits
from maxlm.training.state_paths import path_of
from maxlm.training.step import TrainState
from maxlm.training.stored_form import StoredForm
from maxlm.training.transform import Transform

RESIDUAL = "residual"  # entry of `TrainState.extra`: the differences; None for parameters that are no matrices, which stay float32
DIFFERENCES = {"split": jnp.dtype("int16"), "split24": jnp.dtype("int8")}


def difference_dtype(settings: OptimizerStateConfig | None) -> Any:
    """dtype of the differences; None if masters are float32."""
    return None if settings is None else DIFFERENCES.get(settings.masters)


def split(master: Float[Array, "..."], bits: int, random: Array | None = None) -> tuple[BFloat16[Array, "..."], Array]:
    """(half, difference of `bits` bits) of float32 masters. With 8 bits the master is rounded, by chance if there is `random`."""
    pattern, rest = jax.lax.bitcast_convert_type(master, jnp.uint32), 16 - bits
    if rest:
        up = jnp.uint32(1 << (rest - 1)) if random is None else random % (1 << rest)
        pattern = jnp.where(jnp.isfinite(master), pattern + up, pattern) >> rest
    half = (pattern + (1 << (bits - 1))) >> bits
    difference = (pattern - (half << bits)).astype(jnp.int32).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16), difference


def join(half: BFloat16[Array, "..."], difference: Array | None) -> Float[Array, "..."]:
    """The float32 masters; without a difference, `half` as it is."""
    if difference is None:
        return half
    bits = 8 * difference.dtype.itemsize
    pattern = jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) << bits
    pattern += difference.astype(jnp.int32).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(pattern << (16 - bits), jnp.float32)


class SplitMasters(Transform, StoredForm):
    """Masters in two parts between updates: gradients are computed with the halves, and the optimizer updates float32."""

    name, phase, by_parameter = RESIDUAL, "store", True

    def __init__(self, settings: OptimizerStateConfig, model: ModelConfig, seed: int) -> None:
        self._settings, self._model, self._seed, self._bits = settings, model, seed, 8 * difference_dtype(settings).itemsize

    @classmethod
    def from_config(cls, settings: OptimizerStateConfig, model: ModelConfig, train_seed: int) -> Self | None:
        return None if difference_dtype(settings) is None else cls(settings, model, train_seed)

    def first(self, params: Parameters) -> tuple[Parameters, Parameters]:
        in_two = jax.tree.map(lambda matrix: matrix or None, matrices(self._model))
        return self._split(params, in_two, None, 0)

    def shardings(self, params: Parameters, mesh: Mesh) -> Parameters:
        return jax.tree.map(lambda matrix, own: own if matrix else None, matrices(self._model), params)

    def read(self, params: Parameters, own: Any) -> Parameters:
        return join_all(params, own)

    def write(self, params: Parameters, own: Any, state: TrainState, first_row: Array | int) -> tuple[Parameters, Any]:
        return self._split(params, own, state.step, first_row)

    def _split(
        self, masters: Parameters, in_two: Any, step: Int32[Array, ""] | None, first_row: Array | int
    ) -> tuple[Parameters, Parameters]:
        """(halves, differences) after update `step`; masters for which the tree `in_two` holds None stay as they are."""
        paths: Any = jax.tree_util.tree_flatten_with_path(masters)[0]
        tree: Any = jax.tree.structure(masters)
        parts = [
            (master, None) if keep is None else self.stored(path_of(path), master, step, first_row)
            for (path, master), keep in zip(paths, tree.flatten_up_to(in_two), strict=True)
        ]
        halves, differences = zip(*parts, strict=True)
        return tree.unflatten(halves), tree.unflatten(differences)

    def stored(
        self, name: Names, master: Float[Array, "..."], step: Int32[Array, ""] | None, first_row: Array | int = 0
    ) -> tuple[BFloat16[Array, "..."], Array]:
        """The two parts of the masters of this name after update `step`, rounded by chance if the settings say so; before the first (None)
        to the nearest. `first_row`: of a piece.
        """
        by_chance = self._settings.rounds_by_chance(self._settings.masters) and self._bits == 8
        random = random_bits(self._seed, ".".join(name), step, master.shape, first_row) if by_chance and step is not None else None
        return split(master, self._bits, random)

    # Masters in a checkpoint.

    def asked(self, entries: Parameters) -> Parameters:
        """Ask for both parts of each matrix."""
        halves: Parameters = {}
        differences: Parameters = {}
        if "params" not in entries:
            return entries
        for path, wanted in jax.tree_util.tree_flatten_with_path(entries["params"])[0]:
            name, in_two = path_of(path), leaf(matrices(self._model), path_of(path))
            put(halves, name, jax.ShapeDtypeStruct(wanted.shape, jnp.bfloat16 if in_two else wanted.dtype, sharding=wanted.sharding))
            if in_two:
                dtype = difference_dtype(self._settings)
                put(differences, name, jax.ShapeDtypeStruct(wanted.shape, dtype, sharding=wanted.sharding))
        return {**entries, "params": halves, **({"extra": {RESIDUAL: differences}} if differences else {})}

    def restored(self, entries: Parameters) -> Parameters:
        """Join the parts."""
        if RESIDUAL not in entries.get("extra", {}):
            return entries
        params: Parameters = {}
        for path, half in jax.tree_util.tree_flatten_with_path(entries["params"])[0]:
            in_two = leaf(matrices(self._model), path_of(path))
            put(params, path_of(path), jax.jit(join)(half, leaf(entries["extra"][RESIDUAL], path_of(path))) if in_two else half)
        return {**entries, "params": params}


def matrices(model: ModelConfig) -> Parameters:
    """True for every parameter that matmuls read in bfloat16."""
    return jax.tree.map(is_matrix, parameter_axes(model), is_leaf=lambda leaf: isinstance(leaf, tuple))


def join_all(halves: Parameters, residual: Parameters) -> Parameters:
    """The float32 parameters."""
    return jax.tree.map(join, halves, residual)
