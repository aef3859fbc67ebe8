"""Attention in the kernel lab: ours and splash."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.kernel_lab.cases import Case, Kernel
from maxlm.kernels.attention import splash, tpu
from maxlm.kernels.attention.shapes import AttentionShape
from maxlm.kernels.attention.tpu import Blocks
from maxlm.kernels.platform import VMEM_BYTES

HEADS_OF_A_CASE = 2  # groups of heads that are compiled, one for each core of a megacore chip; all of them cost the same
BLOCKS = (Blocks(1024, 1024), Blocks(512, 512), Blocks(256, 256))  # that are compared; to compile more forward takes minutes, for 2% on v6e


def attention_cases(shape: AttentionShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """Gradients of one sequence's attention, by the blocks that run or by all that fit."""
    chosen = tpu.sizes_of(shape.seq_len, shape.head_dim, shape.window, device_kind)
    if not sweep:
        return [_case(shape, implementation, device_kind, chosen)]
    pairs = dict.fromkeys([chosen, *(blocks.within(shape.seq_len) for blocks in BLOCKS)])
    fitting = [pair for pair in pairs if not tpu.why_not(shape.seq_len, shape.head_dim, device_kind, pair)]
    return [_case(shape, implementation, device_kind, pair) for pair in fitting]


def _case(shape: AttentionShape, implementation: str, device_kind: str, blocks: Blocks) -> Case:
    share = shape.heads // shape.groups
    groups, segments = min(HEADS_OF_A_CASE, shape.groups), shape.segments(1)
    heads = groups * share
    at = {"scale": shape.head_dim**-0.5, "mask": shape.mask, "softcap": shape.softcap}
    if implementation == "flash":
        ranges = [np.asarray(tpu.block_ranges(jnp.stack([jnp.asarray(segments)] * 2, axis=1), block)) for block in blocks]
        scalars = {tpu.FORWARD: [ranges[0]], tpu.BACKWARD: [ranges[1]]}

        def run(*operands: jax.Array) -> jax.Array:
            return tpu.attention_flash(*operands, **at, device_kind=device_kind, blocks=blocks)[0]
    else:
        kernel = splash.splash_kernel(heads, shape.seq_len, shape.mask, shape.softcap, interpret=False, device_kind=device_kind)
        infos = {"splash_mha_fwd": kernel.fwd_mask_info, "splash_mha_dkv": kernel.dkv_mask_info}
        scalars = {
            part: [np.asarray(array) for array in (info.data_next, info.block_mask, info.mask_next) if array is not None]
            for part, info in infos.items()
            if info is not None
        }

        def run(*operands: jax.Array) -> jax.Array:
            return splash.attention_splash(*operands, **at, device_kind=device_kind)

    def gradients(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda q, k, v: run(q, k, v, operands[3]).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*operands[:3])

    pair = 2 * heads * shape.head_dim * shape.pairs(segments)
    flops = dict(zip(("forward", "backward"), (2 * pair, 5 * pair), strict=True))  # matmuls of them: two, and five
    called = map(str, blocks) if implementation == "flash" else ("", "")
    kernels = [
        Kernel(part, name, own, flops[part], of_part) for part, (name, own), of_part in zip(flops, scalars.items(), called, strict=True)
    ]
    sequence = (1, shape.seq_len)
    queries, keys = (*sequence, heads, shape.head_dim), (*sequence, groups, shape.head_dim)
    # All VMEM is the kernels': alone in a program, what they read would lie there, and take no time to come.
    options = {"xla_tpu_scoped_vmem_limit_kib": str(5 * VMEM_BYTES[device_kind] // 4 >> 10)}
    return Case(gradients, [(queries, "bfloat16"), (keys, "bfloat16"), (keys, "bfloat16"), (sequence, "int32")], kernels, options)
