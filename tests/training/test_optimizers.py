"""The table of update rules: each equals its reference for 50 updates, on every layout; its memory; its collectives; what decays."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import drawn_parameters, tiny_config

import maxlm
from maxlm.checkpoint import CheckpointError
from maxlm.checkpoint.reader import check_identity
from maxlm.config import ConfigError, UserError, choices, table
from maxlm.config.part import Part
from maxlm.config.sections.optimizer import MuonConfig, OptimizerConfig, SoapConfig
from maxlm.config.sections.optimizer_state import OptimizerStateConfig
from maxlm.config.table import identity
from maxlm.cost.model_shapes import parameter_leaves
from maxlm.models import abstract_parameters, parameter_axes
from maxlm.parallel import build_mesh
from maxlm.training.matrices import hidden_matrix
from maxlm.training.muon import scale_by_muon
from maxlm.training.optimizer import build_optimizer, learning_rate
from maxlm.training.schedule_free import averaged
from maxlm.training.soap import scale_by_soap
from maxlm.training.state_paths import state_shardings
from maxlm.training.update_rule import UpdateRule

UPDATES = 50
MODEL = {
    "vocab_size": 32,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "d_ff": 24,
}  # no matrix of less than full rank has a basis
OWN = {
    "muon": {"muon": {"adam_lr": 3e-3, "nesterov": False}},  # optax has another: see the test of updates
    "soap": {"soap": {"every": 7, "largest": 16}},
    "ademamix": {"ademamix": {"beta3": 0.999, "warmup_steps": 30}},
    "schedule_free": {"warmup_steps": 9, "beta1": 0.8},
}
SMALL = {"schedule_free": {"second_moment": "bfloat16"}}  # what else it keeps is no moment
LAYOUTS = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "stage": 2}]
# In the suite, the others in the soaks: adamw is elementwise as they are, and with `stage` muon reads matrices as soap does
OFTEN = {"tensor": ("adafactor", "adamw", "muon", "soap"), "stage": ("muon",)}
EXCHANGES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def config_of(name, mesh=None, **optimizer):
    settings = {"name": name, "warmup_steps": None, "schedule": "constant", "eps": 1e-6, **OWN.get(name, {}), **optimizer}
    stages = {"train": {"microbatches": 2}} if (mesh or {}).get("stage", 1) > 1 else {}
    return tiny_config(model=MODEL, optimizer=settings, mesh=mesh or {}, **stages)


WRONG = {  # what an update returns for updates and state, error
    "a state of another structure": (lambda g, s: (g, (s, s)), r"a state unlike .*: another structure, at \[0\]"),
    "a state of another dtype": (lambda g, s: (g, s + 0.5), r"a state unlike .*: it as float32\[\] in place of int32\[\]"),
    "updates that would be broadcast": (
        lambda g, s: (jax.tree.map(lambda x: x[:1], g), s),
        r"updates unlike .* as \[1, 16\] in place of .*",
    ),
    "updates of other parameters": (lambda g, s: ({"mine": g}, s), r"updates unlike .*: another structure, at \['mine'\].*"),
    "updates in another container": (lambda g, s: (tuple(g.values()), s), r"updates unlike .*: another structure, at .*"),
}


class Mine(UpdateRule):
    returned = None

    @classmethod
    def from_config(cls, own, optimizer):
        return cls(optimizer)

    def direction(self, axes):
        return optax.GradientTransformation(
            lambda params: jnp.int32(0), lambda gradient, state, params=None: Mine.returned(gradient, state)
        )


@pytest.fixture
def registry(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(choices, "registered", [])
        table.clear()
        yield
    table.clear()


@pytest.mark.parametrize("name", WRONG)
def test_updates_or_a_state_of_a_registered_rule_that_do_not_fit_are_one_line(name, registry, monkeypatch):
    returned, error = WRONG[name]
    maxlm.register(Part(kind="optimizer", name="mine", place=f"{__name__}:Mine"))
    monkeypatch.setattr(Mine, "returned", returned)
    optimizer, params = build_optimizer(config_of("mine")), abstract_parameters(config_of("mine").model)
    with pytest.raises(UserError, match=f"optimizer.name = mine returns {error}; mend its `direction`") as caught:
        jax.eval_shape(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def axes_of(config):
    return parameter_axes(config.model)


def mapped(function, axes, *trees):
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))


@functools.cache
def drawn(name):
    """(first parameters, noise of the gradients of 50 updates), as numpy."""
    first, draws = jax.device_get(drawn_parameters(config_of(name).model)), np.random.default_rng(1)
    return first, jax.tree.map(lambda leaf: draws.normal(size=(UPDATES, *leaf.shape)).astype(np.float32), first)


def gradient(params, noise):
    """A gradient that depends on the parameters."""
    return jax.tree.map(lambda p, g: 0.3 * p + g, params, noise)


def trained(config, optimizer, mesh=None):
    """Parameters after 50 updates, and the averaged point of schedule-free AdamW; one program for all of them, and its text."""
    first, noise = drawn(config.optimizer.name)
    params_sharding = state_sharding = noise_sharding = None
    if mesh is not None:
        _, _, params_sharding, state_sharding, _ = state_shardings(config.model, build_optimizer(config), mesh)
        noise_sharding = jax.tree.map(lambda s: jax.NamedSharding(mesh, jax.P(None, *s.spec)), params_sharding)

    def placed(tree, shardings):
        return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)

    def update(carry, noise):
        params, state = carry
        updates, state = optimizer.update(gradient(params, noise), state, params)
        return (placed(optax.apply_updates(params, updates), params_sharding), placed(state, state_sharding)), None

    def run(params, noise):
        (params, state), _ = jax.lax.scan(update, (params, placed(optimizer.init(params), state_sharding)), noise)
        return points(config, params, state)

    given = (first, noise) if mesh is None else jax.device_put((first, noise), (params_sharding, noise_sharding))
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        program = jax.jit(run).lower(*given).compile()
        return jax.device_get(program(*given)), program.as_text()


def points(config, params, state):
    if config.optimizer.name != "schedule_free":
        return params
    if isinstance(state, optax.contrib.ScheduleFreeState):
        return {"y": params, "x": optax.contrib.schedule_free_eval_params(state, params)}
    return {"y": params, "x": averaged(config.optimizer.beta1, params, state[-1].z)}


@pytest.fixture(scope="module", params=sorted(choices.names("optimizer")))
def one_device(request):
    config = config_of(request.param)
    return request.param, trained(config, build_optimizer(config))[0]


def assert_close(found, wanted, rtol=2e-4):
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(mine - other)) <= rtol * np.max(np.abs(other))


def reference(config):
    """optax's own optimizer where it has one."""
    settings, axes = config.optimizer, axes_of(config)
    common = {"weight_decay": settings.weight_decay, "mask": mapped(lambda names: "embed" in names, axes)}
    lr, b1, b2, eps = settings.peak_lr, settings.beta1, settings.beta2, settings.eps
    if settings.name == "adamw":
        return optax.adamw(lr, b1=b1, b2=b2, eps=eps, **common)
    if settings.name == "lion":
        return optax.lion(lr, b1=b1, b2=b2, **common)
    if settings.name == "ademamix":
        own, start = settings.ademamix, math.log(b1)

        def b3(count):
            done, end = jnp.minimum((count + 1) / own.warmup_steps, 1.0), math.log(own.beta3)
            return jnp.minimum(jnp.exp(start * end / ((1 - done) * end + done * start)), own.beta3)

        def alpha(count):
            return own.alpha * jnp.minimum((count + 1) / own.warmup_steps, 1.0)

        return optax.contrib.ademamix(lr, b1=b1, b2=b2, b3=b3, alpha=alpha, eps=eps, **common)
    if settings.name == "schedule_free":
        rate = learning_rate(config)
        decay, step = optax.add_decayed_weights(**common), optax.scale_by_learning_rate(rate)
        base = optax.chain(optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True), decay, step)
        # It takes the weight of update t (from 0) from the rate of t + 1, and not from the rate of its step.
        return optax.contrib.schedule_free(base, lambda count: rate(count - 1), b1=b1)
    assert settings.name == "muon"

    def numbers(names):
        dims = hidden_matrix(names)
        if dims is None:
            return None
        sides = ((dims.embed,), dims.others)
        return optax.contrib.MuonDimensionNumbers(*(sides if dims.embed < dims.others[0] else sides[::-1]))

    dims = mapped(numbers, axes)
    return optax.contrib.muon(
        lr,
        weight_decay=settings.weight_decay,
        eps=eps,
        nesterov=False,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dims,
    )


