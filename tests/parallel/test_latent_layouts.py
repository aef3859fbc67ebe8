"""Latent attention, sinks, RoPE that depends on lengths, and multipliers on meshes: the loss and the gradients of one device."""

import math
from functools import cache, partial

import jax
import numpy as np
import pytest
from tiny import sums_and_gradients, tiny_program

# Of the batch's documents some are within the original length, others beyond it.
LONG = {"kind": "longrope", "factor": 4, "short_factor": (1.0, 1.5), "long_factor": (1.0, 4.0), "original_seq_len": 14}
LATENT = {"n_kv_heads": 8, "latent": {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}, "sinks": True}
MODELS = {
    "latent, window": {**LATENT, "layer_pattern": ("local",), "window": 9, "activation": "swiglu_clamped"},
    "latent": LATENT,
    "gpt_oss": {"layer_pattern": ("local",), "window": 9, "activation": "swiglu_clamped", "bias": "all", "sinks": True},
    "phi": {
        "rope": {"share": 0.5, "scaling": LONG},
        "multipliers": {"embedding": 3.0, "residual": 0.7, "logits_divisor": 2.0},
        "activation": "geglu_exact",
        "bias": "attention",
    },
}
LAYOUTS = {
    "latent, window": ({"context": 2, "tensor": 2, "context_attention": "ring"},),
    "latent": (
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2, "stage": 2},
        {"context": 2, "tensor": 2, "context_attention": "ring"},
        {"context": 4, "fsdp": 2, "context_attention": "ulysses"},
    ),
    "gpt_oss": ({"context": 2, "tensor": 2, "context_attention": "ring"}, {"context": 4, "context_attention": "ulysses"}),
    "phi": (
        {"context": 2, "tensor": 2, "context_attention": "ring"},
        {"fsdp": 2, "stage": 2},
        {"context": 4, "context_attention": "ulysses"},
    ),
}
SECTIONS = {"train": {"microbatches": 2}, "memory": {"remat": "none"}}
CASES = [  # the suite has the first, which has most of the others
    pytest.param(name, mesh, marks=[] if name == "latent, window" else [pytest.mark.soak])
    for name, meshes in LAYOUTS.items()
    for mesh in meshes
]


def loss_and_gradients(name, mesh):
    sizes = [size for axis, size in mesh.items() if axis != "context_attention"]
    return sums_and_gradients(tiny_program(math.prod(sizes), mesh={"fsdp": 1, **mesh}, model=MODELS[name], **SECTIONS))


reference = cache(partial(loss_and_gradients, mesh={}))


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_a_layout_changes_nothing(name, mesh):
    (loss, grads), (wanted_loss, wanted) = (loss_and_gradients(name, mesh), reference(name))
    for one, other in zip(jax.tree.leaves(loss), jax.tree.leaves(wanted_loss), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for (path, one), other in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), err_msg=jax.tree_util.keystr(path))
