"""Feed-forward layers as a mixture of experts."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from maxlm import kernels
from maxlm.config.schema import ModelConfig
from maxlm.models.feed_forward.dense import Mlp, gated
from maxlm.models.feed_forward.router import Choice, RouterOutput, Routing, route
from maxlm.models.layers import BETWEEN, BlockContext, matrix_size, parameter, state_constant, with_bias_gradient
from maxlm.models.saved_tensors import ROUTER, Matmul, matmul_by
from maxlm.models.stack import Tree, by_group, layer_groups
from maxlm.parallel import constrain
from maxlm.parallel.expert_rows import Weights
from maxlm.parallel.experts import through_experts
from maxlm.parallel.quantized_rows import RowFormats
from maxlm.precision import ExpertWeight, grouped_dot

# B batch, S sequence, D width, E experts, F an expert's width, K choices of a token, R rows: choices, sorted by expert


class Moe(nnx.Module):
    """Weighted sum of the outputs of `top_k` of many gated feed-forward layers (Shazeer 2017, arXiv 1701.06538), plus the output
    of shared experts, which every token passes (arXiv 2401.06066).
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None, "the config has no experts"
        self.config, moe = config.moe, config.moe
        self.activation, self.clamp = config.activation, config.clamp
        width, hidden, experts, std = config.d_model, moe.d_ff, moe.n_experts, config.init_std
        self.router_DE = parameter((width, experts), ("embed", "choices"), std)
        shape, axes = (width, experts, hidden), ("embed", "expert", "mlp")
        self.gate_DEF = parameter(shape, axes, std)
        self.up_DEF = parameter(shape, axes, std)
        self.down_DEF = parameter(shape, axes, std * (2 * config.n_layers) ** -0.5)  # transposed, so that it is split as the others are
        biased = config.mlp_bias
        self.router_bias_E = parameter((experts,), ("choices",)) if biased else None
        self.gate_bias_EF = parameter((experts, hidden), ("expert", "mlp")) if biased else None
        self.up_bias_EF = parameter((experts, hidden), ("expert", "mlp")) if biased else None
        self.down_bias_ED = parameter((experts, width), ("choices", "embed_act")) if biased else None
        # Load balancing without a loss (arXiv 2408.15664): added to scores for selection only; updated from the load, not by a gradient.
        self.balancing_E = state_constant(0.0, (experts,), ("choices",)) if moe.router.bias_rate else None
        self.shared = Mlp(config, moe.n_shared * hidden) if moe.n_shared else None

    @jax.named_scope("moe")
    def __call__(self, x_BSD: Float[Array, "B S D"], context: BlockContext) -> tuple[Float[Array, "B S D"], RouterOutput]:
        """(the layer's output, (auxiliary losses summed over tokens, routing statistics))."""
        routed_BS = context.segment_ids_BS != 0
        x_BSD = constrain(x_BSD, *BETWEEN)
        bias_E = None if self.balancing_E is None else self.balancing_E[...]
        dispatch = context.precision.dispatch  # formats in which rows travel to experts of other devices and back
        choice, penalty, routing = route(self.config, self.logits(x_BSD, context), bias_E, routed_BS, context)
        named = {name: getattr(self, name) for name in ("gate_DEF", "up_DEF", "down_DEF", "gate_bias_EF", "up_bias_EF")}
        parameters = {name: parameter for name, parameter in named.items() if parameter is not None}
        y_BSD = through_experts(
            partial(_compute, partial(gated, self.activation, clamp=self.clamp)),
            {name: parameter[...] for name, parameter in parameters.items()},
            {name: parameter.axes for name, parameter in parameters.items()},
            x_BSD,
            choice.experts_BSK,
            choice.weights_BSK,
            self.config.n_experts,
            RowFormats() if dispatch is None else RowFormats(dispatch.element, dispatch.output_element, dispatch.gradient_element),
        )
        if self.down_bias_ED is not None:
            y_BSD += self._biases(choice).astype(y_BSD.dtype)
        if self.shared is not None:
            y_BSD += self.shared(x_BSD, context)[0]
        return checkpoint_name(constrain(y_BSD, *BETWEEN), "mlp_out"), (penalty, routing)

    def _biases(self, choice: Choice) -> Float[Array, "B S D"]:
        """Sum of the output biases of each token's experts, times their weights."""
        assert self.down_bias_ED is not None
        hits_BSKE = choice.experts_BSK[..., None] == jnp.arange(self.config.n_experts)
        weights_BSE = jnp.sum(jnp.where(hits_BSKE, choice.weights_BSK[..., None], 0), axis=2)
        return constrain(jnp.einsum("BSE,ED->BSD", weights_BSE, self.down_bias_ED[...]), *BETWEEN)

    def logits(self, x_BSD: Float[Array, "B S D"], context: BlockContext) -> Float[Array, "B S E"]:
        """Router logits of every expert, float32 from x on, with jitter in training."""
        x_BSD = x_BSD.astype(jnp.float32)
        if self.config.router.jitter and context.random_BS is not None:
            x_BSD *= 1 + self.config.router.jitter * _uniform(context.random_BS, x_BSD.shape[-1])
        logits_BSE = context.einsum("BSD,DE->BSE", x_BSD, self.router_DE[...], precision=jax.lax.Precision.HIGHEST)
        if self.router_bias_E is None:
            return logits_BSE
        return with_bias_gradient(logits_BSE + jax.lax.stop_gradient(self.router_bias_E[...]), self.router_bias_E[...])

    def flops_per_token(self) -> float:
        """FLOPs of a training token in the experts it is routed to, forward and backward."""
        chosen = self.config.top_k / self.config.n_experts
        routed = matrix_size(self.gate_DEF, self.up_DEF, self.down_DEF) * chosen
        return 6 * (matrix_size(self.router_DE) + routed) + (0 if self.shared is None else self.shared.flops_per_token())

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run: the router's, the experts', the shared experts'."""
        width, experts, hidden = self.up_DEF.shape[-3:]
        of_experts = partial(Matmul, experts=experts, meets=self.config.top_k, matrix="experts")
        return (
            matmul_by(ROUTER, self.router_DE, "rows"),
            of_experts("gate", width, hidden, "out"),
            of_experts("up", width, hidden, "out"),
            of_experts("mlp_out", hidden, width, "in"),
            *(() if self.shared is None else self.shared.matmuls()),
        )

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep; `gate` and `up` of experts, one a row, are not among them."""
        return {"gate": 0, "up": 0, "mlp_out": self.up_DEF.shape[-3], **({} if self.shared is None else self.shared.saved_tensors())}


def balance_experts(config: ModelConfig, model_state: Tree, routing: Routing) -> Tree:
    """The model state after an update. Loss-free balancing (Wang 2024, arXiv 2408.15664): every bias moves `bias_rate` towards even load,
    up where an expert had less than its share, down where it had more. Loads are integers summed over all devices, so the biases are the
    same everywhere. Of a frozen model they stay.
    """
    rate = config.moe.router.bias_rate if config.moe is not None and config.lora is None else 0.0
    if not rate:
        return model_state
    groups = [group for group in layer_groups(config) if group.parts.feed_forward == "experts"]
    updated: Tree = {}
    for group, load_E in zip(groups, by_group(groups, routing.load_E), strict=True):
        old, new = model_state, updated
        for part in (*group.path, "mlp"):
            old, new = old[part], new.setdefault(part, {})
        even = jnp.mean(load_E.astype(jnp.float32), axis=-1, keepdims=True)
        new["balancing_E"] = old["balancing_E"] + rate * jnp.sign(even - load_E)
    return updated


def _compute(activate: Callable, weights: Weights, x_RD: Array, weight_R: Array, sizes_E: Int[Array, " E"]) -> Float[Array, "R D"]:
    """Output of each expert for its rows, times their weights, which are applied to the hidden units: there it costs nothing."""
    one_hot_RE = _one_hot(sizes_E, x_RD) if "gate_bias_EF" in weights else None

    def into(name: str) -> Array:
        y_RF = _grouped_linear(x_RD, weights[f"{name}_DEF"], sizes_E)
        return checkpoint_name(y_RF if one_hot_RE is None else y_RF + one_hot_RE @ weights[f"{name}_bias_EF"].astype(y_RF.dtype), name)

    hidden_RF = activate(into("gate"), into("up")) * weight_R[:, None].astype(x_RD.dtype)
    return _grouped_linear(hidden_RF, weights["down_DEF"], sizes_E, transposed=True)


def _one_hot(sizes_E: Array, x_RD: Array) -> Float[Array, "R E"]:
    """1 where a row belongs to an expert, else 0; rows beyond all groups belong to none."""
    ends_E = jnp.cumsum(sizes_E)
    row_R1 = jnp.arange(len(x_RD))[:, None]
    return ((row_R1 < ends_E) & (row_R1 >= ends_E - sizes_E)).astype(x_RD.dtype)


def _uniform(seeds_BS: UInt32[Array, "B S"], width: int) -> Float[Array, "B S D"]:
    """Random numbers from -1 to 1, drawn from each token's own seed: the same on any mesh."""
    keys_BS = jax.vmap(jax.vmap(jax.random.key))(seeds_BS)
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (width,), minval=-1.0)))(keys_BS)


def _grouped_linear(
    x: Float[Array, "R K"], w_KG: Float[Array, "K G"] | ExpertWeight, group_sizes_E: Int[Array, " E"], *, transposed: bool = False
) -> Array:
    """Rows sorted by expert, each times the weights of its expert, on one device: see `maxlm.kernels.grouped_matmul`."""
    if isinstance(w_KG, ExpertWeight):
        assert w_KG.transposed == transposed, "it is quantized along what is summed"
        return grouped_dot(x, w_KG, group_sizes_E)
    return kernels.grouped_matmul(x, w_KG, group_sizes_E, transposed=transposed)
