"""Attention on GPUs in the analytic model: our kernels where they run, else XLA's operations, which write every score to memory."""

from maxlm.config.schema import ModelConfig
from maxlm.cost import efficiency, model_shapes
from maxlm.hardware.chips import Chip

# Matmuls of a tile: one kernel forward, two backward, of which each computes the scores again (`maxlm.kernels.attention.gpu`).
FORWARD, BACKWARD = 2, 7
# XLA's: backward, the scores of a block of queries are computed again, and four matmuls make the gradients.
XLA_BACKWARD = 6
# Bytes a score that XLA's operations move, (forward, backward), and that a score occupies while it exists: of Llama 3.2 1B as XLA:GPU
# compiled it for B200 (jax 0.10.2; docs/lab/truth_gpu.md).
SCORE_MOVES = (24, 58)
SCORE_BYTES = 4
QUERY_BLOCK = 1024  # queries that have scores in memory at one time (`maxlm.kernels.attention.xla`)


def kernel_runs(model: ModelConfig, seq_len: int, compute: str, chip: Chip) -> bool:
    """True if our attention kernels for Hopper run this model on `chip`, with matmuls in `compute`."""
    from maxlm.kernels.attention.gpu import why_not  # its compiler takes a third of a second to load

    return not why_not(seq_len, model.head_dim, compute, chip.device_kinds[0])


def seconds_a_token(model: ModelConfig, seq_len: int, chip: Chip, flash: bool, peak: float, hbm: float) -> tuple[float, float]:
    """Seconds of attention of a token in all layers on one device, (forward, backward); `peak` in FLOP/s, `hbm` in bytes/s.

    `flash`: by kernels that keep scores on the chip and skip what causality hides.
    """
    if flash:
        flops = model_shapes.attention_flops(model, seq_len)  # forward, of what the masks leave
        forward_s = flops / (efficiency.gpu_attention_share(model.head_dim) * peak)
        return forward_s, BACKWARD / FORWARD * forward_s
    heads = model.n_heads * (model.n_layers + model.mtp_depth)
    scores = heads * seq_len  # of a token: XLA's operations compute those that causality hides as well
    matmul_s = (model.head_dim + model_shapes.value_dim(model)) * scores / (efficiency.gpu_matmul_share(chip) * peak)
    forward, backward = (scores * moved / hbm for moved in SCORE_MOVES)
    return FORWARD * matmul_s + forward, XLA_BACKWARD * matmul_s + backward


def score_bytes(n_heads: int, seq_len: int, rows: int) -> int:
    """Bytes of the scores of one layer that exist at one time, of `rows` tokens of a microbatch, heads not split."""
    block = QUERY_BLOCK if seq_len % QUERY_BLOCK == 0 else seq_len
    return SCORE_BYTES * n_heads * max(rows // seq_len, 1) * min(block, seq_len) * seq_len
