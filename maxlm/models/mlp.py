"""Feed-forward layers: gated (SwiGLU, GeGLU) and plain (GELU)."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.kernels import MlpLayout, gated_mlp, gated_mlp_problem
from maxlm.models.layers import ACTIVATIONS, BETWEEN, ENTERING, constant, fenced, gated, matrix_size, project, weight
from maxlm.models.saved_tensors import Matmul, matmul_by
from maxlm.parallel import mesh_axes

# B batch, S sequence, D width, F feed-forward width

_INSIDE = ("batch", "seq", "mlp")
GATES = {"swiglu": "silu", "geglu": "gelu"}  # those that kernels compute, as they name them


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
        if self._fuses(x_BSD):
            return checkpoint_name(fenced(self._fused, x_BSD, ENTERING, BETWEEN), "mlp_out")
        up_BSF = checkpoint_name(self._into(x_BSD, self.up_DF, self.up_bias_F), "up")
        if self.gate_DF is not None:
            gate_BSF = checkpoint_name(self._into(x_BSD, self.gate_DF, self.gate_bias_F), "gate")
            hidden_BSF = gated(self.activation, gate_BSF, up_BSF)
        else:
            hidden_BSF = ACTIVATIONS[self.activation](up_BSF)
        return checkpoint_name(project("BSF,FD->BSD", hidden_BSF, self.down_FD[...], self.down_bias_D, _INSIDE, BETWEEN), "mlp_out")

    def _fuses(self, x_BSD: Array) -> bool:
        """Whether a kernel computes the gate beside its matmuls, and faster than XLA."""
        return (
            self.activation in GATES
            and self.up_bias_F is None
            and not gated_mlp_problem(x_BSD.shape, self.up_DF.shape[-1], x_BSD.dtype, _layout())
        )

    def _fused(self, x_BSD: Array) -> Array:
        weights = (w[...] for w in (self.gate_DF, self.up_DF, self.down_FD) if w is not None)
        return gated_mlp(x_BSD, *weights, activation=GATES[self.activation], layout=_layout())

    @staticmethod
    def _into(x_BSD: Array, w_DF: nnx.Param, bias_F: nnx.Param | None) -> Array:
        return project("BSD,DF->BSF", x_BSD, w_DF[...], bias_F, ENTERING, _INSIDE)

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


def _layout() -> MlpLayout:
    """How the current mesh splits rows and the feed-forward width."""
    mesh = jax.sharding.get_abstract_mesh()
    return MlpLayout(batch=mesh_axes("batch", mesh), hidden=mesh_axes("mlp", mesh))
