"""Adapters on a frozen model: it starts as its source, only adapters move, and what is read from its checkpoint is W + scale A B."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import copy_of, drawn_on, gradients_of, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config import ConfigError, UserError, rules
from maxlm.config.loader import dump
from maxlm.config.schema import Config
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.models import abstract_parameters, bind
from maxlm.models.counts import token_flops
from maxlm.training.saved_run import SavedRun, open_run
from maxlm.training.start_from import begin_from

LORA = {"lora": {"rank": 3, "alpha": 6.0}}
MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_dense": 1, "router": {"bias_rate": 0.01}}, "n_layers": 3}
LATENT = {"latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}, "n_kv_heads": 8}


def save(folder, program, state):
    folder.mkdir()
    (folder / "config.yml").write_text(dump(program.config))
    checkpoints = Checkpoints(folder / "checkpoints", program.config.checkpoint, {})
    checkpoints.save(int(state.step), state, {})
    checkpoints.close()
    return SavedRun(folder, program.config)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(folder, parameters, loss on the fourth batch) of a model with other parameters than a run would draw."""
    program = plain_program()
    state = program.begin_with(drawn_on(program), {})
    folder = tmp_path_factory.mktemp("source") / "run"
    save(folder, program, state)
    params = jax.device_get(state.params)
    return folder, params, loss_of(program, state.params, state.model_state)


@functools.cache
def plain_program():
    return tiny_program(1)


def loss_of(program, params, model_state):
    with jax.set_mesh(program.mesh):
        sums = program.evaluate(params, model_state, jax.device_put(tiny_batch(3), program.batch_sharding))
    return float(sums.added["loss"] / sums.denominator)


@pytest.fixture(scope="module")
def adapted(source, tmp_path_factory):
    """(program with adapters and a moving average, first state, state after three steps, the folder it is saved in), on two devices."""
    start = {"path": str(source[0])}
    program = tiny_program(2, model=LORA, mesh={"fsdp": 2}, ema={"decay": 0.5}, train={"start_from": start})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.__class__, "init", lambda self: begin_from(self, StartFromConfig(**start), None))
        first = jax.device_get(program.init())
        state, _ = run_steps(program, 3, first=lambda program: program.init())
    saved = save(tmp_path_factory.mktemp("adapted") / "run", program, state)
    return program, first, state, saved


def test_it_starts_as_its_source_and_only_adapters_move(source, adapted):
    program, first, state, _ = adapted
    assert loss_of(program, first.params, first.model_state) == pytest.approx(source[2], rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.model_state), first.model_state)
    for (name, before), after in zip(named_leaves(first.params).items(), jax.tree.leaves(jax.device_get(state.params)), strict=True):
        assert not np.array_equal(before, after), name
    assert {name.rpartition(".")[2] for name in named_leaves(state.params)} == {"a", "b"}


@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_a_saved_run_opens_as_the_merged_model(adapted, kind):
    """Its loss is that of the model with adapters, and a matrix is W + alpha / rank A B, computed by hand."""
    program, _, state, saved = adapted
    plain = plain_program()
    weights = saved.weights(plain.mesh, kind=kind)
    params = state.params if kind == "raw" else state.extra["ema"]
    assert saved.config.model == plain.config.model
    assert jax.tree.map(jnp.shape, weights.params) == jax.tree.map(jnp.shape, abstract_parameters(plain.config.model))
    assert loss_of(plain, weights.params, weights.model_state) == pytest.approx(loss_of(program, params, state.model_state), rel=1e-5)
    base, adapter = (jax.device_get(tree["layers"]["0"]["attention"]["out_HKD"]) for tree in (state.model_state, params))
    wanted = base["base"] + 2.0 * np.einsum("LHVr,LrD->LHVD", adapter["a"], adapter["b"])
    np.testing.assert_allclose(jax.device_get(weights.params)["layers"]["0"]["attention"]["out_HKD"], wanted, rtol=1e-6, atol=1e-8)
    assert np.abs(wanted - base["base"]).max() > 1e-4


def test_a_run_starts_from_one_with_adapters(adapted):
    """A plain run goes on from the merged weights, and so does one with adapters of its own."""
    program, _, state, saved = adapted
    wanted = loss_of(program, state.params, state.model_state)
    averaged = loss_of(program, state.extra["ema"], state.model_state)
    for model, kind, loss in (({}, "raw", wanted), ({"lora": {"rank": 2}}, "raw", wanted), ({}, "ema", averaged)):
        following = tiny_program(1, model=model) if model else plain_program()
        begun = begin_from(following, StartFromConfig(path=str(saved.directory), weights=kind), None)
        assert loss_of(following, begun.params, begun.model_state) == pytest.approx(loss, rel=1e-5)


