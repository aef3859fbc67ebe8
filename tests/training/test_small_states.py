"""The optimizer's state in fewer bytes: the same on every mesh, in checkpoints bit for bit, and training that goes as with float32."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import copy_of, drawn_parameters, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config import ConfigError
from maxlm.config.loader import dump
from maxlm.config.sections.optimizer import AdafactorConfig
from maxlm.config.table import call, identity
from maxlm.cost.memory import state_parts
from maxlm.cost.model_shapes import parameter_leaves
from maxlm.models import abstract_parameters, parameter_axes
from maxlm.objectives import Sums
from maxlm.training import fits
from maxlm.training.factored import adafactor, factored_adam, matrix_dims
from maxlm.training.optimizer import build_optimizer
from maxlm.training.saved_run import open_run
from maxlm.training.split_masters import SplitMasters, join_all
from maxlm.training.step import TrainState, Update, build_train_step

INT8, BF16 = {"moments": "int8"}, {"moments": "bfloat16"}
MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32}}
STEPS = 6


def stored_as(state, **sections):
    return {**sections, "optimizer": {"state": state, **sections.get("optimizer", {})}}


# The optimizer alone, with gradients that are given.


def updated(mesh, **sections):
    """(program, parameters after two updates, state of the optimizer)."""
    program = tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, **sections)
    shardings, rng = program.state_shardings, np.random.default_rng(0)
    shapes = abstract_parameters(program.config.model)
    params, *grads = (jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 50, shapes) for _ in range(3))

    def update(params, state, grads):
        change, state = program.optimizer.update(grads, state, params)
        return optax.apply_updates(params, change), state

    out = shardings.params, shardings.opt_state
    run = jax.jit(update, in_shardings=(*out, shardings.params), out_shardings=out)
    with jax.set_mesh(program.mesh):
        params = jax.device_put(params, shardings.params)
        state = jax.tree.map(lambda a, s: jax.device_put(np.zeros(a.shape, a.dtype), s), program.abstract_state.opt_state, out[1])
        for grad in grads:
            params, state = run(params, state, jax.device_put(grad, shardings.params))
    return program, params, state


@pytest.mark.soak
def test_codes_are_the_same_on_every_mesh_and_split_as_their_parameters():
    """With equal gradients; XLA may round a scale otherwise. Scales are split along their other dims."""
    mesh = {"expert": 2, "tensor": 2, "fsdp": 2}
    one, *others = (updated(mesh, **stored_as(INT8, model=MOE)) for mesh in ({}, mesh))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(one[2])} == {"int8", "uint8", "float32", "int32"}
    for program, params, state in others:
        own = named_leaves(program.abstract_state.params)
        for name, leaf in named_leaves(state).items():
            parameter = next((own[other] for other in own if name.endswith(f".{other}")), None)
            if parameter is not None and ".inner." in name:
                assert leaf.sharding == parameter.sharding
            elif parameter is not None:
                mine, full = (np.floor_divide(a.shape, a.sharding.shard_shape(a.shape)) for a in (leaf, parameter))
                assert not (full % mine).any() and (mine == full)[np.equal(leaf.shape, parameter.shape)].all()
        for (name, leaf), wanted in zip(named_leaves(state).items(), jax.tree.leaves(one[2]), strict=True):
            if leaf.dtype == jnp.float32:
                np.testing.assert_allclose(leaf, wanted, rtol=1e-6, err_msg=name)
            else:
                assert np.mean(np.asarray(leaf) != np.asarray(wanted)) < 1e-4, name
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), jax.device_get(params), jax.device_get(one[1]))


def test_muon_keeps_its_momentum_in_bfloat16():
    state = named_leaves(tiny_program(1, optimizer={"name": "muon", "state": BF16}).abstract_state.opt_state)
    found = {name: leaf.dtype.name for name, leaf in state.items() if ".mu." in name}
    assert {dtype for name, dtype in found.items() if "norm" not in name} == {"bfloat16"} and any("gate_DF" in name for name in found)
    assert {dtype for name, dtype in found.items() if "norm" in name} == {"float32"}


def test_without_the_section_the_optimizer_is_that_of_optax():
    names = {
        name: list(named_leaves(tiny_program(1, **sections).abstract_state.opt_state))
        for name, sections in {"absent": {}, "float32": stored_as({}), "narrow": stored_as(BF16)}.items()
    }
    assert names["absent"] == names["float32"] != names["narrow"]
    assert names["absent"][0] == "0.count"


@pytest.mark.parametrize(("moments", "default"), [("int8", "nearest"), ("bfloat16", "stochastic")])
def test_each_format_has_a_rounding_of_its_own(moments, default):
    """Without `rounding` the update is the program in which moments are rounded as the format's default does it."""
    other = {"nearest": "stochastic", "stochastic": "nearest"}[default]
    found, wanted, otherwise = (
        text_of(**stored_as({"moments": moments, **set_to})) for set_to in ({}, {"rounding": default}, {"rounding": other})
    )
    assert found == wanted != otherwise


