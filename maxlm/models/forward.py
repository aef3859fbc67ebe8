"""Options of a forward pass that do not change its result."""

from dataclasses import dataclass

from maxlm.config.schema import ContextAttention, MemoryConfig

_KEEP_ALL = MemoryConfig(remat="none")


@dataclass(frozen=True)
class Forward:
    """Options of a forward pass.

    `memory`: the remat policy. `context`: how attention works on a sequence that the mesh splits; `maxlm.parallel.context` has the order of
    tokens that it needs. `summed`: manual mesh axes (`jax.shard_map`) that divide the batch, to sum statistics over. `generates`: one token
    after another, with caches.
    """

    memory: MemoryConfig = _KEEP_ALL
    context: ContextAttention = "ring"
    summed: tuple[str, ...] = ()
    generates: bool = False
