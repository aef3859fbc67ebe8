"""A transformer block: attention and a feed-forward layer, each behind a norm and added to the residual stream."""

from typing import NamedTuple

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import ModelConfig
from maxlm.models.attention import Attention, Cache
from maxlm.models.forward import Forward
from maxlm.models.layers import Angles, Norm
from maxlm.models.linear import BETWEEN, enter
from maxlm.models.mla import LatentAttention
from maxlm.models.mlp import Mlp
from maxlm.models.moe import Moe
from maxlm.models.router import Routing
from maxlm.parallel import constrain

# B batch, S sequence, D width


class BlockContext(NamedTuple):
    """Inputs shared by all blocks. They carry no gradient."""

    angles: dict[bool, Angles | None]  # rotary angles of global (False) and local (True) layers; None with learned positions
    segment_ids_BS: Int[Array, "B S"]  # 0 is padding
    random_BS: UInt32[Array, "B S"] | None = None  # seed of the router's jitter for each token, in training
    prefix_BS: Bool[Array, "B S"] | None = None  # True in the prefix of a document, for masks of form "prefix"


RouterOutput = tuple[Float[Array, ""], Routing] | None  # auxiliary losses summed over tokens, and statistics; None for a dense layer


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `sandwich` also norms the output of each sublayer. `experts`: the mlp is a mixture."""

    def __init__(self, config: ModelConfig, *, local: bool, experts: bool = False) -> None:
        sandwich = config.norm_position == "sandwich"
        self.attention_norm = Norm(config.d_model, config)
        self.attention = Attention(config, local=local) if config.latent is None else LatentAttention(config, config.latent, local=local)
        self.attention_post_norm = Norm(config.d_model, config) if sandwich else None
        self.mlp_norm = Norm(config.d_model, config)
        self.mlp: Mlp | Moe = Moe(config) if experts else Mlp(config)
        self.mlp_post_norm = Norm(config.d_model, config) if sandwich else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Cache | None, forward: Forward
    ) -> tuple[Float[Array, "B S D"], Cache | None, RouterOutput]:
        x_BSD = checkpoint_name(constrain(x_BSD, *BETWEEN), "layer_input")
        angles, segment_ids_BS = context.angles[self.attention.local], context.segment_ids_BS
        y_BSD, cache = self.attention(self.attention_norm(x_BSD), angles, segment_ids_BS, cache, forward, context.prefix_BS)
        x_BSD += y_BSD if self.attention_post_norm is None else self.attention_post_norm(y_BSD)
        router: RouterOutput = None
        if isinstance(self.mlp, Moe):
            y_BSD, aux_loss, routing = self.mlp(self.mlp_norm(x_BSD), segment_ids_BS != 0, context.random_BS, forward)
            router = aux_loss, routing
        else:
            y_BSD = self.mlp(enter(self.mlp_norm(x_BSD)))
        x_BSD += y_BSD if self.mlp_post_norm is None else self.mlp_post_norm(y_BSD)
        return constrain(x_BSD, *BETWEEN), cache, router

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token in one block, forward and backward."""
        return self.attention.flops_per_token(seq_len, masked=masked) + self.mlp.flops_per_token()
