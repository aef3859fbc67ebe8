"""How a forward pass is run, beside what it computes."""

from dataclasses import dataclass

from maxlm.config.schema import ContextAttention, MemoryConfig

_ALL_KEPT = MemoryConfig(remat="none")


@dataclass(frozen=True)
class Forward:
    """`memory`: what is kept for the backward pass. `context`: how attention meets a sequence that the mesh splits; see
    `maxlm.parallel.context` for the order of tokens that it wants. `summed`: axes of the mesh that are manual here (`jax.shard_map`), over
    which the batch of this pass goes on. `generates`: token after token, with caches.
    """

    memory: MemoryConfig = _ALL_KEPT
    context: ContextAttention = "ring"
    summed: tuple[str, ...] = ()
    generates: bool = False
