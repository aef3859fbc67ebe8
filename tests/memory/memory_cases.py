"""Programs with state in several tiers of memory, beside the plain one."""

import math

import jax
import numpy as np
from tiny import run_steps, tiny_batch, tiny_program

HOST = {"optimizer": "host", "master": "host"}


def run_both(mesh, sections, offload, steps=3):
    """((state, metrics) without tiers, (state, metrics) with them, the program with them)."""
    plain, offloaded = (
        tiny_program(math.prod(mesh.values()), mesh=mesh, **sections, memory={"offload_state": tiers}) for tiers in (None, offload)
    )
    return run_steps(plain, steps, tiny_batch), run_steps(offloaded, steps, tiny_batch), offloaded


def states_of(devices, mesh, offload):
    """(program, its first state)."""
    program = tiny_program(devices, mesh=mesh, memory={"offload_state": offload})
    return program, program.init()


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))