def test_new_rows_of_the_vocabulary_are_not_frozen_as_they_are_drawn(source):
    with pytest.raises(ConfigError, match="freeze the new rows"):
        begin_from(tiny_program(1, model={**LORA, "vocab_size": 136}), StartFromConfig(path=str(source[0])), None)


def test_resume_is_bitwise(adapted):
    """The state holds the frozen model, adapters, moments and moving average: its source is not needed any more."""
    program, _, state, saved = adapted
    restored = saved.checkpoints.restore(program.abstract_state).state
    batch = jax.device_put(tiny_batch(3), program.batch_sharding)
    with jax.set_mesh(program.mesh):
        straight, resumed = (program.step(copy_of(one), batch) for one in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (straight, resumed)))


def test_a_moving_average_is_asked_of_a_run_without_one(source):
    with pytest.raises(UserError, match="holds no moving average"):
        open_run(source[0]).check_kind("ema")


def test_nothing_of_the_size_of_a_frozen_matrix_is_differentiated_or_kept():
    """The layers' backward pass forms no gradient of W; the optimizer holds moments of adapters only; the step needs less memory."""
    program, full = tiny_program(1, model={**LORA, "d_ff": 448}), tiny_program(1, model={"d_ff": 448})

    def shapes(program):
        state = program.abstract_state
        with jax.set_mesh(program.mesh):
            text = str(jax.make_jaxpr(gradients_of(program))(state.params, state.model_state, program.abstract_batch))
        return [line for line in text.splitlines() if "dot_general" in line and ("f32[448,64]" in line or "f32[64,448]" in line)]

    assert shapes(full) and not shapes(program)
    moments = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.opt_state))
    assert moments == 2 * sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params)) + 2
    assert moments < sum(leaf.size for leaf in jax.tree.leaves(full.abstract_state.opt_state)) / 5


@pytest.mark.parametrize("model", [{}, MOE, LATENT, {"activation": "gelu", "bias": "all"}], ids=["dense", "experts", "latent", "gelu"])
def test_the_names_that_may_be_adapted_are_those_that_the_model_has(model):
    config = tiny_config(model={**LORA, **model})
    found = {name.split(".")[-2].rpartition("_")[0] for name in named_leaves(abstract_parameters(config.model))}
    assert found == set(config.model.adaptable)
    only = config.model.adaptable[-1]
    one = tiny_config(model={**model, "lora": {"rank": 3, "matrices": [only]}})
    assert {name.split(".")[-2].rpartition("_")[0] for name in named_leaves(abstract_parameters(one.model))} == {only}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"lora": {"rank": 3, "matrices": ["kv"]}}}, "this model has no `kv`"),
        ({"model": {**MOE, "lora": {"rank": 3, "matrices": ["gate"]}}, "mesh": {"stage": 2}}, "adapts none"),
        ({"model": {"lora": {"rank": 65}}}, "model.lora.rank = 65"),
        ({"model": LORA, "optimizer": {"name": "muon"}}, "use adamw"),
        ({"model": LORA, "diloco": {"workers": 2, "every": 2}}, "diloco = set"),
        ({"ema": {"decay": 0.9}, "diloco": {"workers": 2, "every": 2}}, "ema = set"),
        ({"ema": {"decay": 1 - 1e-9}}, "ema.decay"),
        ({"model": LORA}, "train.start_from = null"),
    ],
)
def test_what_does_not_go_together_is_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        config = tiny_config(**sections)
        rules.check_devices(config, config.mesh.stage)
        rules.check(config, {})


def test_flops_count_no_gradient_of_frozen_weights():
    """By hand: 4 FLOPs a frozen weight of a matmul, 6 one of an adapter, 12 a pair and dim of attention."""
    config = tiny_config(model={**LORA, "n_layers": 1}).model
    weights = 64 * 128 + 3 * 64 * 128 + 2 * 64 * 64 + 2 * 64 * 32
    adapters = 3 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert token_flops(config, 32, masked=False) == pytest.approx(4 * weights + 6 * adapters + 12 * 64 * 32)


def test_it_generates_as_the_merged_model(adapted):
    """Logits with adapters beside the matrices, as samples of a finished run are made."""
    program, _, state, saved = adapted
    merged = saved.weights(tiny_program(1).mesh)
    tokens_BS = jnp.asarray(tiny_batch().tokens_BS[:1])
    positions_BS = jnp.arange(tokens_BS.shape[1])[None]

    def hidden(config: Config, params, model_state):
        def run(params, model_state):
            return bind(config.model, params, model_state)(tokens_BS, positions_BS, jnp.ones_like(tokens_BS)).x_BSD

        with jax.default_matmul_precision("highest"):
            return jax.jit(run)(params, model_state)

    mine = hidden(program.config, jax.device_get(state.params), jax.device_get(state.model_state))
    np.testing.assert_allclose(mine, hidden(saved.config, *jax.device_get(merged[1:])), atol=1e-5)
