"""Dense feed-forward layers, gated or plain."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.model import ClampConfig
from maxlm.models.layers import BETWEEN, ENTERING, HIDDEN, BlockContext, enter, gated_linear, linear, matrix_size, parameter
from maxlm.models.saved_tensors import Matmul, matmul_by

# B batch, S sequence, D width, F feed-forward width

_EXACT = partial(jax.nn.gelu, approximate=False)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gelu": jax.nn.gelu}  # by tanh
ACTIVATIONS |= {"geglu_exact": _EXACT, "gelu_exact": _EXACT}


def gated(activation: str, gate: jax.Array, up: jax.Array, clamp: ClampConfig | None = None) -> jax.Array:
    """Hidden units of a gated feed-forward layer: act(gate) * up, or clamped and shifted as in gpt-oss (openai/gpt-oss, torch/model.py)."""
    if activation == "swiglu_clamped":
        limit, slope = (clamp or ClampConfig()).limit, (clamp or ClampConfig()).slope
        return jnp.minimum(gate, limit) * jax.nn.sigmoid(slope * jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
    return ACTIVATIONS[activation](gate) * up


class Mlp(nnx.Module):
    """W_down(act(x W_gate) * (x W_up)) (Shazeer 2020, arXiv 2002.05202), or W_down(act(x W_up)) without a gate."""

    adaptable = True  # LoRA adapts its matrices

    def __init__(self, config: ModelConfig, hidden: int | None = None) -> None:
        """`hidden`: the feed-forward width, default `d_ff`."""
        width, hidden, std = config.d_model, hidden or config.d_ff, config.init_std
        self.activation, self.clamp = config.activation, config.clamp
        has_gate = config.gated
        self.gate_DF = parameter((width, hidden), ("embed", "mlp"), std) if has_gate else None
        self.up_DF = parameter((width, hidden), ("embed", "mlp"), std)
        self.down_FD = parameter((hidden, width), ("mlp", "embed"), std * (2 * config.n_layers) ** -0.5)
        biased = config.mlp_bias
        self.gate_bias_F = parameter((hidden,), ("mlp",)) if biased and has_gate else None
        self.up_bias_F = parameter((hidden,), ("mlp",)) if biased else None
        self.down_bias_D = parameter((width,), ("embed_act",)) if biased else None

    @jax.named_scope("mlp")
    def __call__(self, x_BSD: Float[Array, "B S D"], context: BlockContext) -> tuple[Float[Array, "B S D"], None]:
        """(the layer's output, None: no router)."""
        x_BSD = enter(x_BSD)
        if self.gate_DF is not None and self.up_bias_F is None:
            out_BSD = gated_linear(x_BSD, self.gate_DF, self.up_DF, self.down_FD, self.activation)
            if out_BSD is not None:
                return out_BSD, None
        into = partial(linear, context, "BSD,DF->BSF", x_BSD, reads=ENTERING, writes=HIDDEN)
        up_BSF = into(self.up_DF, self.up_bias_F, name="up")
        gate_BSF = None if self.gate_DF is None else into(self.gate_DF, self.gate_bias_F, name="gate")
        hidden_BSF = ACTIVATIONS[self.activation](up_BSF) if gate_BSF is None else gated(self.activation, gate_BSF, up_BSF, self.clamp)
        down = partial(linear, context, "BSF,FD->BSD", hidden_BSF, reads=HIDDEN, writes=BETWEEN, name="mlp_out")
        return down(self.down_FD, self.down_bias_D), None

    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward."""
        return 6 * matrix_size(self.gate_DF, self.up_DF, self.down_FD)

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        gate = () if self.gate_DF is None else (matmul_by("gate", self.gate_DF, "out"),)
        return *gate, matmul_by("up", self.up_DF, "out"), matmul_by("mlp_out", self.down_FD, "in", matrix="down")

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep."""
        return {"gate": 0, **{matmul.name: matmul.wide_out for matmul in self.matmuls()}}
