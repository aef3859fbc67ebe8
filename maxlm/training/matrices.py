"""Hidden matrices as an optimizer of whole matrices sees them: stacked, two dims each, every device with matrices of its own."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import STACKED
from maxlm.parallel.sharding import mesh_axes
from maxlm.training.state_paths import path_of

Names = tuple[str, ...]
SCOPE = "matrices"  # in op_names, of the updates that move whole matrices to one device each


class MatrixDims(NamedTuple):
    """Dims of one hidden matrix. `others`: all that is neither the model's width nor counts matrices (`stacked`)."""

    stacked: tuple[int, ...]
    embed: int
    others: tuple[int, ...]

    def as_matrices(self, x: Array) -> Float[Array, "B E O"]:
        """The matrices, one after another; rows are the model's width."""
        ordered = x.transpose(*self.stacked, self.embed, *self.others)
        sides = (math.prod(x.shape[dim] for dim in dims) for dims in (self.stacked, (self.embed,), self.others))
        return ordered.reshape(*sides)

    def as_parameter(self, x: Float[Array, "B E O"], shape: Sequence[int]) -> Array:
        """The inverse of `as_matrices`."""
        order = (*self.stacked, self.embed, *self.others)
        return x.reshape([shape[dim] for dim in order]).transpose([order.index(dim) for dim in range(len(order))])

    def squares(self, shape: Sequence[int], *, left: bool) -> tuple[int, ...]:
        """Shape of one square matrix for each matrix, of the side of the model's width or of the other: with as many dims as the parameter,
        so that meshes split it by the rules for that.
        """
        side = shape[self.embed] if left else math.prod(shape[dim] for dim in self.others)
        sizes = dict(enumerate(shape)) | dict.fromkeys(self.others, 1) | {self.embed: side, self.others[0]: side}
        return tuple(sizes[dim] for dim in range(len(shape)))


def hidden_matrix(names: Names) -> MatrixDims | None:
    """Dims of a hidden matrix with these logical axes; None for any other parameter."""
    if "embed" not in names or "vocab" in names or not is_matrix(names):
        return None
    embed = names.index("embed")
    stacked = tuple(i for i, name in enumerate(names) if name in ("expert", *STACKED))
    others = tuple(i for i in range(len(names)) if i != embed and i not in stacked)
    return MatrixDims(stacked, embed, others) if others else None


def hidden_matrices(axes: Parameters) -> Mapping[Names, MatrixDims]:
    """Name -> dims of every hidden matrix among parameters with these logical axes."""
    named = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    found = {path_of(path): hidden_matrix(names) for path, names in named}
    return {name: dims for name, dims in found.items() if dims is not None}


def devices() -> int:
    """Devices that `spread` divides matrices among."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in _free_axes())


def spread(stacks: Sequence[Float[Array, "_ E O"]]) -> Float[Array, "B E O"]:
    """All matrices of the stacks, with zeros after them, whole ones on every device: one exchange, instead of sums over devices in each
    product.
    """
    x, count = jnp.concatenate(stacks), devices()
    if count == 1:
        return x
    padded = jnp.pad(x, ((0, -len(x) % count), (0, 0), (0, 0)))
    return jax.lax.with_sharding_constraint(_rows_split(padded), PartitionSpec(_free_axes()))


def gather(x: Float[Array, "B E O"], counts: Sequence[int]) -> list[Float[Array, "_ E O"]]:
    """The inverse of `spread`, for stacks of so many matrices: every device has its rows of all of them."""
    ends = list(accumulate(counts))
    return jnp.split((x if devices() == 1 else _rows_split(x))[: ends[-1]], ends[:-1])


def each_on_its_device(function: Callable[..., Any], stacks: Any, same: Array) -> Any:
    """`function(stacks, same)` of stacks that are spread, on each device of the matrices that it has; `same` is equal on all. Nothing is
    exchanged, also where the partitioner would do it for a loop over matrices or a decomposition.
    """
    axes = _free_axes()
    if not axes:
        return function(stacks, same)
    split = PartitionSpec(axes)
    run = jax.shard_map(function, in_specs=(split, PartitionSpec()), out_specs=split, axis_names=set(axes), check_vma=False)
    return run(stacks, same)


def _rows_split(x: Float[Array, "B E O"]) -> Float[Array, "B E O"]:
    """Split as parameters are: along the model's width."""
    mesh, free = jax.sharding.get_abstract_mesh(), _free_axes()
    axes = tuple(axis for axis in mesh_axes("embed", mesh) if axis in free)
    if x.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(None, axes, PartitionSpec.UNCONSTRAINED))


def _free_axes() -> tuple[str, ...]:
    """Mesh axes that the partitioner divides work along: all of more than one device but the axes of workers (`diloco`)."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind is AxisType.Auto and mesh.shape[axis] > 1)
