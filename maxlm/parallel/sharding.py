"""Sharding is data: model code names logical axes, one table maps them to mesh axes (`LOGICAL_AXES`), one function translates."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxlm.config import ConfigError
from maxlm.config.sections.mesh import RULES


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pin the sharding of activation `x` to its logical axes. Without a current mesh, `x` as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh, "activation"))


def partition_spec(names: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh, tensor: str) -> PartitionSpec:
    """Partition spec over `mesh` of `tensor` with the logical axes `names`, one a dim; a dim of 1 (a token at a time) is not split.

    Raises ConfigError, naming the tensor, when a dim does not divide; ValueError when the axes do not fit the shape or two
    dims want one mesh axis; KeyError for an unknown logical axis.
    """
    if len(names) != len(shape):
        raise ValueError(f"{tensor} has shape {tuple(shape)} and {len(names)} logical axes {tuple(names)}")
    split = [axes if size > 1 else () for axes, size in zip(split_axes(names, mesh), shape, strict=True)]
    used: dict[str, int] = {}
    for dim, size in enumerate(shape):
        for axis in split[dim]:
            if axis in used:
                raise ValueError(f"{tensor}: mesh axis {axis!r} would split both dim {used[axis]} and dim {dim} of {tuple(names)}")
            used[axis] = dim
            if size % mesh.shape[axis]:
                rule = f"does not divide dim {dim} ({names[dim]}, {shape[dim]}) of {tensor}"
                raise ConfigError(f"mesh.{axis}", mesh.shape[axis], rule, f"use a divisor of {shape[dim]}")
            size //= mesh.shape[axis]
    return PartitionSpec(*split[: max(used.values(), default=-1) + 1])


def split_axes(names: Sequence[str | None], mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """Axes of `mesh` larger than 1 that split each dim of a tensor with these logical axes; inside a `jax.shard_map` not those that are
    manual there, where an array is a device's share already. Raises KeyError for an unknown logical axis.
    """
    manual = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    return tuple(tuple(axis for axis in dim if mesh.shape.get(axis, 1) > 1 and axis not in manual) for dim in mesh_axes_of(names))


def mesh_axes_of(axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that split each dim of a tensor with these logical axes. Raises KeyError for an unknown one."""
    if unknown := [name for name in axes if name is not None and name not in RULES]:
        raise KeyError(f"no logical axis {unknown[0]!r}: the table has {', '.join(RULES)}")
    taken = {axis for name in axes if name not in (None, "embed") for axis in RULES[name]}
    rules = [() if name is None else RULES[name] for name in axes]
    return tuple(tuple(axis for axis in rule if name != "embed" or axis not in taken) for name, rule in zip(axes, rules, strict=True))


def mesh_axes(logical: str, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """`split_axes` of one dim alone."""
    return split_axes((logical,), mesh)[0]


def context_size() -> int:
    """Devices over which the current mesh splits a sequence."""
    return jax.sharding.get_abstract_mesh().shape.get("context", 1)
