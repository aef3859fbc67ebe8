"""The one table of axes: which mesh axes split each logical axis of a tensor, and which settings give its size.

Read by the rules of the config, by the partition specs (`maxlm.parallel.sharding`) and by the search for a layout. No jax here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.schema import Config

BATCH_AXES = ("data", "fsdp", "expert")


class LogicalAxis(NamedTuple):
    """One row of the table."""

    mesh: tuple[str, ...] = ()  # mesh axes that split it, outermost first
    sizes: tuple[str, ...] = ()  # settings that give the size of such a dim; one in a section that is absent gives none
    reason: str = ""


LOGICAL_AXES: Mapping[str, LogicalAxis] = {
    "batch": LogicalAxis(BATCH_AXES, ("train.global_batch",)),
    "seq": LogicalAxis(("context",), ("data.seq_len",)),
    "kv_heads": LogicalAxis(("tensor",), ("model.n_kv_heads",), "each tensor shard needs whole key/value heads"),
    "heads": LogicalAxis(("tensor",), ("model.n_heads",)),
    "mlp": LogicalAxis(("tensor",), ("model.d_ff", "model.moe.d_ff")),
    "vocab": LogicalAxis(("tensor", "stage"), ("model.vocab_size",), "tables and the loss are split along it"),
    # Between tensor-parallel regions the sequence is split over `tensor`, too, and over `stage` where the vocabulary is split over it.
    "seq_between": LogicalAxis(("context", "tensor"), ("data.seq_len",), "split between tensor-parallel regions"),
    "seq_vocab": LogicalAxis(("context", "tensor", "stage"), ("data.seq_len",), "split where tokens are looked up"),
    # Width of a weight (ZeRO-3), at rest over a pipeline's stages too: by each of these axes that splits no other dim of the tensor.
    "embed": LogicalAxis(
        ("fsdp", "expert", "stage"),
        ("model.d_model", "model.latent.q_rank", "model.latent.kv_rank"),
        "every matrix is split along it",
    ),
    "embed_act": LogicalAxis(),  # width of activations, of norms and of biases: whole
    "expert": LogicalAxis(("expert",), ("model.moe.n_experts",), "each device of the axis holds whole experts"),
    "choices": LogicalAxis(),  # experts, where every device knows all of them
    "worker": LogicalAxis(("data",), ("diloco.workers",), "each device of the axis holds whole workers"),
    "head_dim": LogicalAxis(),
    "rank": LogicalAxis(),  # of adapters
    "position": LogicalAxis(),
    "layers": LogicalAxis(),
    "run": LogicalAxis(),
}
RULES: Mapping[str, tuple[str, ...]] = {name: axis.mesh for name, axis in LOGICAL_AXES.items()}


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def mesh_axes_of(axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that split each dim of a tensor with these logical axes. Raises KeyError for an unknown one."""
    if unknown := [name for name in axes if name is not None and name not in RULES]:
        raise KeyError(f"no logical axis {unknown[0]!r}: the table has {', '.join(RULES)}")
    taken = {axis for name in axes if name not in (None, "embed") for axis in RULES[name]}
    rules = [() if name is None else RULES[name] for name in axes]
    return tuple(tuple(axis for axis in rule if name != "embed" or axis not in taken) for name, rule in zip(axes, rules, strict=True))


class Dim(NamedTuple):
    """A size that the mesh splits."""

    field: str  # the setting that gives it
    size: int
    axis: LogicalAxis


def dims(config: Config) -> Iterator[Dim]:
    """Every size that a mesh may split, in the order of the table."""
    for axis in LOGICAL_AXES.values():
        for field in axis.sizes:
            size: Any = config
            for name in field.split("."):
                size = getattr(size, name, None)
            if isinstance(size, int):
                yield Dim(field, size, axis)


def largest(config: Config, axis: str, sizes: Mapping[str, int] | None = None) -> int:
    """Largest size that a mesh axis may have, together with the other axes of `sizes`; all its divisors are possible too."""
    others = {**(sizes or {}), axis: 1}
    parts = [(dim.size, math.prod(others.get(other, 1) for other in dim.axis.mesh)) for dim in dims(config) if axis in dim.axis.mesh]
    return math.gcd(*(size // math.gcd(size, product) for size, product in parts))
