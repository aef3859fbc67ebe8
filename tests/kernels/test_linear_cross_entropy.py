"""Linear cross-entropy against its definition, split or not, and the memory it must not take."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlm.hlo.op_flops import matmul_flops
from maxlm.hlo.parser import read
from maxlm.kernels.linear_cross_entropy import Layout, linear_cross_entropy, token_scores
from maxlm.kernels.linear_cross_entropy.reference import cross_entropy_reference

linear_cross_entropy_module = importlib.import_module("maxlm.kernels.linear_cross_entropy")  # hidden by its function


def operands(seed=0, B=4, S=12, D=16, V=37):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((B, S, D), np.float32), 0.5 * rng.standard_normal((V, D), np.float32)
    targets, weights = rng.integers(0, V, (B, S)), rng.uniform(0, 2, (B, S))
    return tuple(map(jnp.asarray, (x, w, targets.astype(np.int32), np.where(weights < 0.6, 0.0, weights).astype(np.float32))))


def value_and_gradients(loss, **options):
    """The compiled loss and its gradients for hidden states and weights."""
    return jax.jit(jax.value_and_grad(lambda *operands: loss(*operands, **options), argnums=(0, 1)))


def total(*operands, **options):
    return linear_cross_entropy(*operands, **options).total


def by_definition(options):
    return value_and_gradients(cross_entropy_reference, **{"z_loss": 0.0, "softcap": None, **options})


OPTIONS = [{}, {"z_loss": 0.1}, {"softcap": 3.0}, {"z_loss": 0.05, "softcap": 2.0}]


@pytest.mark.parametrize(("options", "chunks"), [*zip(OPTIONS, (1, 3, 12, 1), strict=True), (OPTIONS[3], 12)])
def test_value_and_gradients_equal_the_definition(options, chunks):
    given = operands()
    (value, gradients), (wanted, wanted_gradients) = (
        value_and_gradients(total, chunks=chunks, **options)(*given),
        by_definition(options)(*given),
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for mine, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


# Words beyond the first 128 are not looked at for the shift: `above` is how far the logit of one of them lies above all others.
FAR = {"ordinary": 0.0, "a sum too large": 75.0, "an infinite sum": 500.0}


def wide(above, V=1536, **sizes):
    x, w, targets, weights = operands(7, V=V, **sizes)
    x, w, targets = (np.array(array) for array in (x, w, targets))
    x[1, :, 0], x[0, :, 0] = 1.0, 0.0  # of one row of the batch, on one device of a mesh
    w[:, 0], w[1200, 0], targets[1, 3] = 0.0, above, 1200
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(targets), weights


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]])
def test_a_word_that_is_not_looked_at_may_be_the_likeliest(options):
    ours, theirs = value_and_gradients(total, chunks=3, **options), by_definition(options)
    for far, above in FAR.items():
        (value, gradients), (wanted, wanted_gradients) = ours(*wide(above)), theirs(*wide(above))
        np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=far)
        for mine, other in zip(gradients, wanted_gradients, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=3e-5 * max(1, float(jnp.abs(other).max())), err_msg=far)


def test_logits_are_computed_once_unless_a_sum_is_too_large():
    """Of the compiled program: XLA takes out of a loop what depends on nothing that the loop carries."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in wide(0.0, V=4096, S=64)]
    loss = lambda x, w, targets, weights: linear_cross_entropy(x, w, targets, weights, chunks=2).total  # noqa: E731
    module = read(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().as_text())
    executed = list(module.executed())
    assert sum(run.op.opcode == "while" and run.op.trips == 0 for run in executed) == 1
    flops = sum(run.times * matmul_flops(module, run.op, module.computations[run.computation]) for run in executed)
    assert flops == 2 * 4 * 64 * 16 * (3 * 4096 + 128)


@pytest.mark.parametrize("error", [200.0, -200.0])
def test_the_loss_is_computed_no_more_than_twice(error, monkeypatch):
    """Whatever the second sum is: of logits beyond 1e8 the shift and the exponentials may come from different roundings."""
    exact = linear_cross_entropy_module._shift
    monkeypatch.setattr(linear_cross_entropy_module, "_shift", lambda *operands: exact(*operands) + error)
    assert not np.isfinite(linear_cross_entropy(*wide(0.0)).total)


def test_in_bfloat16_too_a_word_that_is_not_looked_at_may_be_the_likeliest():
    ours, theirs = value_and_gradients(total), by_definition({})
    for far, above in FAR.items():
        x, w, *rest = wide(above)
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        found, exact = ours(x, w, *rest)[1], theirs(x.astype(jnp.float32), w.astype(jnp.float32), *rest)[1]
        for mine, other in zip(found, exact, strict=True):
            assert float(jnp.linalg.norm(mine.astype(jnp.float32) - other) / jnp.linalg.norm(other)) < 2.0**-7, far


def test_the_gradient_of_a_likely_target_is_as_exact_as_its_dtype():
    """The probability of a target, 0.9999, and 1 are the same in bfloat16: their difference is the gradient."""
    x, w = jnp.ones((1, 8, 4), jnp.bfloat16), jnp.zeros((2048, 4), jnp.bfloat16).at[5].set(4.125)
    targets, weights = jnp.full((1, 8), 5), jnp.ones((1, 8))
    found = value_and_gradients(total)(x, w, targets, weights)[1][1]
    wanted = by_definition({})(x.astype(jnp.float32), w.astype(jnp.float32), targets, weights)[1][1]
    assert 1e-4 < float(-wanted[5, 0]) / 8 < 1e-3
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2.0**-7)


