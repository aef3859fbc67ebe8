"""Weights and gradients of the layers in host memory (`memory.offload_state`): the same bits as on the device."""

import pytest
from memory_cases import HOST, equal, run_both

GRADIENTS, WEIGHTS = HOST | {"gradients": "host"}, HOST | {"weights": "host"}
BOTH = GRADIENTS | WEIGHTS
EXACT = {"optimizer": {"clip_norm": None}}  # the norm is a sum of those of the layers
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("mesh", "sections", "offload"),
    [
        pytest.param({"fsdp": 1}, {"precision": {"compute": "bfloat16"}}, BOTH, id="one device, bfloat16"),
        pytest.param({"fsdp": 4}, {"train": {"microbatches": 2}}, BOTH, id="fsdp, microbatches"),
        pytest.param({"fsdp": 2}, {"train": {"microbatches": 2}}, GRADIENTS, id="gradients"),
        pytest.param({"fsdp": 2}, {"train": {"microbatches": 2}}, WEIGHTS, id="weights"),
    ],
)
def test_three_steps_are_those_on_the_device(mesh, sections, offload, cut):
    (plain, seen), (offloaded, seen_there), program = run_both(mesh, EXACT | sections, offload)
    import jax
    for (path,a),b in zip(jax.tree_util.tree_leaves_with_path(jax.device_get(offloaded)), jax.tree.leaves(jax.device_get(plain))):
        import numpy as np
        if not np.array_equal(a,b): print(jax.tree_util.keystr(path), np.abs(np.float32(a)-np.float32(b)).max())
    print([(m.loss,m.grad_norm) for m in seen], [(m.loss,m.grad_norm) for m in seen_there])
    equal(offloaded, plain)