def text_of(**sections):
    """The update of the optimizer alone, traced, without the addresses of functions."""
    program = tiny_program(1, **sections)
    params = abstract_parameters(program.config.model)
    traced = jax.make_jaxpr(program.optimizer.update)(params, jax.eval_shape(program.optimizer.init, params), params)
    return re.sub("0x[0-9a-f]+", "", str(traced))


def test_masters_of_24_bits_are_rounded_by_chance_beside_int8_moments():
    config = tiny_program(1, **stored_as({**INT8, "masters": "split24"}, precision={"compute": "bfloat16"})).config
    masters = jnp.full((4, 256), 1 + 2**-18)
    before, after = (
        np.unique(np.asarray(call(SplitMasters.from_config, config, config.optimizer.state).stored(("w",), masters, step)[1]))
        for step in (None, jnp.int32(1))
    )
    assert len(before) == 1 and len(after) == 2


# Factored second moments.

AXES = {"w": ("layers", "embed", "mlp"), "b": ("layers", "embed_act")}


def grads_of(shape=(2, 4, 6)):
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=shape).astype(np.float32), "b": rng.normal(size=(2, 4)).astype(np.float32)}


def test_a_matrix_is_factored_in_every_layer():
    """Two updates of Adam with v = rows x columns / mean of the rows, in numpy."""
    settings = tiny_config(optimizer={"beta1": 0.5, "beta2": 0.75}).optimizer
    transform = factored_adam(settings, AXES)
    first, second = grads_of(), {"w": grads_of()["w"][::-1], "b": grads_of()["b"] * 2}
    state = transform.init(first)
    assert state.nu.rows["w"].shape == (2, 4, 1) and state.nu.columns["w"].shape == (2, 1, 6) and state.nu.whole["w"] is None
    update = jax.jit(transform.update)
    _, state = update(first, state)
    found, _ = update(second, state)
    m = {name: (0.25 * first[name] + 0.5 * second[name]) / 0.75 for name in first}
    square = {name: (0.1875 * first[name] ** 2 + 0.25 * second[name] ** 2) / (1 - 0.75**2) for name in first}
    rows, columns = square["w"].mean(2, keepdims=True), square["w"].mean(1, keepdims=True)
    v = {"w": rows * columns / rows.mean(1, keepdims=True), "b": square["b"]}
    for name in first:
        np.testing.assert_allclose(found[name], m[name] / (np.sqrt(v[name]) + settings.eps), rtol=1e-5)