def soap_by_numpy(config):
    """Algorithm 3 of the paper, matrix by matrix, in float64, from the gradients that the run has seen. Its authors' code sorts directions
    by estimated eigenvalues before each QR decomposition, and second moments with them (nikhilvyas/SOAP, `get_orthogonal_matrix_QR`).
    """
    settings, own = config.optimizer, config.optimizer.soap
    b1, b2, lr = settings.beta1, settings.beta2, settings.peak_lr

    class Matrix:
        def __init__(self, w):
            self.w, self.m, self.v = w, np.zeros_like(w), np.zeros_like(w)
            self.cov = [np.zeros((n, n)) if n <= own.largest else None for n in w.shape]
            self.basis = [np.eye(n) for n in w.shape]

        def step(self, t, g):
            left, right = self.basis
            update = np.zeros_like(g)
            if t:
                self.m = b1 * self.m + (1 - b1) * g
                self.v = b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
                inside = (left.T @ self.m @ right) / (1 - b1**t) / (np.sqrt(self.v / (1 - b2**t)) + settings.eps)
                update = left @ inside @ right.T
            for i, one in enumerate((g, g.T)):
                if self.cov[i] is None:
                    continue
                self.cov[i] = b2 * self.cov[i] + (1 - b2) * one @ one.T
                if t == 0:
                    self.basis[i] = np.linalg.eigh(self.cov[i])[1][:, ::-1]
                elif t % own.every == 0:
                    power = self.cov[i] @ self.basis[i]
                    order = np.argsort(-np.einsum("ij,ij->j", self.basis[i], power))
                    self.v = np.take(self.v, order, axis=i)
                    self.basis[i] = np.linalg.qr(power[:, order])[0]
            self.update = update
            self.w = self.w - lr * (update + settings.weight_decay * self.w)

    return Matrix


