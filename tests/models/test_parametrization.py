"""muP and CompleteP: the factors of every parameter by hand, and the standard model that computes the same."""

import jax
import numpy as np
import pytest
from tiny import tiny_batch, tiny_config

from maxlm.models import abstract_model_state, abstract_parameters, init_parameters
from maxlm.models.layers import BlockContext
from maxlm.models.parameters import bind, declarations
from maxlm.models.parametrization import factors, folded, standard

COMPLETE = {"kind": "completep", "base_width": 16, "base_depth": 1}  # of a model of width 64 and depth 2: m = 4, l = 2
BIASED = {"norm": "layernorm", "bias": "all", "activation": "gelu", "learned_positions": {"max_seq_len": 32}}
MOE = {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1, "n_dense": 1}
MODELS = {
    "dense": {},
    "biases, tied": BIASED | {"tie_embeddings": True},
    "sandwich, scaled and tied": {
        "norm_position": "sandwich",
        "scale_embeddings": True,
        "tie_embeddings": True,
        "softcap": {"logits": 3.0},
    },
    "norms of queries, experts with biases": {"qk_norm": True, "bias": "all", "moe": MOE, "norm": "layernorm"},
    "latent, multi-token prediction": {
        "latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8},
        "n_kv_heads": 8,
        "mtp": {"depth": 1},
    },
}


initial = jax.jit(init_parameters, static_argnums=(0, 1))


def model_of(kind="dense", **parametrization):
    return tiny_config(model={**MODELS[kind], "parametrization": COMPLETE | parametrization}).model


def random_parameters(shapes):
    """Numbers of their usual size for every leaf, those of norms and biases too."""
    drawn = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: drawn.normal(0.5 if len(leaf.shape) < 2 else 0, 0.1, leaf.shape).astype(np.float32), shapes)


def outputs(config, params, model_state):
    """Logits of the model and of its modules that predict further."""
    batch = tiny_batch()

    @jax.jit
    def logits(params):
        model = bind(config, params, model_state)
        batch_of = (batch.tokens_BS[:4], batch.positions_BS[:4], batch.segment_ids_BS[:4])
        x_BSD = model.embed(*batch_of[:2])
        hidden = [model(*batch_of).x_BSD]
        if config.mtp_depth:
            context = BlockContext(model.angles(batch_of[1]), batch_of[2])
            hidden += model.predict_further(model.run(x_BSD, context).x_BSD, [batch.targets_BS[:4]], context)[0]
        return [x_BSD @ model.unembedding_VD.T for x_BSD in hidden]

    return logits(params)


@pytest.mark.parametrize("kind", MODELS)
def test_the_standard_model_with_folded_parameters_computes_the_same(kind):
    """Every multiplier is where `folded` says, so that an exported model is the one that was trained."""
    config = model_of(kind, base_head_dim=None if kind == "biases, tied" else 2)
    params = random_parameters(abstract_parameters(config))
    state = random_parameters(abstract_model_state(config))
    plain = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * folded(config, tuple(key.key for key in path)), params)
    changed = sum(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True))
    assert changed >= 3, "else nothing was folded"
    for mine, wanted in zip(outputs(config, params, state), outputs(standard(config), plain, state), strict=True):
        assert np.std(wanted) > 1e-3
        np.testing.assert_allclose(mine, wanted, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("kind", MODELS)
def test_at_the_base_it_is_the_standard_model(kind):
    """No multiplier, deviation or epsilon differs from the standard one's, to the last bit."""
    config = model_of(kind, base_width=64, base_depth=2, base_head_dim=8 if "latent" not in kind else 16)
    assert config.parametrized == standard(config).parametrized == (1, 1, 1, 1)
    for name, variable in declarations(config):
        assert factors(config, name, variable.axes)[:2] == (1, 1)
        assert folded(config, name) == 1


def test_the_base_draws_what_the_standard_model_draws():
    config = model_of(base_width=64, base_depth=2)
    for mine, wanted in zip(*(jax.tree.leaves(initial(one, 0)) for one in (config, standard(config))), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def by_leaf(config):
    """Parameter without its layer -> (deviation at first over init_std, factor of epsilon, whether its rate depends on the width)."""
    found = {}
    for name, variable in declarations(config):
        factor = factors(config, name, variable.axes)
        std = variable.std / config.init_std * factor.std
        found["/".join(name)] = (round(std, 6), factor.eps, factor.width_reads)
    return found


def test_factors_by_hand():
    """m = 4 and l = 2, with init_std s: matrices of a block have s / 2, those that write to the stream s / 2 times 2 ** -1/2."""
    found = by_leaf(model_of("norms of queries, experts with biases"))
    vector, hidden, writer = (0, 1 / 8, False), (0.5, 1 / 8, True), (round(0.5 * 2**-0.5, 6), 1 / 8, True)
    assert {name: value for name, value in found.items() if not name.startswith(("head", "layers"))} == {
        "embedding_VD": (1, 1 / 4, False),
        "output_VD": (1, 1 / 4, False),
        "final_norm/scale_D": (0, 1 / 4, False),
        "final_norm/bias_D": (0, 1 / 4, False),
    }
    layer = {name.removeprefix("layers/0/"): value for name, value in found.items() if name.startswith("layers")}
    matrices = {name: value for name, value in layer.items() if value[2]}
    assert all(value == vector for name, value in layer.items() if name not in matrices)
    assert matrices == {
        **{f"attention/{name}": hidden for name in ("query_DHK", "key_DGK", "value_DGK")},
        "attention/out_HKD": writer,
        "mlp/router_DE": (0.25, 1 / 8, True),
        **{f"mlp/{name}": hidden for name in ("gate_DEF", "up_DEF", "shared/gate_DF", "shared/up_DF")},
        "mlp/down_DEF": writer,
        "mlp/shared/down_FD": writer,
    }
    assert model_of(base_head_dim=2).parametrized == (1 / 2, 1 / 4, 1 / 2, 1 / 2)


def test_mup_leaves_the_depth_alone():
    config = tiny_config(model={"parametrization": {"kind": "mup", "base_width": 16}}).model
    found = by_leaf(config)
    assert config.parametrized == (1 / 2, 1 / 4, 1, 1)
    assert found["layers/0/mlp/down_FD"] == (round(0.5 * 4**-0.5, 6), 1 / 4, True), "(2 n_layers) ** -1/2 as in a standard model"
    assert found["layers/0/mlp/up_DF"] == (0.5, 1 / 4, True)


def test_a_module_that_predicts_further_has_one_block_at_any_depth():
    config = model_of("latent, multi-token prediction")
    found = by_leaf(config)
    assert found["ahead/0/block/mlp/up_DF"][1] == found["ahead/0/hidden_DD"][1] == 1 / 4
    assert folded(config, ("ahead", "0", "block", "mlp", "down_FD")) == 1
    assert folded(config, ("layers", "0", "mlp", "down_FD")) == 1 / 2


def test_drawn_deviations_follow_the_factors():
    config = model_of()
    params = initial(config, 0)
    assert np.std(params["layers"]["0"]["mlp"]["up_DF"]) == pytest.approx(0.02 / 2, rel=0.05)
    assert np.std(params["layers"]["0"]["mlp"]["down_FD"]) == pytest.approx(0.02 / 2 * 2**-0.5, rel=0.05)
    assert np.std(params["output_VD"]) == pytest.approx(0.02, rel=0.05)
