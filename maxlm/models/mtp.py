"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import BETWEEN, BlockContext, Norm, linear, matrix_size, parameter
from maxlm.models.saved_tensors import JOIN, Matmul, matmul_by

# B batch, S sequence, D width


class FutureTokenModule(nnx.Module):
    """Predict one token further: hidden states and the embedding of the token that they predicted, each normed, are projected by one matrix
    each, added, and pass one more block. Embedding and unembedding are the decoder's.
    """

    def __init__(self, config: ModelConfig, block: Any) -> None:
        width, std = config.d_model, config.init_std
        self.hidden_norm = Norm(width, config)
        self.token_norm = Norm(width, config)
        self.hidden_DD = parameter((width, width), ("embed", "embed_act"), std)
        self.token_DD = parameter((width, width), ("embed", "embed_act"), std)
        self.block = block
        self.final_norm = Norm(width, config, multiplier=config.output_scale)

    def join(self, x_BSD: Float[Array, "B S D"], token_BSD: Float[Array, "B S D"], context: BlockContext) -> Float[Array, "B S D"]:
        """Input of the block, from hidden states (`MtpConfig.reads`) and token embeddings."""
        x_BSD = linear(context, "BSD,DE->BSE", self.hidden_norm(x_BSD), self.hidden_DD, reads=BETWEEN, writes=BETWEEN)
        return x_BSD + linear(context, "BSD,DE->BSE", self.token_norm(token_BSD), self.token_DD, reads=BETWEEN, writes=BETWEEN)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward, the unembedding not counted."""
        return 6 * matrix_size(self.hidden_DD, self.token_DD) + self.block.flops_per_token(seq_len, masked=masked)

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls of `join`; the block has its own."""
        return matmul_by(JOIN, self.hidden_DD, "rows"), matmul_by(JOIN, self.token_DD, "rows")
