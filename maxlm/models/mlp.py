"""Feed-forward layers: gated (SwiGLU, GeGLU) and plain (GELU)."""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import ACTIVATIONS, constant, gated, matrix_size, weight
from maxlm.models.linear import BETWEEN, ENTERING, gated_linear, linear
from maxlm.models.saved_tensors import Matmul, matmul_by

# B batch, S sequence, D width, F feed-forward width

_HIDDEN = ("batch", "seq", "mlp")


class Mlp(nnx.Module):
    """W_down(act(x W_gate) * (x W_up)) (Shazeer 2020, arXiv 2002.05202), or W_down(act(x W_up)) without a gate."""

    def __init__(self, config: ModelConfig, hidden: int | None = None) -> None:
        """`hidden`: the feed-forward width, default `d_ff`."""
        width, hidden, std = config.d_model, hidden or config.d_ff, config.init_std
        self.activation = config.activation
        has_gate = config.activation != "gelu"
        self.gate_DF = weight((width, hidden), ("embed", "mlp"), std) if has_gate else None
        self.up_DF = weight((width, hidden), ("embed", "mlp"), std)
        self.down_FD = weight((hidden, width), ("mlp", "embed"), std * (2 * config.n_layers) ** -0.5)
        biased = config.bias == "all"
        self.gate_bias_F = constant(0.0, (hidden,), ("mlp",)) if biased and has_gate else None
        self.up_bias_F = constant(0.0, (hidden,), ("mlp",)) if biased else None
        self.down_bias_D = constant(0.0, (width,), ("embed_act",)) if biased else None

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        if self.gate_DF is not None and self.up_bias_F is None:
            out_BSD = gated_linear(x_BSD, self.gate_DF, self.up_DF, self.down_FD, self.activation)
            if out_BSD is not None:
                return checkpoint_name(out_BSD, "mlp_out")
        up_BSF = checkpoint_name(linear("BSD,DF->BSF", x_BSD, self.up_DF, self.up_bias_F, reads=ENTERING, writes=_HIDDEN), "up")
        if self.gate_DF is not None:
            gate_BSF = linear("BSD,DF->BSF", x_BSD, self.gate_DF, self.gate_bias_F, reads=ENTERING, writes=_HIDDEN)
            hidden_BSF = gated(self.activation, checkpoint_name(gate_BSF, "gate"), up_BSF)
        else:
            hidden_BSF = ACTIVATIONS[self.activation](up_BSF)
        out_BSD = linear("BSF,FD->BSD", hidden_BSF, self.down_FD, self.down_bias_D, reads=_HIDDEN, writes=BETWEEN)
        return checkpoint_name(out_BSD, "mlp_out")

    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward."""
        return 6 * matrix_size(self.gate_DF, self.up_DF, self.down_FD)

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        gate = () if self.gate_DF is None else (matmul_by("gate", self.gate_DF, "out"),)
        return *gate, matmul_by("up", self.up_DF, "out"), matmul_by("mlp_out", self.down_FD, "in")

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep."""
        return {"gate": 0, **{matmul.name: matmul.wide_out for matmul in self.matmuls()}}
