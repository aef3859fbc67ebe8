"""`precision.matmul` in the model: which matmuls are quantized, how often, and that layouts and remat policies change no loss."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from tiny import first_state, gradients_of, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.config import ConfigError
from maxlm.config.table import inert
from maxlm.models.quantized import parts_of
from maxlm.precision import Parts

INT8 = {"format": "int8"}
MATRICES = 7  # of a layer
EXPERTS = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32}}
LATENT = {"latent": {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}, "n_kv_heads": 8}


def program_of(matmul=INT8, mesh=None, compute="float32", **sections):
    mesh = mesh or {"fsdp": 1}
    return tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, precision={"compute": compute, "matmul": matmul}, **sections)


def dots(program) -> Counter:
    """Matmuls of the gradient by the dtypes of their operands; of a scan those of its body, once."""

    def of(jaxpr) -> Counter:
        found = Counter()
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found[tuple(str(var.aval.dtype) for var in eqn.invars)] += 1
            for inner in jaxprs_in_params(eqn.params):
                found += of(inner)
        return found

    state = program.abstract_state
    with jax.set_mesh(program.mesh):
        return of(jax.make_jaxpr(gradients_of(program))(state.params, state.model_state, program.abstract_batch).jaxpr)


@pytest.fixture(scope="module")
def high():
    """Matmuls of the model without quantization."""
    return dots(program_of(None, memory={"remat": "none"})).total()


@pytest.mark.parametrize(
    ("settings", "matrices"),
    [({}, 7), ({"skip": ("down", "key"), "scaling": "tensor"}, 5), ({"first_layers": 1}, 7), ({"last_layers": 1}, 7)],
    ids=str,
)
def test_three_matmuls_a_matrix_are_quantized_and_no_other(settings, matrices, high):
    """A layer that is kept high is in a scan of its own, with its own matmuls in high precision."""
    found = dots(program_of({**INT8, **settings}, memory={"remat": "none"}))
    assert found.pop(("int8", "int8")) == 3 * matrices
    in_high = found.pop(("float32", "float32"))
    assert in_high > high if "layers" in str(settings) else in_high == high - 3 * matrices
    assert not found


@pytest.mark.parametrize(
    ("sections", "matrices"),
    [
        ({"model": {**LATENT, "mtp": {"depth": 1}}, "matmul": {"format": "fp8"}}, 16),
        ({"model": {"lora": {"rank": 2}, "activation": "gelu", "bias": "all"}}, 6),
        ({"model": EXPERTS}, 7),
        ({"model": EXPERTS, "matmul": {**INT8, "skip": ("experts",)}}, 4),
    ],
    ids=["fp8, latent, mtp", "lora, gelu", "experts", "experts skipped"],
)
def test_matrices_of_every_kind(sections, matrices):
    found = dots(program_of(memory={"remat": "none"}, **sections))
    quantized = sum(count for dtypes, count in found.items() if all(dtype == "int8" or dtype.startswith("float8") for dtype in dtypes))
    assert quantized == 3 * matrices, found  # of a frozen matrix one is read by nothing, and XLA leaves it out


def test_weights_only_multiplies_in_high_precision(high):
    found = dots(program_of({"format": "int4", "weights_only": True}, memory={"remat": "none"}))
    assert found == {("float32", "float32"): high}


@pytest.mark.parametrize("remat", ["full", "dots", ("layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up")])
def test_remat_multiplies_only_what_it_says_again(remat):
    """Policy `dots` keeps the results of quantized matmuls, and computes none again; `full` all but the last."""
    found = dots(program_of(memory={"remat": remat}))
    assert found["int8", "int8"] == 3 * MATRICES + (MATRICES - 1 if remat == "full" else 0)


LAYOUTS = {
    "fsdp x tensor": ({"fsdp": 2, "tensor": 2}, {}),
    "stages": ({"fsdp": 2, "stage": 2}, {"train": {"microbatches": 2}}),
    "data, once an update": ({"data": 2, "fsdp": 2}, {"train": {"microbatches": 2}}),
    "context": ({"context": 2, "fsdp": 2}, {}),
    "zero 2": ({"fsdp": 4}, {"mesh": {"zero": 2}}),
}


@pytest.fixture(scope="module")
def alone():
    return program_of()


@pytest.fixture(scope="module")
def plain(alone):
    return [float(metrics.loss) for metrics in run_steps(alone, 3)[1]]


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_losses(layout, plain):
    """Up to what int8 leaves open: parts of the mesh have scales of their own."""
    mesh, sections = LAYOUTS[layout]
    mesh = {**mesh, **sections.pop("mesh", {})}
    devices = math.prod(size for axis, size in mesh.items() if axis != "zero")
    program = tiny_program(devices, mesh={"fsdp": 1, **mesh}, precision={"compute": "float32", "matmul": INT8}, **sections)
    np.testing.assert_allclose([float(metrics.loss) for metrics in run_steps(program, 3)[1]], plain, rtol=1e-3)


def test_losses_are_near_those_of_high_precision(plain):
    high = [float(metrics.loss) for metrics in run_steps(program_of(None), 3)[1]]
    np.testing.assert_allclose(plain, high, rtol=3e-3)
    assert plain != high


def test_parts_are_those_of_the_mesh():
    program = program_of(mesh={"fsdp": 2, "tensor": 2, "context": 2})
    entering, hidden, between = ("batch", "seq", "embed_act"), ("batch", "seq", "mlp"), ("batch", "seq_between", "embed_act")
    with jax.set_mesh(program.mesh):
        assert parts_of(entering, hidden, (4, 8, 16)) == Parts(2, 2, 1, 2)
        assert parts_of(hidden, between, (4, 8, 16)) == Parts(2, 2, 2, 1)
        assert parts_of(between, between, (4, 8, 16)) == Parts(2, 4, 1, 1)
        assert parts_of(entering, hidden, (4, 2**18, 16)) == Parts(2, 4, 1, 2)  # else a part would sum 2^18 tokens
    assert parts_of(entering, hidden, (4, 8, 16)) == Parts()


def test_a_gradient_that_is_not_finite_is_refused(alone):
    """int8 has no NaN, and the update must be skipped all the same."""
    program, state = alone, first_state(alone)
    params = jax.tree.map(lambda leaf: leaf, state.params)
    params["layers"]["0"]["mlp"]["up_DF"] = params["layers"]["0"]["mlp"]["up_DF"].at[0, 0, 0].set(jnp.nan)
    state = type(state)(state.step, state.skipped, params, state.opt_state, state.model_state)
    with jax.set_mesh(program.mesh):
        state, metrics = program.step(jax.device_put(state, program.state_shardings), jax.device_put(tiny_batch(), program.batch_sharding))
    assert int(metrics.skipped) == 1 and not np.isfinite(float(metrics.loss))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"model": {"layer_pattern": ("local", "global"), "window": 8, "n_layers": 4}, "matmul": {"first_layers": 1}},
            "periods of 2 layers",
        ),
        ({"mesh": {"stage": 2}, "matmul": {"first_layers": 1}, "train": {"microbatches": 2}}, "one program"),
        ({"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 48}}, "matmul": {"hadamard": 32}}, "48 inputs of `experts`"),
    ],
)
def test_contradictions_are_refused(sections, words):
    matmul = {**INT8, **sections.pop("matmul", {})}
    with pytest.raises(ConfigError, match=words):
        tiny_config(precision={"compute": "float32", "matmul": matmul}, **sections)


def test_dispatch_is_for_experts_on_several_devices():
    dispatch = {"precision": {"compute": "float32", "dispatch": {"format": "int8"}}}
    with pytest.raises(ConfigError, match=re.escape("the model has no experts (model.moe)")):
        tiny_config(**dispatch)
    found = {one.field: one.why for one in inert(tiny_config(**dispatch, model=EXPERTS))}
    assert found["precision.dispatch"] == "mesh.expert = 1, so that no token travels"


@pytest.mark.soak
def test_a_step_with_quantized_experts_and_dispatch_has_nearly_the_loss_of_one_device():
    """Two devices gather tokens; rows that are rounded on their way are rounded again alike by the first matmul."""
    sections = {"model": EXPERTS, "mesh": {"expert": 2}}
    precision = {"compute": "float32", "matmul": INT8, "dispatch": {"format": "int8"}}
    (_, apart), (_, alone) = (
        run_steps(program, 2) for program in (tiny_program(2, precision=precision, **sections), program_of(model=EXPERTS))
    )
    losses = [[float(metrics.loss) for metrics in run] for run in (apart, alone)]
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert not any(int(metrics.skipped) for metrics in apart)
