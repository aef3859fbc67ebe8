"""Updates of the model state: what training moves without a gradient."""

import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.models import Routing
from maxlm.models.parameters import Parameters
from maxlm.models.stack import by_group, layer_groups
from maxlm.objectives import Sums


def update_model_state(config: ModelConfig, model_state: Parameters, sums: Sums) -> Parameters:
    """The model state after an update, from the sums over its batch."""
    if config.moe is None or not config.moe.router.bias_rate or sums.routing is None:
        return model_state
    return _balance(config, config.moe.router.bias_rate, model_state, sums.routing)


def _balance(config: ModelConfig, rate: float, model_state: Parameters, routing: Routing) -> Parameters:
    """Loss-free balancing (Wang 2024, arXiv 2408.15664): every bias moves `rate` towards even load, up where an expert had less than its
    share, down where it had more. Loads are integers summed over all devices, so the biases are the same everywhere.
    """
    groups = [group for group in layer_groups(config) if group.experts]
    updated: Parameters = {}
    for group, load_E in zip(groups, by_group(groups, routing.load_E), strict=True):
        old, new = model_state, updated
        for part in (*group.path, "mlp"):
            old, new = old[part], new.setdefault(part, {})
        even = jnp.mean(load_E.astype(jnp.float32), axis=-1, keepdims=True)
        new["balancing_E"] = old["balancing_E"] + rate * jnp.sign(even - load_E)
    return updated
