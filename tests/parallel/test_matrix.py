"""Every axis of the mesh alone, every pair and the triples people use: the same three steps as on one device."""

import itertools
import math

import jax
import numpy as np
import pytest
from tiny import first_state, steps_of, tiny_program

from maxlm.training.program import Program

SIZES = {"data": 8, "fsdp": 8, "tensor": 4, "context": 8, "stage": 4}  # alone; a pair has 4 of its first axis and 2 of its second
TRIPLES = (("data", "fsdp", "tensor"), ("fsdp", "tensor", "stage"), ("fsdp", "context", "tensor"), ("data", "context", "stage"))
LAYOUTS = (
    *({axis: size} for axis, size in SIZES.items()),
    *({first: 4, second: 2} for first, second in itertools.combinations(SIZES, 2)),
    *(dict.fromkeys(axes, 2) for axes in TRIPLES),
)
STEPS = 3
METRICS = ("loss", "z", "grad_norm", "lr")


def three_steps(mesh):
    """Metrics, moments and parameters; a mesh of `stage` and `data` draws its first state, others take the state of one device."""
    settings = {"model": {"n_layers": 4}, "train": {"microbatches": 2}, "optimizer": {"clip_norm": 1e3, "eps": 0.1}}  # nothing is blown up
    program = tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, **settings)
    return steps_of(program, STEPS, Program.init if {"stage", "data"} <= mesh.keys() else first_state)


@pytest.fixture(scope="module")
def reference():
    return three_steps({})


def errors(mesh, reference):
    """The largest relative error of each metric, of the gradients (to the largest number of each), and of what was learnt."""
    (seen, params), (wanted, wanted_params) = three_steps(mesh), reference
    found = dict.fromkeys((*METRICS, "gradients"), 0.0)
    for (metrics, moment), (wanted_metrics, wanted_moment) in zip(seen, wanted, strict=True):
        assert (metrics.batch_digest, metrics.tokens) == (wanted_metrics.batch_digest, wanted_metrics.tokens), "not the same samples"
        for name in METRICS:
            one, other = float(getattr(metrics, name)), float(getattr(wanted_metrics, name))
            found[name] = max(found[name], abs(one - other) / abs(other))
        for mine, other in zip(jax.tree.leaves(moment), jax.tree.leaves(wanted_moment), strict=True):
            found["gradients"] = max(found["gradients"], float(np.abs(mine - other).max() / np.abs(other).max()))
    apart = (np.abs(mine - other).max() for mine, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted_params), strict=True))
    return found, max(apart)


def check(found, apart):
    for name, error in found.items():
        assert error < 1e-5, (name, found)
    assert apart < 1e-5, "what was learnt"


def name_of(mesh):
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


@pytest.mark.soak
def test_every_layout(reference):
    table = {name_of(mesh): errors(mesh, reference) for mesh in LAYOUTS}
    print("\n| mesh | " + " | ".join((*METRICS, "gradients", "parameters")) + " |")
    for name, (found, apart) in table.items():
        print(f"| {name} | " + " | ".join(f"{error:.1e}" for error in (*found.values(), apart)) + " |")
    for found, apart in table.values():
        check(found, apart)
