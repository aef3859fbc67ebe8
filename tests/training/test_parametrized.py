"""Updates under muP and CompleteP: their sizes by hand, flat over widths and depths, the same on every layout."""

import math

import jax
import numpy as np
import pytest
from tiny import first_state, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.models import abstract_parameters
from maxlm.models.parameters import bind
from maxlm.training.optimizer import build_optimizer
from maxlm.training.start_from import differences

COMPLETE = {"kind": "completep", "base_width": 16, "base_depth": 1}
PLAIN = {"peak_lr": 1.0, "warmup_steps": 0, "schedule": "constant", "clip_norm": None}


def first_updates(optimizer, parametrization, scale=1.0):
    """The first updates of a model whose parameters are all 1, with gradients of one size, `scale`, and random signs."""
    config = tiny_config(model={"parametrization": parametrization}, optimizer={**PLAIN, **optimizer})
    drawn, shapes = np.random.default_rng(0), abstract_parameters(config.model)
    grads = jax.tree.map(lambda leaf: scale * np.sign(drawn.normal(size=leaf.shape)).astype(np.float32), shapes)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    rule = build_optimizer(config)
    layer = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params)[0])(grads, params)
    names = {"table": ("embedding_VD",), "norm": ("layers", "0", "mlp_norm", "scale_D"), "matrix": ("layers", "0", "mlp", "up_DF")}
    return {name: np.asarray(_leaf(layer, path)) for name, path in names.items()}


def _leaf(tree, path):
    for part in path:
        tree = tree[part]
    return tree


def rms(array):
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64)))))


def test_rates_and_epsilons_of_adam_by_hand():
    """|update| = rate * |g| / (|g| + eps): m = 4 and l = 2, matrices move at a quarter of the rate, with eps / 8, tables with eps / 4."""
    found = first_updates({"weight_decay": 0.0, "eps": 1e-3}, COMPLETE, scale=1e-3)
    assert rms(found["matrix"]) == pytest.approx(1 / 4 * 1 / (1 + 1 / 8), rel=1e-4)
    assert rms(found["norm"]) == pytest.approx(1 / (1 + 1 / 8), rel=1e-4)
    assert rms(found["table"]) == pytest.approx(1 / (1 + 1 / 4), rel=1e-4)


def test_muon_moves_matrices_by_the_root():
    plain, scaled = (first_updates({"name": "muon", "weight_decay": 0.0}, section) for section in (None, COMPLETE))
    assert rms(scaled["matrix"]) == pytest.approx(rms(plain["matrix"]) / 2, rel=1e-3)
    assert rms(scaled["table"]) == pytest.approx(rms(plain["table"]), rel=1e-5)


def test_the_rate_times_the_decay_is_that_of_the_base_model():
    """Decay of m lambda at a rate of 1 / m: what each update takes off a matrix does not depend on the width."""
    for section in (None, COMPLETE):
        without, decayed = (first_updates({"weight_decay": decay}, section) for decay in (0.0, 0.25))
        np.testing.assert_allclose(decayed["matrix"] - without["matrix"], -0.25, atol=1e-6)
        np.testing.assert_array_equal(decayed["norm"], without["norm"])


def test_at_the_base_training_is_the_standard_one():
    section = {"kind": "completep", "base_width": 64, "base_depth": 2, "base_head_dim": 8}
    (mine, seen), (wanted, seen_wanted) = (run_steps(tiny_program(1, model={"parametrization": s}), 2) for s in (section, None))
    for one, other in zip(jax.tree.leaves((mine.params, seen)), jax.tree.leaves((wanted.params, seen_wanted)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.soak
def test_layouts_compute_the_same():
    model = {"parametrization": COMPLETE, "tie_embeddings": True}
    meshes = {"fsdp": 1}, {"fsdp": 2, "tensor": 2}
    one, several = (run_steps(tiny_program(math.prod(mesh.values()), mesh=mesh, model=model), 2)[1] for mesh in meshes)
    for mine, wanted in zip(several, one, strict=True):
        np.testing.assert_allclose((mine.loss, mine.grad_norm), (wanted.loss, wanted.grad_norm), rtol=2e-5)


# Coordinate checks (arXiv 2203.03466, appendix D.1).


def moved(kind, width, depth, steps=3):
    """Root mean squares of how far some updates move hidden states after the last block, and logits."""
    section = None if kind == "standard" else {"kind": kind, "base_width": 64} | ({"base_depth": 2} if kind == "completep" else {})
    shape = {
        "d_model": width,
        "n_layers": depth,
        "n_heads": width // 16,
        "n_kv_heads": width // 16,
        "d_ff": 2 * width,
        "parametrization": section,
    }
    program = tiny_program(1, model=shape, optimizer={"peak_lr": 2e-3, "warmup_steps": 0, "schedule": "constant"}, memory={"remat": "none"})
    batch = tiny_batch()

    @jax.jit
    def figures(params):
        model = bind(program.config.model, params)
        hidden_BSD = model(batch.tokens_BS[:4], batch.positions_BS[:4], batch.segment_ids_BS[:4]).x_BSD
        return hidden_BSD / model.final_norm.multiplier, hidden_BSD @ model.unembedding_VD.T

    first = jax.device_get(figures(first_state(program).params))
    after = jax.device_get(figures(run_steps(program, steps, batches=lambda step: tiny_batch())[0].params))
    return [rms(b - a) for a, b in zip(first, after, strict=True)]


def ratios(kind, sizes):
    """How many times larger the moves of the largest model are than those of the smallest: of hidden states, and of logits."""
    found = [moved(kind, *size) for size in sizes]
    print(kind, sizes, found)
    return [largest / smallest for smallest, largest in zip(found[0], found[-1], strict=True)]


@pytest.mark.soak
def test_moves_are_flat_over_widths():
    """From width 64 to 256 logits of the standard model move several times further; with muP about as far."""
    sizes = [(64, 2), (256, 2)]
    assert ratios("standard", sizes)[1] > 2.5
    assert all(0.6 < ratio < 1.5 for ratio in ratios("mup", sizes))


@pytest.mark.soak
def test_moves_are_flat_over_widths_to_512():
    sizes = [(64, 2), (128, 2), (256, 2), (512, 2)]
    assert ratios("standard", sizes)[1] > 4
    assert all(0.45 < ratio < 1.7 for ratio in ratios("mup", sizes))


@pytest.mark.soak
def test_moves_are_flat_over_depths():
    """From depth 2 to 16 hidden states of the standard model move further, although they are normed; with CompleteP about as far."""
    sizes = [(64, 2), (64, 16)]
    assert ratios("standard", sizes)[0] > 1.45
    assert all(0.6 < ratio < 1.5 for ratio in ratios("completep", sizes))


def test_parameters_of_another_parametrization_are_not_begun_from():
    one, other, plain = (
        tiny_config(model={"parametrization": section}).model for section in (COMPLETE, COMPLETE | {"base_width": 32}, None)
    )
    assert differences(one, one) == []
    assert differences(one, other) == ["model.parametrization.base_width is 16 there and 32 here"]
    assert any(text.startswith("model.parametrization") for text in differences(plain, one))
