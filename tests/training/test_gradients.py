"""Reduction of gradients: one rule for its dtype on every path."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_program

from maxlm.training.gradients import reduced_once
from maxlm.training.step import in_one_pass

BY_HAND = {
    "microbatches": ({"data": 4, "fsdp": 1}, {"train": {"microbatches": 2}}),
    "zero 1": ({"fsdp": 4, "zero": 1}, {}),
    "zero 2": ({"fsdp": 2, "tensor": 2, "zero": 2}, {"train": {"microbatches": 2}}),
    "stages": ({"data": 2, "stage": 2, "fsdp": 1}, {"train": {"microbatches": 2}}),
    "workers": ({"data": 2, "fsdp": 2, "zero": 1}, {"diloco": {"workers": 2, "every": 2}}),
}
REDUCTION = re.compile(r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<((?:\d+x)*)(\w+)>\)', re.DOTALL)
MATRIX = 1000  # numbers in the smallest matrix of the tiny model at least, and in its largest norm at most


def program_of(mesh, compute, **sections):
    devices = math.prod(size for axis, size in mesh.items() if axis != "zero")
    return tiny_program(devices, mesh=mesh, precision={"compute": compute}, **sections)


@pytest.mark.parametrize(
    ("case", "compute"),
    [
        pytest.param(
            case, compute, marks=[pytest.mark.soak] if case in ("zero 1", "stages") or (compute == "float32" and case != "zero 2") else []
        )
        for case in BY_HAND
        for compute in ("bfloat16", "float32")
    ],
)
def test_matrices_are_reduced_in_the_dtype_they_are_computed_with(case, compute):
    """And norms in float32, by all reductions that are made by hand, whatever they were added up in before."""
    mesh, sections = BY_HAND[case]
    program = program_of(mesh, compute, **sections)
    text = program.lower().as_text()
    found = {(math.prod(int(size) for size in shape.split("x")[:-1]) > MATRIX, dtype) for shape, dtype in REDUCTION.findall(text)}
    assert (True, "bf16" if compute == "bfloat16" else "f32") in found
    assert {dtype for matrix, dtype in found if matrix} == {"bf16" if compute == "bfloat16" else "f32"}
    assert {dtype for matrix, dtype in found if not matrix} <= {"f32", "i32"}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_partitioner_is_given_gradients_in_that_dtype(microbatches):
    """It reduces the result of a matmul: what leaves the last one is cast to float32 only then."""
    program = program_of({"fsdp": 4}, "bfloat16", train={"microbatches": microbatches})
    with jax.set_mesh(program.mesh):
        gradients = jax.make_jaxpr(lambda params, batch: program.gradients(params, {}, batch, jnp.float32(1))[1])
        jaxpr = gradients(program.abstract_state.params, program.abstract_batch).jaxpr
    if microbatches > 1:
        jaxpr = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan").params["jaxpr"].jaxpr
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    casts = 0
    for var in jaxpr.outvars:
        if var.aval.size <= MATRIX or var.aval.dtype != jnp.float32:
            continue
        eqn = made_by[var]
        if eqn.primitive.name == "add":  # to the sum over microbatches
            eqn = made_by[eqn.invars[1]]
        assert eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.bfloat16, eqn
        casts += 1
    assert casts >= 9, "embedding, unembedding and the seven matrices of a block"


def test_what_adds_gradients_up_can_be_chosen():
    """By one function given to `reduced_once`; all gradients that are whole along the axes pass it."""

    def in_bfloat16(gradient, axes):
        return jax.lax.psum(gradient.astype(jnp.bfloat16), axes).astype(gradient.dtype)

    program = program_of({"data": 2, "fsdp": 2}, "float32")
    form = partial(in_one_pass, partial(program.objective.loss, summed=("data",)))
    gradients = reduced_once(program.config.model, program.config.precision.compute, form, ("data",), in_bfloat16)
    with jax.set_mesh(program.mesh):
        text = jax.jit(gradients).lower(program.abstract_state.params, {}, program.abstract_batch, jnp.float32(1)).as_text()
    dtypes = [dtype for _, dtype in REDUCTION.findall(text)]
    assert dtypes.count("bf16") == len(jax.tree.leaves(program.abstract_state.params))
