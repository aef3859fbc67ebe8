"""Programs with state in several tiers of memory, beside the plain one."""

import functools
import math

import jax
import numpy as np
from tiny import run_steps, tiny_batch, tiny_program

HOST = {"optimizer": "host", "master": "host"}


BOTH_TIERS = {"mesh": {"data": 2, "fsdp": 2}, "train": {"microbatches": 2}, "precision": {"compute": "bfloat16"}, "ema": {"decay": 0.9}}


@functools.cache
def plain_run():
    """(state, metrics) of three steps of `BOTH_TIERS` without tiers."""
    state, metrics = run_steps(tiny_program(4, **BOTH_TIERS), 3)
    return jax.device_get(state), metrics


def run_both(mesh, sections, offload, steps=3):
    """((state, metrics) without tiers, (state, metrics) with them, the program with them)."""
    plain, offloaded = (
        tiny_program(math.prod(mesh.values()), mesh=mesh, **sections, memory={"offload_state": tiers}) for tiers in (None, offload)
    )
    return run_steps(plain, steps, tiny_batch), run_steps(offloaded, steps, tiny_batch), offloaded


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))