def test_each_equals_its_reference_for_50_updates(one_device):
    name, found = one_device
    config = config_of(name)
    if name == "soap":
        compare_soap(config, found)
        return
    if name == "adafactor":
        pytest.skip("test_small_states.py has its reference")
    wanted = trained(config, reference(config))[0]
    if name == "muon":  # optax has NAdam for the rest, with another decay: ours is AdamW
        rest = optax.adamw(3e-3, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1, mask=mapped(lambda names: "embed" in names, axes_of(config)))
        adam = trained(config, rest)[0]
        wanted = mapped(lambda names, own, other: other if hidden_matrix(names) is None else own, axes_of(config), wanted, adam)
    assert_close(found, wanted)


def compare_soap(config, found):
    axes = axes_of(config)
    params, noise = drawn("soap")
    flat = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves, tree = jax.tree.flatten(params)
    dims = [hidden_matrix(names) for names in flat]
    make = soap_by_numpy(config)
    adam = optax.adamw(
        config.optimizer.peak_lr, b1=0.9, b2=0.95, eps=config.optimizer.eps, weight_decay=0.1, mask=mapped(lambda n: "embed" in n, axes)
    )
    others, state = params, jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(adam.init, params))
    matrices = {i: [make(np.asarray(w, np.float64)) for w in d.as_matrices(leaves[i])] for i, d in enumerate(dims) if d is not None}
    step = jax.jit(adam.update)
    for n in range(UPDATES):
        now = jax.tree.leaves(others)
        for i, own in matrices.items():
            now[i] = np.asarray(dims[i].as_parameter(np.stack([m.w for m in own]).astype(np.float32), leaves[i].shape))
        others = tree.unflatten(now)
        grads = gradient(others, jax.tree.map(lambda leaf, n=n: leaf[n], noise))
        for i, own in matrices.items():
            for m, g in zip(own, np.asarray(dims[i].as_matrices(jax.tree.leaves(grads)[i]), np.float64), strict=True):
                m.step(n, g)
        updates, state = step(grads, state, others)
        others = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), others, updates)
    mine = jax.tree.leaves(found)
    for i, wanted in enumerate(jax.tree.leaves(others)):
        if i in matrices:
            wanted = np.asarray(dims[i].as_parameter(np.stack([m.w for m in matrices[i]]), leaves[i].shape))
        assert np.max(np.abs(mine[i] - wanted)) <= 2e-3 * np.max(np.abs(wanted)), flat[i]