def test_parts_add_up_and_carry_no_gradient():
    x, w, targets, weights = operands(1)
    sums = linear_cross_entropy(x, w, targets, weights, z_loss=0.1)
    np.testing.assert_allclose(sums.total, sums.nll + 0.1 * sums.z, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: linear_cross_entropy(x, w, targets, weights, z_loss=0.1).nll))(x)
    assert not np.any(gradient)


def test_gradient_scales_with_the_cotangent():
    x, w, targets, weights = operands(2)
    loss = lambda w, times: times * linear_cross_entropy(x, w, targets, weights).total  # noqa: E731
    one, three = (jax.jit(jax.grad(loss))(w, times) for times in (1.0, 3.0))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_a_token_of_weight_zero_contributes_nothing():
    x, w, targets, weights = operands(3)
    silent = weights == 0
    loss = jax.jit(lambda x, targets: linear_cross_entropy(x, w, targets, weights).total)
    np.testing.assert_array_equal(loss(x, targets), loss(jnp.where(silent[..., None], 7.0, x), jnp.where(silent, 0, targets)))
    assert not np.any(jax.jit(jax.grad(loss))(x, targets)[silent])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_likelihoods_of_tokens_are_those_that_are_summed(softcap):
    x, w, targets, weights = operands(5)
    nll = token_scores(x, w, targets, chunks=3, softcap=softcap).nll_BS
    np.testing.assert_allclose(jnp.sum(weights * nll), linear_cross_entropy(x, w, targets, weights, softcap=softcap).nll, rtol=1e-6)
    logits = x @ w.T if softcap is None else softcap * jnp.tanh(x @ w.T / softcap)
    np.testing.assert_allclose(nll, -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0], rtol=2e-5, atol=1e-5)
    assert not np.any(jax.grad(lambda x: jnp.sum(token_scores(x, w, targets).nll_BS))(x))


def test_likelihoods_of_tokens_on_a_mesh():
    x, w, targets, _ = operands(6, B=4, S=8, V=38)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:8])
    layout = Layout(batch=("fsdp",), seq=("context",), vocab=("tensor",), embed=("fsdp",))
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    split = place(x, "fsdp", ("context", "tensor")), place(w, "tensor", "fsdp"), place(targets, "fsdp", "context")
    with jax.set_mesh(mesh):
        found = jax.jit(lambda *a: token_scores(*a, chunks=2, layout=layout).nll_BS)(*split)
    np.testing.assert_allclose(found, token_scores(x, w, targets).nll_BS, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("vocab", "embed", "far"), [(1, True, None), (1, False, "an infinite sum"), (2, False, None), (2, True, "an infinite sum")]
)
def test_splitting_over_a_mesh_changes_nothing(vocab, embed, far):
    x, w, targets, weights = operands(4, B=4, S=8, V=38) if far is None else wide(FAR[far], S=8)
    mesh = jax.make_mesh((2, 2, vocab), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: 4 * vocab])
    layout = Layout(batch=("data", "fsdp"), vocab=("tensor",) if vocab > 1 else (), embed=("fsdp",) if embed else ())
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    split = place(x, ("data", "fsdp")), place(w, "tensor", "fsdp"), place(targets, ("data", "fsdp")), place(weights, ("data", "fsdp"))

    def loss(layout):
        return jax.jit(
            jax.value_and_grad(
                lambda x, w, t, m: linear_cross_entropy(x, w, t, m, chunks=2, z_loss=0.1, layout=layout).total, argnums=(0, 1)
            )
        )

    with jax.set_mesh(mesh):
        value, gradients = loss(layout)(*split)
    wanted, wanted_gradients = loss(None)(x, w, targets, weights)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for mine, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(np.asarray(mine), other, atol=2e-5 * max(1, float(jnp.abs(other).max())))


@pytest.mark.parametrize("each_token", [False, True])
def test_logits_never_exist_all_at_once(each_token):
    B, S, D, V, chunks = 2, 256, 8, 4096, 16
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in [((B, S, D), "float32"), ((V, D), "float32"), ((B, S), "int32"), ((B, S), "float32")]]

    def temporaries(chunks):
        gradient = jax.grad(lambda x, w, t, m: linear_cross_entropy(x, w, t, m, chunks=chunks).total, argnums=(0, 1))
        alone = lambda x, w, t, m: token_scores(x, w, t, chunks=chunks).nll_BS  # noqa: E731
        return jax.jit(alone if each_token else gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits_bytes = B * S * V * 4
    assert temporaries(1) > logits_bytes
    assert temporaries(chunks) < logits_bytes / 2


@pytest.mark.parametrize(
    ("change", "named"), [({"w": (5, 3)}, "w (5, 3)"), ({"targets": (4, 11)}, "targets (4, 11)"), ({"chunks": 5}, "5 chunks do not divide")]
)
def test_shapes_that_do_not_fit_are_named(change, named):
    x, w, targets, weights = operands()
    w, targets = jnp.zeros(change.get("w", w.shape)), jnp.zeros(change.get("targets", targets.shape), jnp.int32)
    with pytest.raises(ValueError, match="linear_cross_entropy: ") as error:
        linear_cross_entropy(x, w, targets, weights, chunks=change.get("chunks", 1))
    assert named in str(error.value)
