"""Every ZeRO stage, alone and with other axes: gradients as on one device, state split the same way, and one reduction an update."""

import math
import re

import jax
import numpy as np
import pytest
from tiny import drawn_on, gradients_of, tiny_batch, tiny_program

from maxlm.hlo.parser import read
from maxlm.hlo.replica_groups import axes_of, device_groups

CASES = {  # mesh and microbatches
    "1 alone": ({"fsdp": 8, "zero": 1}, 1),
    "1 data tensor": ({"data": 2, "fsdp": 2, "tensor": 2, "zero": 1}, 2),
    "2 data": ({"data": 2, "fsdp": 4, "zero": 2}, 1),
    "2 tensor": ({"fsdp": 4, "tensor": 2, "zero": 2}, 4),
    "3 data": ({"data": 2, "fsdp": 4}, 2),
    "1 data stage": ({"data": 2, "fsdp": 2, "stage": 2, "zero": 1}, 2),
    "replicas": ({"data": 8, "fsdp": 1}, 2),
}


def compiled(mesh, microbatches):
    """(the program, the compiled sums and gradients)."""
    program = tiny_program(8 if mesh else 1, mesh=mesh, train={"microbatches": microbatches})
    run = jax.jit(gradients_of(program), out_shardings=(None, program.state_shardings.params))
    with jax.set_mesh(program.mesh):
        return program, run.lower(program.abstract_state.params, {}, program.abstract_batch).compile()


def gradients(program, run):
    with jax.set_mesh(program.mesh):
        return jax.device_get(run(drawn_on(program), {}, jax.device_put(tiny_batch(), program.batch_sharding)))


@pytest.fixture(scope="module")
def reference():
    return gradients(*compiled({}, 1))


SLOW = {"1 alone", "1 data stage", "2 tensor"}  # stage 1 with `tensor`, stage 2 with `data`


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in CASES])
def case(request):
    return request.param, *compiled(*CASES[request.param])


def test_sums_and_gradients_equal_one_device(case, reference):
    _, program, run = case
    sums, grads = gradients(program, run)
    wanted_sums, wanted = reference
    for mine, other in zip(jax.tree.leaves(sums), jax.tree.leaves(wanted_sums), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    for (path, mine), other in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * np.abs(other).max(), err_msg=jax.tree_util.keystr(path))


def test_state_is_split_whatever_the_stage(case):
    """Master weights and moments belong to the optimizer, which every stage splits."""
    _, program, _ = case
    share = 1 / math.prod(program.mesh.shape[axis] for axis in ("fsdp", "tensor", "stage"))
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.abstract_state)[0]:
        if leaf.ndim >= 2 and "norm" not in jax.tree_util.keystr(path):
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == share * leaf.size, jax.tree_util.keystr(path)


def test_axes_with_whole_weights_are_silent_until_the_microbatches_are_done(case):
    """Nothing inside the loop over microbatches is reduced over them; other axes go on talking there."""
    name, program, run = case
    if CASES[name][1] == 1:
        pytest.skip("one microbatch is no loop")
    mesh = tuple(program.mesh.shape.items())
    quiet = {"data"} if program.config.mesh.zero == 3 else {"data", "fsdp"}
    talk = [found for found in read(run.as_text()).executed() if re.match(r"all-|reduce-scatter", found.op.opcode)]
    axes = [(found.times, set(axes_of(device_groups(found.op.groups), mesh))) for found in talk]
    assert all(times == 1 for times, spoken in axes if spoken & quiet), axes
    assert any(times == 1 for times, spoken in axes if spoken & quiet), "once an update they do talk"
    assert any(times > 1 for times, _ in axes) == (name != "replicas"), "layers are gathered, or tensors exchanged, in every microbatch"
