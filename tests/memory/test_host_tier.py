"""State in host memory (`memory.offload_state`): the same bits as on the device, on every layout."""

import jax
import numpy as np
import pytest
from tiny import run_steps, tiny_batch, tiny_program

from maxlm.memory.spaces import is_on_host

HOST = {"optimizer": "host", "master": "host"}
MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64, "router": {"bias_rate": 1e-3}}}
LAYOUTS = {
    "one device, bfloat16": ({"fsdp": 1}, {"precision": {"compute": "bfloat16"}}),
    "fsdp, microbatches, average": ({"data": 2, "fsdp": 2}, {"train": {"microbatches": 2}, "ema": {"decay": 0.9}}),
    "tensor, muon": ({"fsdp": 2, "tensor": 2}, {"optimizer": {"name": "muon"}}),
    "stages": ({"fsdp": 1, "stage": 2}, {"train": {"microbatches": 2}}),
    "experts": ({"fsdp": 1, "expert": 2}, {"model": MOE}),
}


def both(mesh, sections, offload=None, steps=3, batches=tiny_batch):
    """(final state, metrics) without and with tiers, the latter with its program."""
    devices = int(np.prod(list(mesh.values())))
    programs = [tiny_program(devices, mesh=mesh, **sections, memory={"offload_state": one}) for one in (None, offload or HOST)]
    return *(run_steps(program, steps, batches) for program in programs), programs[1]


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_are_bitwise_those_on_the_device(layout):
    (plain, seen), (offloaded, seen_there), program = both(*LAYOUTS[layout])
    equal(offloaded, plain)
    equal(seen_there, seen)
    matrices = [leaf for leaf in jax.tree.leaves((offloaded.params, offloaded.opt_state)) if leaf.ndim > 2]
    assert matrices and all(map(is_on_host, matrices))
    assert jax.tree.map(lambda leaf: leaf.sharding, offloaded) == program.state_shardings
