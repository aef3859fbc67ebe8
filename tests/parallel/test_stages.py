"""A pipeline computes what one device does, whatever stands in its bubbles, and keeps and says no more than it must."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tiny import (
    GLOBAL_BATCH,
    SEQ_LEN,
    drawn_on,
    drawn_parameters,
    gradients_of,
    steps_of,
    sums_and_gradients,
    tiny_batch,
    tiny_config,
    tiny_program,
)

from maxlm.cost.network import is_collective
from maxlm.hlo.parser import read
from maxlm.models import BlockContext, abstract_parameters, bind
from maxlm.models.stages import StageAssignment, run_unless_padding
from maxlm.parallel.pipeline import StageFunctions, pipeline_gradients
from maxlm.parallel.schedule import Schedule

STEPS = 3
SLOWLY = {"peak_lr": 1e-3}  # Adam divides by the root of a tiny second moment: steps that are large blow rounding up
DEEP = {"n_layers": 8}
UNEVEN = {"n_layers": 6}
PATTERN = {
    "n_layers": 3,
    "layer_pattern": ("local", "global"),
    "window": 8,
    "tie_embeddings": True,
    "parametrization": {"kind": "completep", "base_width": 32, "base_depth": 2},
}  # the last period is cut short
EXPERTS = {
    "n_layers": 4,
    "moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1},
    "parametrization": {"kind": "completep", "base_width": 32, "base_depth": 2},
}
LAYOUTS = {  # devices, model, mesh, other sections
    "stage, fewer microbatches than stages": (8, DEEP, {"stage": 8, "fsdp": 1}, {"train": {"microbatches": 4}}),
    "stage x data, as many, a pattern": (4, PATTERN, {"stage": 2, "data": 2, "fsdp": 1}, {"train": {"microbatches": 2}}),
    "stage x fsdp x tensor": (8, DEEP, {"stage": 2, "fsdp": 2, "tensor": 2}, {"train": {"microbatches": 4}}),
    "stage x fsdp, more, uneven": (8, UNEVEN, {"stage": 4, "fsdp": 2}, {"train": {"microbatches": 8}}),
    "interleaved": (8, DEEP, {"stage": 4, "fsdp": 2}, {"train": {"microbatches": 4}, "pipeline": {"chunks": 2}}),
    "experts": (2, EXPERTS, {"stage": 2, "fsdp": 1}, {"train": {"microbatches": 4}}),
    "gpipe": (4, UNEVEN, {"stage": 4, "fsdp": 1}, {"train": {"microbatches": 8}, "pipeline": {"schedule": "gpipe"}}),
}


def steps(program):
    """Metrics of each step, the first moments after the first (the gradient, clipped and scaled), and the last parameters."""
    seen, _ = steps_of(program, STEPS)
    return [metrics for metrics, _ in seen], seen[0][1]


@pytest.fixture(scope="module")
def references():
    """The same steps on one device, by the model."""
    found = {}

    def reference(model):
        key = str(model)
        if key not in found:
            found[key] = steps(tiny_program(1, model=model, optimizer=SLOWLY))
        return found[key]

    return reference


def program_of(name):
    devices, model, mesh, sections = LAYOUTS[name]
    return tiny_program(devices, model=model, mesh=mesh, **sections, optimizer=SLOWLY)


def test_sums_and_gradients_of_a_pattern_equal_one_device():
    """Stages do not divide it, and embeddings are tied; with `fsdp` and `tensor`. Whole steps: the soak of test_matrix.py."""
    mesh = {"stage": 2, "fsdp": 2, "tensor": 2}
    programs = tiny_program(8, model=PATTERN, mesh=mesh, train={"microbatches": 2}), tiny_program(1, model=PATTERN)
    (sums, gradients), (wanted_sums, wanted) = map(sums_and_gradients, programs)
    for mine, other in zip(jax.tree.leaves(sums), jax.tree.leaves(wanted_sums), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    for (path, mine), other in zip(jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * np.abs(other).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_gradients_equal_one_device(layout, references):
    (metrics, moments), (wanted_metrics, wanted_moments) = steps(program_of(layout)), references(LAYOUTS[layout][1])
    for mine, wanted in zip(metrics, wanted_metrics, strict=True):
        assert mine.batch_digest == wanted.batch_digest
        assert mine.tokens == wanted.tokens
        for name in ("loss", "z", "grad_norm", "lr"):
            np.testing.assert_allclose(getattr(mine, name), getattr(wanted, name), rtol=1e-5, err_msg=name)
    for (path, mine), wanted in zip(jax.tree_util.tree_flatten_with_path(moments)[0], jax.tree.leaves(wanted_moments), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_rest_on_every_device_alike(layout):
    """No device holds more than its share of a matrix or of a moment, stages or not."""
    program = program_of(layout)
    split = program.mesh.shape["stage"] * program.mesh.shape["fsdp"] * program.mesh.shape["tensor"]
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.abstract_state)[0]:
        if leaf.ndim >= 2 and "norm" not in jax.tree_util.keystr(path):
            assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * split == leaf.size, jax.tree_util.keystr(path)


@pytest.mark.soak
def test_stages_exchange_activations_and_nothing_else_but_the_dealing_out():
    """With nothing but stages: in the loop of ticks no collective is larger than the hidden states of a microbatch; outside it all-to-alls
    carry the layers out and their gradients back.
    """
    program = program_of("stage, fewer microbatches than stages")
    microbatches, shardings = program.config.train.microbatches, (None, program.state_shardings.params)
    with jax.set_mesh(program.mesh):
        run = jax.jit(gradients_of(program), out_shardings=shardings)
        module = read(run.lower(program.abstract_state.params, {}, program.abstract_batch).compile().as_text())
    hidden = GLOBAL_BATCH // microbatches * SEQ_LEN * program.config.model.d_model * 4
    said = [run for run in module.executed() if is_collective(run.op)]
    turning = [run for run in said if run.times > 1]
    assert {run.op.opcode for run in turning} <= {"collective-permute", "all-reduce", "all-gather", "reduce-scatter"}
    assert max(shape.bytes for run in turning for shape in run.op.shapes) <= hidden
    permutes = [run for run in turning if run.op.opcode == "collective-permute" and "ppermute" in run.op.where]
    schedule = Schedule("1f1b", 8, microbatches)
    assert sum(run.times for run in permutes) == sum(phase.ticks * (phase.forward + phase.backward) for phase in schedule.phases)
    dealt = [run for run in said if run.op.opcode == "all-to-all"]
    matrices = [leaf for leaf in jax.tree.leaves(program.abstract_state.params["layers"]) if leaf.ndim > 2]
    assert sum(run.op.bytes for run in dealt) == 2 * sum(leaf.size * 4 // 8 for leaf in matrices)


def test_held_out_loss_is_the_same_without_the_pipeline():
    devices, model, mesh, sections = LAYOUTS["gpipe"]
    sums = []
    for program in (tiny_program(devices, model=model, mesh=mesh, **sections), tiny_program(1, model=model)):
        with jax.set_mesh(program.mesh):
            sums.append(jax.device_get(program.evaluate(drawn_on(program), {}, jax.device_put(tiny_batch(), program.batch_sharding))))
    np.testing.assert_allclose(*[np.array(jax.tree.leaves(one)) for one in sums], rtol=1e-5)


# A small computation in place of a model: layers are x -> tanh(x w), hidden states [rows, 8].

WIDTH, ROWS = 8, 4


def toy(schedule, layers_WW, ends, parts, layer):
    """`pipeline_gradients` compiled: a function of the output of idle layers to sums, gradients of layers and ends."""
    mesh = jax.make_mesh((schedule.stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[: schedule.stages])
    functions = StageFunctions(
        embed=lambda ends, part: part @ ends["first"],
        inputs=lambda part, place: part[0, 0],
        layers=lambda layers, idle, x, scale: (
            (jax.lax.scan(lambda x, w: (layer(x, w, scale, idle[0]), None), x, layers)[0], jnp.float32(0)),
            None,
        ),
        loss=lambda ends, part, x: ((loss := jnp.sum(jnp.cos(x @ ends["last"]))), {"loss": loss}),
        empty_sums=lambda sums: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums),
        add_sums=lambda sums, others: jax.tree.map(jnp.add, sums, others),
    )

    def given(idle):
        trees = layers_WW, np.full(schedule.stages * schedule.chunks, idle, np.float32), ends, parts
        return [
            jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in zip(trees, (P("stage"), P("stage"), P(), P()), strict=True)
        ]

    with jax.set_mesh(mesh):
        compiled = jax.jit(partial(pipeline_gradients, schedule, functions)).lower(*given(0)).compile()
    return compiled, lambda idle: jax.device_get(compiled(*given(idle)))


def toy_layer(x, w, scale, _=None):
    return jnp.tanh(x @ w * scale)


@jax.custom_vjp
def poisoned_layer(x, w, scale, idle):
    """`toy_layer`, with `idle` as its output and in its gradients where it reads nothing."""
    return jnp.where(jnp.all(x == 0), idle, toy_layer(x, w, scale))


def _poisoned_backward(kept, dy):
    *operands, idle, y = kept
    x, w, scale = operands
    dz = dy * (1 + y) * (1 - y)
    gradients = dz @ w.T * scale, x.T @ dz * scale, jnp.sum(dz * (x @ w))
    return *(gradient + jnp.where(jnp.all(x == 0), idle, 0) for gradient in gradients), jnp.zeros_like(idle)


poisoned_layer.defvjp(lambda *given: ((y := poisoned_layer(*given)), (*given, y)), _poisoned_backward)


def toy_operands(schedule, layers=1):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    depth = schedule.stages * schedule.chunks * layers
    return draw(depth, WIDTH, WIDTH), {"first": draw(WIDTH, WIDTH), "last": draw(WIDTH, WIDTH)}, draw(schedule.microbatches, ROWS, WIDTH)


SCHEDULES = [
    pytest.param(Schedule("1f1b", 4, 6), marks=pytest.mark.soak),
    pytest.param(Schedule("gpipe", 4, 6), marks=pytest.mark.soak),
    Schedule("1f1b", 4, 8, 2),
    Schedule("gpipe", 2, 4, 3),
    Schedule("1f1b", 4, 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_nan_in_bubbles_changes_nothing(schedule):
    """A stage that has nothing to do passes on NaN and keeps NaN, and its backward pass makes NaN of the zeros that it reads: sums and
    gradients are what they were, to the bit, and right.
    """
    layers, ends, parts = operands = toy_operands(schedule)
    _, run = toy(schedule, *operands, poisoned_layer)
    plain = run(0)
    jax.tree.map(np.testing.assert_array_equal, run(np.nan), plain)
    order = np.arange(len(layers)).reshape(schedule.stages, schedule.chunks, -1).swapaxes(0, 1).reshape(-1)  # depth first

    def loss(layers, ends):
        def one(part):
            x = jax.lax.scan(lambda x, w: (toy_layer(x, w, part[0, 0]), None), part @ ends["first"], layers[order])[0]
            return jnp.sum(jnp.cos(x @ ends["last"]))

        return jnp.sum(jax.vmap(one)(parts))

    wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(layers, ends)
    (sums, _), gradients = plain
    for mine, other in zip(jax.tree.leaves((sums["loss"], gradients)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_nan_in_padding_changes_nothing():
    """Weights of padded layers are NaN: hidden states and gradients are what they were, to the bit."""
    config = tiny_config(model=PATTERN).model
    assignment = StageAssignment(config, 2)
    active = assignment.active(jnp.int32(1))
    assert [rows.tolist() for rows in active] == [[True], [False]], "the second of two periods lacks its global layer"
    params = drawn_parameters(config)
    x_BSD = np.random.default_rng(0).standard_normal((2, SEQ_LEN, config.d_model)).astype(np.float32)
    positions_BS, segment_ids_BS = np.arange(SEQ_LEN)[None].repeat(2, 0), np.ones((2, SEQ_LEN), np.int32)

    @jax.jit
    def outcome(layers):
        def total(layers, x_BSD):
            model = bind(config, {**abstract_parameters(config), "layers": layers})
            context = BlockContext(model.angles(positions_BS), segment_ids_BS, memory=tiny_config().memory)
            y_BSD = model.run(x_BSD, context, ("layers",), {"layers": active}, run_unless_padding).x_BSD
            return jnp.sum(y_BSD**2), y_BSD

        (_, y_BSD), (grads, dx_BSD) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(layers, x_BSD)
        return y_BSD, grads["0"], dx_BSD

    spoilt = {**params["layers"], "1": jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params["layers"]["1"])}
    plain, other = outcome(params["layers"]), outcome(spoilt)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, plain, other)


@pytest.mark.soak
def test_memory_of_1f1b_does_not_grow_with_the_microbatches():
    """Compiled temporaries: the same for 8 and 32 microbatches of the same size; gpipe keeps all 32."""

    def temporaries(kind, microbatches):
        schedule = Schedule(kind, 4, microbatches)
        compiled, _ = toy(schedule, *toy_operands(schedule, layers=16), toy_layer)
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temporaries("1f1b", microbatches) for microbatches in (8, 32))
    assert many == pytest.approx(few, rel=0.02)
    kept = (32 - Schedule("1f1b", 4, 32).depth) * 16 * ROWS * WIDTH * 4  # of each layer what it reads, of so many microbatches more
    assert temporaries("gpipe", 32) - many >= kept
