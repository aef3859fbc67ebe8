"""The same computation on every layout, and the communication each layout is allowed."""

import collections
import functools
import math
import re

import jax
import numpy as np
import pytest
from tiny import run_steps, tiny_program

from maxlm.models import init_parameters
from maxlm.training.program import Program

LAYOUTS = {
    "data": {"data": 8, "fsdp": 1},
    "fsdp": {"fsdp": 8},
    "tensor": {"fsdp": 1, "tensor": 4, "data": 2},
    "data_fsdp": {"data": 4, "fsdp": 2},
    "fsdp_tensor": {"fsdp": 4, "tensor": 2},
    "data_fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}
STEPS = 3


@functools.cache
def program_on(layout):
    """The program of a layout, or of one device for None; its step is compiled once for all tests."""
    return tiny_program(8, mesh=LAYOUTS[layout]) if layout else tiny_program(1)


@pytest.fixture(scope="module")
def reference():
    state, metrics = run_steps(program_on(None), STEPS, first=Program.init)
    return jax.device_get(state), metrics


SLOW = LAYOUTS.keys() - {"data_fsdp_tensor"}  # each axis in test_zero.py, too


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in LAYOUTS])
def layout(request):
    program = program_on(request.param)
    return request.param, program, *run_steps(program, STEPS, first=Program.init)


def test_losses_norms_and_parameters_equal_one_device(layout, reference):
    _, _, state, metrics = layout
    wanted_state, wanted_metrics = reference
    for mine, wanted in zip(metrics, wanted_metrics, strict=True):
        assert mine.batch_digest == wanted.batch_digest
        assert mine.tokens == wanted.tokens
        for name in ("loss", "z", "grad_norm", "lr"):
            np.testing.assert_allclose(getattr(mine, name), getattr(wanted, name), rtol=1e-5, err_msg=name)
    for mine, wanted in zip(jax.tree.leaves(jax.device_get(state.params)), jax.tree.leaves(wanted_state.params), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-4)  # Adam divides by the root of a tiny second moment


def test_state_is_created_and_kept_sharded(layout):
    """No device holds more than its share of any matrix, at creation and after the steps."""
    name, program, state, _ = layout
    fsdp, tensor = program.mesh.shape["fsdp"], program.mesh.shape["tensor"]
    for tree in (program.init(), state):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            share = leaf.addressable_shards[0].data.size / leaf.size
            if leaf.ndim >= 2 and "norm" not in jax.tree_util.keystr(path):
                assert share == pytest.approx(1 / (fsdp * tensor)), (name, jax.tree_util.keystr(path))


def test_state_is_never_gathered_at_creation():
    """The program that makes the state holds no collective, and no temporary as large as a whole matrix."""
    program = tiny_program(8, mesh={"fsdp": 8}, model={"vocab_size": 4096, "d_model": 512})
    make = jax.jit(lambda: program.update.init(init_parameters(program.config.model, 0), {}), out_shardings=program.state_shardings)
    with jax.set_mesh(program.mesh):
        compiled = make.lower().compile()
    assert not collectives(compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 512 * 4


# What each layout may say to the other devices: kind -> mesh axes it may run over, by the size of its groups.
# CPU programs write a reduce-scatter as an all-reduce and a slice where the partitioner made it, so gradients count as all-reduce.
ALLOWED = {
    "data": {"all-reduce": {8}},
    "fsdp": {"all-gather": {8}, "all-reduce": {8}, "reduce-scatter": {8}},
    "data_fsdp": {"all-gather": {2}, "all-reduce": {8, 4, 2}, "reduce-scatter": {2}},
    "tensor": {"all-gather": {4}, "all-reduce": {2, 4, 8}, "reduce-scatter": {4}},
    "fsdp_tensor": {"all-gather": {4, 2}, "all-reduce": {2, 4, 8}, "reduce-scatter": {2, 4}},
    "data_fsdp_tensor": {"all-gather": {2}, "all-reduce": {2, 4, 8}, "reduce-scatter": {2}},
}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)")


def collectives(hlo: str) -> list[tuple[str, int, int]]:
    """(kind, group size, largest operand or result in elements) of every collective in the text."""
    found = []
    for line in hlo.splitlines():
        match = COLLECTIVE.search(line)
        if not match:
            continue
        sizes = [math.prod(int(d) for d in dims.split(",") if d) for dims in re.findall(r"[a-z]+\d+\[([\d,]*)\]", match.group(1))]
        found_group = group_size(line)
        found.append((match.group(2), found_group, max(sizes, default=1)))
    return found


def group_size(line: str) -> int:
    """Devices that take part in one instance of the collective on this line, in any of the three ways XLA writes groups."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        return math.prod(sizes[axis] for axis in re.findall(r"'([^']+)'", named.group(2)))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    assert listed, f"unread replica groups: {line[:200]}"
    return len(listed.group(1).split(","))


def test_compiled_step_holds_the_collectives_its_layout_needs_and_no_others(layout):
    name, program, _, _ = layout
    found = collectives(program.step.as_text())
    kinds = collections.defaultdict(set)
    for kind, group, _ in found:
        kinds[kind].add(group)
    assert set(kinds) <= set(ALLOWED[name]), f"unexpected {set(kinds) - set(ALLOWED[name])}"
    for kind, groups in kinds.items():
        assert groups <= ALLOWED[name][kind], f"{kind} over groups of {groups - ALLOWED[name][kind]}"
    assert "all-reduce" in kinds, "gradients must be reduced"
    assert ("all-gather" in kinds) == (name != "data"), "weights, or sequence shards, are gathered unless nothing is split"


def test_one_device_says_nothing():
    assert not collectives(program_on(None).step.as_text())


@pytest.mark.soak
def test_pure_data_parallelism_reduces_gradients_only():
    """No activation travels: every all-reduce is of the size of parameters (fused ones are tuples) or a scalar."""
    program = program_on("data")
    local_activation = 16 // 8 * 32 * 64
    sizes = [size for _, _, size in collectives(program.step.as_text())]
    parameter_sizes = {math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state.params)}
    layers = {math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(program.abstract_state.params["layers"])}
    assert all(size in parameter_sizes | layers | {1} for size in sizes), (sizes, local_activation)