def test_adafactor_by_hand():
    """Update 1 has decay 0; a clip of the root mean square at 1; the rate times that of the matrix, of each layer by itself."""
    grads, params = (
        grads_of(),
        {"w": np.stack([np.full((4, 6), 2.0), np.zeros((4, 6))]).astype(np.float32), "b": np.ones((2, 4), np.float32)},
    )
    transform = adafactor(AdafactorConfig(), AXES)
    change = jax.jit(transform.update)
    found, state = change(grads, transform.init(params), params)
    square = grads["w"] ** 2
    rows, columns = square.mean(2, keepdims=True), square.mean(1, keepdims=True)
    update = grads["w"] / np.sqrt(rows * columns / rows.mean(1, keepdims=True))
    update /= np.maximum(1, np.sqrt((update**2).mean((1, 2), keepdims=True)))
    np.testing.assert_allclose(found["w"], update * np.array([2.0, 1e-3])[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(found["b"], np.sign(grads["b"]), rtol=1e-5)
    _, state = change(jax.tree.map(lambda g: 3 * g, grads), state, params)
    kept = 1 - 2**-0.8
    np.testing.assert_allclose(state.nu.whole["b"], (kept + (1 - kept) * 9) * grads["b"] ** 2, rtol=1e-5)
    zero, _ = adafactor(AdafactorConfig(clip=None, relative=False), AXES).update(
        jax.tree.map(jnp.zeros_like, grads), transform.init(params), params
    )
    assert all(not leaf.any() for leaf in jax.tree.leaves(zero)), "a gradient of zeros moves nothing"


def test_one_matrix_as_optax_has_it():
    grad = {"w": np.random.default_rng(1).normal(size=(8, 12)).astype(np.float32)}
    theirs = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    ours = adafactor(AdafactorConfig(clip=None, relative=False), {"w": ("embed", "mlp")})
    states = [transform.init(grad) for transform in (theirs, ours)]
    changes = [jax.jit(transform.update) for transform in (theirs, ours)]
    for n in range(3):
        given = {"w": grad["w"] * (n + 1) ** 2}
        (wanted, states[0]), (found, states[1]) = (change(given, s, grad) for change, s in zip(changes, states, strict=True))
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-5)


def test_what_is_factored():
    axes = parameter_axes(tiny_config(model={**MOE, "bias": "all"}).model)
    found = {name: matrix_dims(leaf) for name, leaf in named_leaves_of(axes).items()}
    assert found["embedding_VD"] == ((1,), (0,)) and found["final_norm.scale_D"] is None
    assert found["layers.0.mlp.gate_DEF"] == ((1,), (3,)), "an expert's matrix by itself"
    assert found["layers.0.attention.query_DHK"] == ((1,), (2, 3)) and found["layers.0.attention.query_bias_HK"] is None


def named_leaves_of(axes):
    paths = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


# Training.


@pytest.fixture(scope="module")
def small():
    """(program, last state, metrics) with 8-bit moments, masters of 24 bits and a moving average, on two devices."""
    sections = stored_as({**INT8, "masters": "split24"}, ema={"decay": 0.9}, precision={"compute": "bfloat16"})
    program = tiny_program(2, mesh={"fsdp": 2}, **sections)
    return program, *run_steps(program, STEPS)


def test_training_goes_as_with_float32(small):
    """Losses on two devices as on one, within the noise of bfloat16 matmuls."""
    _, plain = run_steps(tiny_program(1, precision={"compute": "bfloat16"}), STEPS)
    wanted = [float(metrics.loss) for metrics in plain]
    np.testing.assert_allclose([float(metrics.loss) for metrics in small[2]], wanted, rtol=2e-3)


def test_masters_in_two_halves_are_the_float32_masters():
    """Two steps of gradient descent on equal gradients: bit for bit, while the gradient is asked for at the bfloat16 halves."""
    sections = stored_as({"masters": "split"}, precision={"compute": "bfloat16"}, optimizer={"clip_norm": None})
    program, optimizer = tiny_program(1, **sections), optax.sgd(0.5)  # half a gradient is exact, so XLA cannot round it otherwise
    masters = drawn_parameters(program.config.model)
    given, asked = {}, []

    def gradients(params, model_state, batch, denominator):
        asked.append({name: leaf.dtype.name for name, leaf in named_leaves(params).items()})
        return Sums(jnp.float32(1), {"loss": jnp.float32(0)}, {}), given["grads"]

    build = partial(Update, program.objective, optimizer, program.update.rate, gradients)
    of_halves, of_masters = build([call(SplitMasters.from_config, program.config, program.config.optimizer.state)]), build()

    @jax.jit
    def both(plain, halves, grads):
        given["grads"] = grads
        return of_masters(plain, tiny_batch())[0], of_halves(halves, tiny_batch())[0]

    plain = TrainState(jnp.int32(0), jnp.int32(0), masters, optimizer.init(masters))
    halves = of_halves.init(masters, {})
    for _ in range(2):
        plain, halves = both(plain, halves, jax.tree.map(jnp.square, masters))
    joined = jax.jit(join_all)(halves.params, halves.extra["residual"])
    jax.tree.map(np.testing.assert_array_equal, joined, plain.params)
    assert halves.params["embedding_VD"].dtype == jnp.bfloat16 and not np.array_equal(joined["embedding_VD"], masters["embedding_VD"])
    assert (asked[0]["embedding_VD"], asked[1]["embedding_VD"], asked[1]["final_norm.scale_D"]) == ("float32", "bfloat16", "float32")


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one, other)))


@pytest.fixture(scope="module")
def saved(small, tmp_path_factory):
    program, state, _ = small
    folder = tmp_path_factory.mktemp("small") / "run"
    folder.mkdir()
    (folder / "config.yml").write_text(dump(program.config))
    checkpoints = Checkpoints(folder / "checkpoints", program.config.checkpoint, identity(program.config, ""))
    checkpoints.save(STEPS, state, {})
    checkpoints.close()
    return folder


