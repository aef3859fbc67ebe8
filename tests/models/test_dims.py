"""Sizes of a model in odd combinations: a model trains, or its config is refused in a line. No combination ends in a traceback."""

import jax
import pytest
from tiny import tiny_config

from maxlm.config import UserError
from maxlm.models import abstract_model_state, abstract_parameters
from maxlm.models.counts import counts
from maxlm.objectives import ArraySpec, build_objective
from maxlm.training import fits

ODD = (1, 2, 3, 5, 7, 16, 33, 2**20, 2**31, 2**61, 2**63 - 1)
LATENT = {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
EXPERTS = {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1, "n_dense": 1}
LARGEST = 2**34  # bytes of a program that is traced
ONE_DEVICE = dict.fromkeys(("data", "stage", "fsdp", "context", "tensor", "expert"), 1)
PLAIN = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "window")
SHARES = [{"rope": {"share": share}, "head_dim": dim} for share in (0.1, 0.5, 0.9) for dim in (2, 4, 6)]
MODELS = {
    **{field: [{field: size} | ({"layer_pattern": ["local"]} if field == "window" else {}) for size in ODD] for field in PLAIN},
    **{f"latent.{field}": [{"n_kv_heads": 8, "latent": {**LATENT, field: size}} for size in ODD] for field in LATENT},
    **{f"moe.{field}": [{"moe": {**EXPERTS, field: size}} for size in (0, *ODD)] for field in EXPERTS},
    "groups": [{"moe": {**EXPERTS, "router": {"groups": g, "top_groups": t}}} for g in (1, 2, 3, 4) for t in (1, 2, 4)],
    "learned positions": [{"learned_positions": {"max_seq_len": size}, "head_dim": 3} for size in ODD],
    "share of rotary dims": SHARES,
    "a latent of one number": [{"n_kv_heads": 8, "latent": dict(zip(LATENT, (1, 1, 1, 2, value), strict=True))} for value in (1, 3, 4)],
    "modules ahead": [{"mtp": {"depth": depth}, "n_layers": layers} for depth in (1, 3) for layers in (1, 2)],
}


def outcome(model):
    """The error of a config in words, or what its gradient is traced to."""
    try:
        config = tiny_config(model=model)
        if sum(part.bytes for part in fits.least(config, ONE_DEVICE)) > LARGEST:
            return "too large"
        assert counts(config.model, config.data.seq_len, config.tokens_per_step)["parameters"] > 0
    except (UserError, ValueError) as error:  # pydantic's are ValueErrors, which the loader words
        return str(error)
    objective = build_objective(config)
    batch = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), objective.batch_spec(), is_leaf=lambda leaf: isinstance(leaf, ArraySpec)
    )
    gradient = jax.grad(lambda params, state, batch: objective.loss(params, state, batch)[0])
    return jax.eval_shape(gradient, abstract_parameters(config.model), abstract_model_state(config.model), batch)


@pytest.mark.soak
@pytest.mark.parametrize("field", MODELS)
def test_no_combination_of_sizes_ends_in_a_traceback(field):
    found = [outcome(model) for model in MODELS[field]]
    assert any(not isinstance(one, str) for one in found), found
