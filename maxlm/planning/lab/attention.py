"""Attention in the kernel lab: ours and splash."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.kernels import attention
from maxlm.kernels.attention import splash, tpu
from maxlm.kernels.attention.shapes import AttentionShape
from maxlm.planning.lab.cases import Case, Kernel

HEADS_OF_A_CASE = 2  # groups of heads that are compiled, one for each core of a megacore chip; all of them cost the same


def attention_case(shape: AttentionShape, implementation: str, device_kind: str) -> Case:
    """Gradients of one sequence's attention."""
    share = shape.heads // shape.groups
    groups, segments = min(HEADS_OF_A_CASE, shape.groups), shape.segments(1)
    heads = groups * share
    options = {"scale": shape.head_dim**-0.5, "window": shape.window, "softcap": None}
    if implementation == "flash":
        ranges = [np.asarray(tpu.block_ranges(jnp.asarray(segments), block)) for block in tpu.blocks_of(shape.seq_len)]
        scalars = {tpu.FORWARD: [ranges[0]], tpu.BACKWARD: [ranges[1]]}

        def run(*operands: jax.Array) -> jax.Array:
            return tpu.attention_flash(*operands, **options, device_kind=device_kind)[0]
    else:
        kernel = splash.splash_kernel(heads, shape.seq_len, shape.window, None, interpret=False, device_kind=device_kind)
        infos = {"splash_mha_fwd": kernel.fwd_mask_info, "splash_mha_dkv": kernel.dkv_mask_info}
        scalars = {
            part: [np.asarray(array) for array in (info.data_next, info.block_mask, info.mask_next) if array is not None]
            for part, info in infos.items()
            if info is not None
        }

        def run(*operands: jax.Array) -> jax.Array:
            return splash.attention_splash(*operands, **options, device_kind=device_kind)

    def gradients(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda q, k, v: run(q, k, v, operands[3]).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*operands[:3])

    pair = 2 * heads * shape.head_dim * shape.pairs(segments)
    flops = dict(zip(("forward", "backward"), (2 * pair, 5 * pair), strict=True))  # matmuls of them: two, and five
    kernels = [Kernel(part, name, own, flops[part]) for part, (name, own) in zip(flops, scalars.items(), strict=True)]
    sequence = (1, shape.seq_len)
    queries, keys = (*sequence, heads, shape.head_dim), (*sequence, groups, shape.head_dim)
    return Case(gradients, [(queries, "bfloat16"), (keys, "bfloat16"), (keys, "bfloat16"), (sequence, "int32")], kernels)


def gpu_attention_case(shape: AttentionShape, implementation: str, heads: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Gradients of one sequence's attention of at most so many query heads on a GPU, and their arguments' shapes."""
    groups = max(heads * shape.groups // shape.heads, 1)
    sizes = [(1, shape.seq_len, number, shape.head_dim) for number in (groups * shape.heads // shape.groups, groups, groups)]

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "window": shape.window, "implementation": implementation}
        return attention(q, k, v, query_segments_BS=segments, key_segments_BT=segments, **options).astype(jnp.float32).sum()

    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    return jax.grad(total, argnums=(0, 1, 2)), [*arguments, jax.ShapeDtypeStruct((1, shape.seq_len), jnp.int32)]
