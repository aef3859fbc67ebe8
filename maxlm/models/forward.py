"""Options of a forward pass."""

from dataclasses import dataclass

from maxlm.config.schema import ContextAttention, MemoryConfig
from maxlm.kernels.attention.mask import Form

_KEEP_ALL = MemoryConfig(remat="none")


@dataclass(frozen=True)
class Forward:
    """Options of one forward pass.

    memory: what is saved for the backward pass.
    context: strategy of attention where the mesh splits the sequence; `maxlm.parallel.context` says in which order it takes tokens.
    form: form of the attention masks.
    summed: mesh axes that are manual here (`jax.shard_map`) and split the batch.
    generates: token after token, with caches.
    """

    memory: MemoryConfig = _KEEP_ALL
    context: ContextAttention = "ring"
    form: Form = "causal"
    summed: tuple[str, ...] = ()
    generates: bool = False


DEFAULT = Forward()
