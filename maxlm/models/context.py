"""Inputs and options of a forward pass that all layers share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import ContextAttention, MemoryConfig, PrecisionConfig
from maxlm.kernels.attention import Form

# B batch, S sequence, T cached positions, F half the rotary dims

Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines
Scan = Callable[..., tuple[Array, Any]]  # as jax.lax.scan over stacked layers: (period, hidden states, layers) -> (hidden states, reports)
_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockContext:
    """Inputs shared by all blocks, which carry no gradient, and the options of a forward pass."""

    angles: dict[bool, Angles | None]  # rotary angles of global (False) and local (True) layers; None with learned positions
    segment_ids_BS: Int[Array, "B S"]  # 0 is padding
    random_BS: UInt32[Array, "B S"] | None = None  # seed of the router's jitter for each token, in training
    prefix_BS: Bool[Array, "B S"] | None = None  # True in the prefix of a document, for masks of form "prefix"
    precision: PrecisionConfig = field(default=PrecisionConfig(), metadata=_STATIC)  # of matmuls
    memory: MemoryConfig = field(default=MemoryConfig(remat="none"), metadata=_STATIC)  # what is saved for the backward pass
    scan: Scan | None = field(default=None, metadata=_STATIC)  # over the layers of the pattern, in place of jax.lax.scan
    strategy: ContextAttention = field(default="ring", metadata=_STATIC)  # of attention where the mesh splits the sequence
    form: Form = field(default="causal", metadata=_STATIC)  # of the attention masks
    summed: tuple[str, ...] = field(default=(), metadata=_STATIC)  # mesh axes that are manual here and split the batch
    cached_BT: Int[Array, "B T"] | None = None  # segment ids of the positions of the caches, in generation
    # Weights as the first operand of every matmul. XLA:CPU then takes two thirds of the time for a few rows, if the weights lie in memory
    # with the summed dims last.
    weights_first: bool = field(default=False, metadata=_STATIC)
