"""Balance of experts without a loss (Wang 2024, arXiv 2408.15664), and what routers report in order of depth."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.config.schema import ModelConfig
from maxlm.models import Routings
from maxlm.models.parameters import Parameters
from maxlm.models.router import Routing

# L layers with experts, E experts

_BIAS = "balancing_E"


def rebalance(config: ModelConfig, params: Parameters, routings: Routings | None) -> Parameters:
    """The parameters with every balancing bias a step towards even load: up where an expert had less than its share, down where more.

    Loads are whole numbers, summed over all devices, so the biases are the same everywhere.
    """
    if config.moe is None or not config.moe.router.bias_rate or routings is None:
        return params
    moved = dict(params)
    for name, runs in routings.items():
        if runs:
            moved[name] = {**params[name], **{str(i): _moved(config, params[name][str(i)], run.load_E) for i, run in enumerate(runs)}}
    return moved


def _moved(config: ModelConfig, blocks: Parameters, load_E: Int[Array, "*layers E"]) -> Parameters:
    assert config.moe is not None
    bias_E: Float[Array, "*layers E"] = blocks["mlp"][_BIAS]
    even = jnp.mean(load_E.astype(jnp.float32), axis=-1, keepdims=True)
    bias_E = bias_E + config.moe.router.bias_rate * jnp.sign(even - load_E)
    return {**blocks, "mlp": {**blocks["mlp"], _BIAS: bias_E}}


def in_depth_order(routings: Routings | None) -> Routing | None:
    """The reports of all layers with experts, the first layer first, along a leading dim L."""
    if routings is None:
        return None
    first = jax.tree.leaves(routings["layers"])[0]

    def by_layer(field: str) -> Array:
        rank = 1 if field == "load_E" else 0
        runs = [getattr(run, field) for run in routings["layers"]]  # [periods, blocks of the run where several, ...]
        periods = jnp.concatenate([run.reshape(len(first), -1, *run.shape[run.ndim - rank :]) for run in runs], axis=1)
        tail = [getattr(run, field) for run in routings["tail"]]
        rows = [periods.reshape(-1, *periods.shape[2:]), *(run.reshape(-1, *run.shape[run.ndim - rank :]) for run in tail)]
        return jnp.concatenate(rows)

    return Routing(**{field: by_layer(field) for field in Routing._fields})
