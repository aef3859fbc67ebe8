"""Feed-forward layers as a mixture of experts."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlm.config.schema import ModelConfig
from maxlm.kernels import grouped_matmul
from maxlm.models.forward import Forward
from maxlm.models.layers import BETWEEN, constant, enter, gated, matrix_size, state_constant, weight
from maxlm.models.mlp import Mlp
from maxlm.models.router import Choice, Routing, route
from maxlm.parallel import constrain
from maxlm.parallel.expert_rows import Weights
from maxlm.parallel.experts import through_experts

# B batch, S sequence, D width, E experts, F an expert's width, K choices of a token, R rows: choices, sorted by expert


class Moe(nnx.Module):
    """The sum of what `top_k` of many gated feed-forward layers make of a token, each times its weight (Shazeer 2017, arXiv 1701.06538),
    and of what shared experts, which all tokens meet, make of it (arXiv 2401.06066).
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None, "the config has no experts"
        self.config, moe = config.moe, config.moe
        self.activation = config.activation
        width, hidden, experts, std = config.d_model, moe.d_ff, moe.n_experts, config.init_std
        self.router_DE = weight((width, experts), ("router", "choices"), std)
        shape, axes = (width, experts, hidden), ("expert_embed", "expert", "mlp")
        self.gate_DEF = weight(shape, axes, std)
        self.up_DEF = weight(shape, axes, std)
        self.down_DEF = weight(shape, axes, std * (2 * config.n_layers) ** -0.5)  # transposed, as the others are split
        biased = config.bias == "all"
        self.router_bias_E = constant(0.0, (experts,), ("choices",)) if biased else None
        self.gate_bias_EF = constant(0.0, (experts, hidden), ("expert", "mlp")) if biased else None
        self.up_bias_EF = constant(0.0, (experts, hidden), ("expert", "mlp")) if biased else None
        self.down_bias_ED = constant(0.0, (experts, width), ("choices", "embed_act")) if biased else None
        # Loss-free balancing: added to the scores where they are compared, and moved by the load.
        self.balancing_E = state_constant(0.0, (experts,), ("choices",)) if moe.router.bias_rate else None
        self.shared = Mlp(config, moe.n_shared * hidden) if moe.n_shared else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], routed_BS: Bool[Array, "B S"], noise_BS: Int[Array, "B S"] | None, forward: Forward
    ) -> tuple[Float[Array, "B S D"], Float[Array, ""], Routing]:
        """(the layer's output, auxiliary losses summed over tokens, what its router did). `routed_BS`: tokens that are not padding."""
        x_BSD = constrain(x_BSD, *BETWEEN)
        bias_E = None if self.balancing_E is None else self.balancing_E[...]
        choice, penalty, routing = route(self.config, self.logits(x_BSD, noise_BS), bias_E, routed_BS, forward)
        named = {name: getattr(self, name) for name in ("gate_DEF", "up_DEF", "down_DEF", "gate_bias_EF", "up_bias_EF")}
        there = {name: parameter for name, parameter in named.items() if parameter is not None}
        y_BSD = through_experts(
            partial(_compute, self.activation),
            {name: parameter[...] for name, parameter in there.items()},
            {name: parameter.axes for name, parameter in there.items()},
            x_BSD,
            choice.experts_BSK,
            choice.weights_BSK,
            self.config.n_experts,
        )
        if self.down_bias_ED is not None:
            y_BSD += self._biases(choice).astype(y_BSD.dtype)
        if self.shared is not None:
            y_BSD += self.shared(enter(x_BSD))
        return checkpoint_name(constrain(y_BSD, *BETWEEN), "mlp_out"), penalty, routing

    def _biases(self, choice: Choice) -> Float[Array, "B S D"]:
        """What the experts' last biases add."""
        assert self.down_bias_ED is not None
        hits_BSKE = choice.experts_BSK[..., None] == jnp.arange(self.config.n_experts)
        weights_BSE = jnp.sum(jnp.where(hits_BSKE, choice.weights_BSK[..., None], 0), axis=2)
        return constrain(jnp.einsum("BSE,ED->BSD", weights_BSE, self.down_bias_ED[...]), *BETWEEN)

    def logits(self, x_BSD: Float[Array, "B S D"], noise_BS: Int[Array, "B S"] | None) -> Float[Array, "B S E"]:
        """Of every expert, float32 from x on; `noise_BS`: what the jitter of each token grows from, in training."""
        x_BSD = x_BSD.astype(jnp.float32)
        if self.config.router.jitter and noise_BS is not None:
            x_BSD *= 1 + self.config.router.jitter * _noise(noise_BS, x_BSD.shape[-1])
        logits_BSE = jnp.einsum("BSD,DE->BSE", x_BSD, self.router_DE[...], precision=jax.lax.Precision.HIGHEST)
        return logits_BSE if self.router_bias_E is None else logits_BSE + self.router_bias_E[...]

    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward: of the experts it meets."""
        chosen = self.config.top_k / self.config.n_experts
        routed = matrix_size(self.gate_DEF, self.up_DEF, self.down_DEF) * chosen
        return 6 * (matrix_size(self.router_DE) + routed) + (0 if self.shared is None else self.shared.flops_per_token())


def _compute(activation: str, weights: Weights, x_RD: Array, weight_R: Array, sizes_E: Int[Array, " E"]) -> Float[Array, "R D"]:
    """What each expert makes of its rows, times their weights: inside, where the product with the gate is computed anyway."""
    of_row_RE = _of_row(sizes_E, x_RD) if "gate_bias_EF" in weights else None

    def into(name: str) -> Array:
        y_RF = grouped_matmul(x_RD, weights[f"{name}_DEF"], sizes_E)
        return checkpoint_name(y_RF if of_row_RE is None else y_RF + of_row_RE @ weights[f"{name}_bias_EF"].astype(y_RF.dtype), name)

    hidden_RF = gated(activation, into("gate"), into("up")) * weight_R[:, None].astype(x_RD.dtype)
    return grouped_matmul(hidden_RF, weights["down_DEF"], sizes_E, transposed=True)


def _of_row(sizes_E: Array, x_RD: Array) -> Float[Array, "R E"]:
    """Whether a row is of an expert, 1 or 0; none has the rows beyond all of them."""
    ends_E = jnp.cumsum(sizes_E)
    row_R1 = jnp.arange(len(x_RD))[:, None]
    return ((row_R1 < ends_E) & (row_R1 >= ends_E - sizes_E)).astype(x_RD.dtype)


def _noise(seed_BS: Int[Array, "B S"], width: int) -> Float[Array, "B S D"]:
    """Numbers of -1 to 1, a function of each token's seed and the place along the width: the same on any mesh."""
    bits_BSD = seed_BS.astype(jnp.uint32)[..., None] ^ (jnp.arange(width, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32 (Wellons 2018)
        bits_BSD = (bits_BSD ^ (bits_BSD >> shift)) * jnp.uint32(factor)
    return (bits_BSD >> 8).astype(jnp.float32) * (2.0 / (1 << 24)) - 1.0