def soap_updates(gradients, names=("expert", "embed", "mlp"), mesh=None):
    """Updates of SOAP for given gradients of stacked matrices, new bases every 10, on one device or a mesh."""
    rule = scale_by_soap(OptimizerConfig(name="soap"), SoapConfig(every=10), {"w": names})
    update, found = jax.jit(rule.update), []
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        state = rule.init({"w": jnp.zeros(gradients.shape[1:])})
        for gradient in gradients:
            change, state = update({"w": jnp.asarray(gradient)}, state)
            found.append(np.asarray(change["w"]))
    return np.array(found)


def apart(found, wanted):
    """Largest distance of an update, as a share of its norm."""
    return max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found[1:], wanted[1:], strict=True))


def test_soap_is_its_authors_for_30_updates():
    """Square matrices of full rank with eigenvalues that are apart: 22% off without the sort."""
    draws = np.random.default_rng(3)
    gradients = (draws.normal(size=(31, 2, 12, 12)) * np.logspace(0, -0.5, 12)).astype(np.float32)
    config = config_of("soap", soap={"every": 10, "largest": 16}, eps=1e-8)
    own, wanted = [soap_by_numpy(config)(np.zeros((12, 12))) for _ in range(2)], []
    for n, stacked in enumerate(gradients):
        for matrix, g in zip(own, stacked, strict=True):
            matrix.step(n, g.astype(np.float64))
        wanted.append(np.stack([matrix.update for matrix in own]))
    assert apart(soap_updates(gradients), np.array(wanted)) < 1e-4


def test_soap_does_not_depend_on_rounding_where_covariances_have_a_null_space():
    """Gradients that differ by rounding, and another mesh: 40 to 90% apart when rounding chose bases of null spaces."""
    draws = np.random.default_rng(4)
    gradients = draws.normal(size=(12, 8, 16, 24))  # wide: G^T G of the first has rank 16
    gradients[:, 2:5] = draws.normal(size=(12, 3, 16, 4)) @ draws.normal(size=(12, 3, 4, 24))  # few tokens
    gradients[:, 5:, :, -5:] = 0  # nothing for some outputs, nor for some inputs
    gradients[:, 6:, :3] = 0
    gradients = gradients.astype(np.float32)
    wanted = soap_updates(gradients)
    rounded = (gradients * (1 + 6e-8 * draws.choice([-1, 0, 1], gradients.shape))).astype(np.float32)
    mesh = build_mesh(config_of("soap", {"fsdp": 4, "tensor": 2}), jax.devices()[:8])
    assert apart(soap_updates(rounded), wanted) < 2e-4
    assert apart(soap_updates(gradients, mesh=mesh), wanted) < 2e-4


