"""Sharding is data: model code names logical axes, one table maps them to mesh axes, one function translates."""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from maxlm.config import ConfigError

BATCH_AXES = ("data", "fsdp", "expert")

RULES: Mapping[str, tuple[str, ...]] = {  # logical axis -> mesh axes, outermost first
    "batch": BATCH_AXES,
    "seq": ("context",),
    "seq_between": ("context", "tensor"),  # between tensor-parallel regions the sequence is split over `tensor` as well
    "embed": ("fsdp", "expert", "stage"),  # ZeRO-3: every matrix is split along its model width, at rest over a pipeline's stages too
    "table": ("fsdp", "expert"),  # the width of what is split along the vocabulary
    "router": ("fsdp", "expert", "stage"),  # the width that routers read
    "expert_embed": ("fsdp", "stage"),  # the width of experts
    "choices": (),  # experts, where every device knows all of them
    "embed_act": (),  # activations keep their width whole
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor", "stage"),
    "position": (),
    "expert": ("expert",),
    "layers": (),
    "worker": ("data",),  # those that train apart (optimizer.outer)
    "run": (),
}


def mesh_axes(logical: str, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of `mesh` larger than 1 that the logical axis is split over; inside a `jax.shard_map` not those that are manual there, where
    an array is a device's share already.
    """
    if logical not in RULES:
        raise KeyError(f"no logical axis {logical!r}: the table knows {', '.join(RULES)}")
    manual = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    return tuple(axis for axis in RULES[logical] if mesh.shape.get(axis, 1) > 1 and axis not in manual)


def partition_spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh, name: str) -> PartitionSpec:
    """How the tensor `name` with logical `axes`, one a dim, is split over `mesh`.

    Raises ConfigError, naming the tensor, when a dim does not divide; ValueError when the axes do not fit the shape or two
    dims want one mesh axis; KeyError for an unknown logical axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name} has shape {tuple(shape)} and {len(axes)} logical axes {tuple(axes)}")
    used: dict[str, int] = {}
    entries: list[tuple[str, ...] | str | None] = []
    for dim, (logical, size) in enumerate(zip(axes, shape, strict=True)):
        names = mesh_axes(logical, mesh) if logical is not None else ()
        for axis in names:
            if axis in used:
                raise ValueError(f"{name}: mesh axis {axis!r} would split both dim {used[axis]} and dim {dim} of {tuple(axes)}")
            used[axis] = dim
            degree = mesh.shape[axis]
            if size % degree:
                rule = f"does not divide dim {dim} ({logical}, {shape[dim]}) of {name}"
                raise ConfigError(f"mesh.{axis}", degree, rule, f"use a divisor of {shape[dim]}")
            size //= degree
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin the sharding of activation `x` to its logical axes. Without a current mesh, `x` as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, "activation"))