def test_resume_is_bitwise_and_on_another_mesh_the_state_is_the_same(small, saved):
    program, state, _ = small
    checkpoints = Checkpoints(saved / "checkpoints", program.config.checkpoint, identity(program.config, ""))
    restored = checkpoints.restore(program.abstract_state).state
    batch = jax.device_put(tiny_batch(STEPS), program.batch_sharding)
    with jax.set_mesh(program.mesh):
        straight, resumed = (program.step(copy_of(one), batch) for one in (state, restored))
    equal(straight[0], resumed[0])
    other = tiny_program(2, **{**program.config.model_dump(exclude_none=True), "mesh": {"fsdp": 1, "tensor": 2}})
    moved = checkpoints.restore(other.abstract_state).state
    equal(moved, state)
    assert moved.opt_state[0].inner.mu["embedding_VD"].sharding == other.state_shardings.params["embedding_VD"]
    with pytest.raises(Exception, match=r"optimizer\.state\.moments is int8 there and not set here"):
        Checkpoints(saved / "checkpoints", program.config.checkpoint, identity(tiny_config(), "")).restore(other.abstract_state)


def test_a_saved_run_opens_with_float32_weights(small, saved):
    _, state, _ = small
    one = tiny_program(1)
    masters = jax.jit(join_all)(state.params, state.extra["residual"])
    for kind, wanted in (("raw", masters), ("ema", state.extra["ema"])):
        found = open_run(saved).weights(one.mesh, kind=kind).params
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))
    assert jax.tree.leaves(masters)[0].dtype == jnp.float32


def test_the_state_is_counted(small):
    """By `maxlm compile`, by the planner, and by the bound that refuses what cannot fit."""
    program, state, _ = small
    parameters, optimizer, _ = state_parts(program)
    device = jax.devices()[0]

    def held(*trees):
        return sum(shard.data.nbytes for leaf in jax.tree.leaves(trees) for shard in leaf.addressable_shards if shard.device == device)

    residual = state.extra["residual"]
    assert parameters.bytes == held(state.params, residual) and parameters.name == "parameters (bfloat16 and 8 bits)"
    assert optimizer.bytes == held(state.opt_state, state.extra["ema"]) and optimizer.name == "optimizer (adamw int8)"
    assert parameters.bytes + optimizer.bytes < held(state.extra["ema"]) * (1 + 0.75 + 2 * 0.3)
    sizes = dict(program.mesh.shape)
    planned = sum(leaf.held_bytes((None,), leaf.on_device(sizes)) for leaf in parameter_leaves(program.config))
    assert abs(planned - parameters.bytes - optimizer.bytes) < 0.02 * planned
    bound = fits.least(program.config, sizes)[0].bytes
    assert 0.8 * (parameters.bytes + optimizer.bytes) < bound <= parameters.bytes + optimizer.bytes


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(stored_as(INT8, diloco={"workers": 2, "every": 2}, mesh={"data": 2}), marks=pytest.mark.soak),
        stored_as({"masters": "split"}, precision={"compute": "bfloat16"}, mesh={"zero": 1, "fsdp": 2}, train={"microbatches": 2}),
        pytest.param(
            stored_as({**BF16, "second_moment": "factored"}, mesh={"stage": 2}, train={"microbatches": 2}), marks=pytest.mark.soak
        ),
        stored_as(BF16, model={"lora": {"rank": 4}}, mesh={"fsdp": 2}),
    ],
    ids=["diloco", "zero 1", "stage", "lora"],
)
def test_other_updates_take_it(sections):
    """Traced: the state that comes out has the leaves and shardings of the one that goes in."""
    program = tiny_program(2, **{**sections, "mesh": {"fsdp": 1, **sections["mesh"]}})
    with jax.set_mesh(program.mesh):
        after, _ = jax.eval_shape(
            build_train_step(program.update),
            program.abstract_state,
            program.abstract_batch,
        )
    before = named_leaves(program.abstract_state)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(after).items()} == {
        n: (a.shape, a.dtype) for n, a in before.items()
    }
    assert {leaf.dtype.name for leaf in before.values()} & {"int8", "bfloat16", "int16"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"name": "adafactor", "state": BF16}}, "moments = bfloat16.*no first moment"),
        ({"optimizer": {"name": "muon", "state": {"second_moment": "factored"}}}, "second_moment = factored.*muon"),
        ({"optimizer": {"state": {"masters": "split"}}}, r"masters = split.*precision\.compute = float32"),
        (
            {"optimizer": {"state": {"masters": "split"}}, "diloco": {"workers": 2, "every": 2}, "precision": {"compute": "bfloat16"}},
            "diloco",
        ),
        ({"optimizer": {"state": {"masters": "split"}}, "model": {"lora": {"rank": 2}}, "precision": {"compute": "bfloat16"}}, "lora"),
    ],
)
def test_contradictions_are_one_line(sections, said):
    with pytest.raises(ConfigError, match=said):
        tiny_config(**sections)


def test_adafactor_needs_almost_no_state():
    config = tiny_config(optimizer={"name": "adafactor"})
    state = jax.eval_shape(build_optimizer(config).init, abstract_parameters(config.model))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(config.model)))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 0.06 * numbers