@pytest.mark.parametrize(
    ("one_device", "sizes"),
    [
        pytest.param(
            name,
            sizes,
            id=f"{name}-" + "-".join(f"{axis}{n}" for axis, n in sizes.items()),
            marks=[] if any(name in OFTEN.get(axis, ()) for axis in sizes) else [pytest.mark.soak],
        )
        for name in sorted(choices.names("optimizer"))
        for sizes in LAYOUTS
    ],
    indirect=["one_device"],
    scope="module",  # as the fixture, or it would train again for each layout
)
def test_every_layout_computes_the_same_and_exchanges_what_the_table_says(one_device, sizes):
    name, wanted = one_device
    config = config_of(name, sizes)
    mesh = build_mesh(config, jax.devices()[:8])
    found, text = trained(config, build_optimizer(config), mesh)
    assert_close(found, wanted, 2e-3)
    exchanged = set(re.findall(rf" ({EXCHANGES})(?:-start)?\(", text))
    if choices.part("optimizer", name).facts.gathers:
        assert exchanged & {"all-to-all", "all-gather"}
        sums = [line.split(" all-reduce")[0] for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
        shapes = [shape for line in sums for shape in re.findall(r"f32\[([\d,]*)\]", line.split(" = ")[1])]
        assert not [shape for shape in shapes if "," in shape], "norms of matrices are summed over devices, and no products"
    elif name == "adafactor":
        assert exchanged <= {"all-reduce", "all-gather", "collective-permute"}
    else:
        assert exchanged == set(), "an elementwise rule exchanges nothing"


@pytest.mark.parametrize("name", sorted(choices.names("optimizer")))
@pytest.mark.parametrize("state", [None, {"moments": "bfloat16"}])
def test_the_table_states_the_bytes_that_the_state_holds(name, state):
    """Of hidden matrices: a lower bound, which only means of rows and columns exceed, and of SOAP covariances and bases."""
    if name == "adafactor" and state is not None:
        pytest.skip("refused: no first moment")
    config = config_of(name, state=SMALL.get(name, state)) if state else config_of(name)
    stated = (config.optimizer.state or OptimizerStateConfig()).moment_bytes(config.optimizer.facts)
    axes = jax.tree.leaves(axes_of(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    for names, leaf in zip(axes, parameter_leaves(config), strict=True):
        if hidden_matrix(names) is not None:
            rest = leaf.held_bytes((None,), leaf.numbers) - (4 + stated) * leaf.numbers
            assert rest > 0 if config.optimizer.facts.more else 0 <= rest < leaf.numbers, names


def test_a_checkpoint_says_which_sides_have_bases():
    """The default is the same with a section and without; how often bases are renewed may change."""
    plain, named, often, smaller = (identity(config_of("soap", soap=own), "") for own in (None, {}, {"every": 3}, {"largest": 64}))
    assert plain == named == often != smaller
    assert smaller["optimizer.soap.largest"] == "64"


def test_second_moments_that_are_frozen_keep_the_decay_that_they_were_made_with():
    """What divides the updates depends on it; in AdamW it may change, also with gradients in int8, which freeze nothing."""
    kinds = ({"compression": {"kind": "sign", "warmup_steps": 4}}, {"compression": {"kind": "int8"}}, {})
    frozen, whole, plain = (tiny_config(mesh={"data": 2, "slices": 2}, **kind) for kind in kinds)
    assert identity(frozen, "")["optimizer.beta2"] == str(frozen.optimizer.beta2)
    assert "optimizer.beta2" not in identity(whole, "") | identity(plain, "")
    with pytest.raises(CheckpointError, match=r"optimizer.beta2 is 0.5 there"):
        check_identity({**identity(frozen, ""), "optimizer.beta2": "0.5"}, identity(frozen, ""), "another")


def decayed(config, params):
    """Updates where the gradient is zero."""
    optimizer = build_optimizer(config)
    return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]


def test_only_matrices_decay():
    params, _ = drawn("adamw")
    params = jax.tree.map(lambda p: p + 1.0, params)
    updates = jax.jit(lambda params: {name: decayed(config_of(name), params) for name in choices.names("optimizer")})(params)
    axes = jax.tree.leaves(axes_of(config_of("adamw")), is_leaf=lambda leaf: isinstance(leaf, tuple))
    for name, of_rule in updates.items():
        for names, update in zip(axes, jax.tree.leaves(of_rule), strict=True):
            assert np.any(np.asarray(update) != 0) == ("embed" in names), (name, names)


def test_decay_of_adafactor_is_of_the_size_of_that_of_adamw_at_the_rates_of_the_docs():
    """Relative to the matrix, as updates are: without its root mean square it was 33 times AdamW's. Independent decay is not."""
    adamw, adafactor = config_of("adamw", peak_lr=3e-4), config_of("adafactor", peak_lr=1e-2)
    independent = config_of("adafactor", peak_lr=1e-2, weight_decay={"independent": 1e-3})
    params, _ = drawn("adamw")
    w = np.asarray(params["embedding_VD"])
    every = jax.jit(lambda params: [decayed(config, params)["embedding_VD"] for config in (adamw, adafactor, independent)])(params)
    wanted, found, alone = (np.asarray(one) for one in every)
    assert 0.3 < np.linalg.norm(found) / np.linalg.norm(wanted) < 3
    np.testing.assert_allclose(found, -1e-2 * 0.1 * np.sqrt(np.mean(w**2)) * w, rtol=1e-5)
    np.testing.assert_allclose(alone, -1e-3 * w, rtol=1e-5)


EXPERTS = {"down_DEF": ("embed", "expert", "mlp"), "up_DEF": ("embed", "expert", "mlp")}


def test_experts_are_scaled_as_dense_matrices_of_their_sides():
    """By sqrt(max(1, outputs / inputs)): the matrix back to the model's width is stored with the width first, as those from it are."""
    x = np.random.default_rng(0).normal(size=(8, 2, 32)).astype(np.float32)  # width, experts, hidden units

    @jax.jit
    def change(x):
        rules = {name: scale_by_muon(MuonConfig(update_rms=None), "float32", {name: axes}) for name, axes in EXPERTS.items()}
        return {name: rule.update({name: x}, rule.init({name: x}))[0][name] for name, rule in rules.items()}

    updates = change(x)
    sizes = [
        float(np.sqrt(np.sum(np.asarray(updates[name]) ** 2) / 2 / 8)) for name in EXPERTS
    ]  # the singular values of a matrix, which has 8
    assert sizes[1] / sizes[0] == pytest.approx(2.0), "32 outputs of 8 inputs, and 8 of 32"
    assert sizes[0] == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "unit", [lambda x: x / (np.linalg.norm(x) + 1e-7), lambda x: x / max(np.linalg.norm(x), 1e-7)], ids=["jordan", "torch"]
)
def test_muon_is_that_of_jordan_and_of_torch(nesterov, unit):
    """github.com/KellerJordan/Muon and torch.optim.Muon (`match_rms_adamw`) in numpy: momentum and Nesterov's step without corrections."""
    rule = scale_by_muon(MuonConfig(nesterov=nesterov), "float32", {"w": ("embed", "mlp")})
    draws, state, m = np.random.default_rng(5), rule.init({"w": jnp.zeros((12, 20))}), np.zeros((12, 20))
    update = jax.jit(rule.update)
    for _ in range(30):
        g = draws.normal(size=(12, 20)).astype(np.float32)
        found, state = update({"w": g}, state)
        m = 0.95 * m + 0.05 * g
        x = unit(0.95 * m + 0.05 * g if nesterov else m)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        np.testing.assert_allclose(found["w"], 0.2 * 20**0.5 * x, atol=2e-5)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"name": "lion", "state": {"second_moment": "int8"}}}, "second_moment = int8.*lion"),
        ({"optimizer": {"name": "soap", "state": {"second_moment": "factored"}}}, "second_moment = factored.*soap"),
        ({"optimizer": {"name": "soap"}, "model": {"lora": {"rank": 2}}}, "soap.*lora"),
        ({"optimizer": {"name": "ademamix", "ademamix": {"beta3": 1.0}}}, "ademamix.beta3"),
        ({"optimizer": {"name": "ademamix", "ademamix": {"beta3": 0.9}, "beta1": 0.9}}, "ademamix.beta3 = 0.9: is not above .*beta1 = 0.9"),
    ],
)
def test_contradictions_of_a_rule_are_one_line(sections, said):
    with pytest.raises(ConfigError, match=said):
        tiny_config(**sections)


def test_what_another_rule_reads_contradicts_nothing():
    assert tiny_config(optimizer={"name": "adamw", "ademamix": {"beta3": 0.5}})


def test_no_batch_of_matrices_is_given_to_lapack():
    """Two batches at once, on two threads, waited for each other for ever: a hang at the first update of SOAP on a CPU."""
    config = config_of("soap")
    optimizer = build_optimizer(config)
    params, _ = drawn("soap")
    text = jax.jit(optimizer.update).lower(params, jax.eval_shape(optimizer.init, params), params).as_text()
    batched = jax.jit(jnp.linalg.eigh).lower(jnp.zeros((3, 8, 8))).as_text()
    given = [re.findall(r"lapack_(?:ssyevd|sgeqrf|sorgqr)_ffi.*: \(tensor<([^>]*)x?f32>", one) for one in (text, batched)]
    assert {shape.count("x") for shape in given[1]} == {3} and {shape.count("x") for shape in given[0]} == {2}
