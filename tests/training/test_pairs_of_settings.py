"""Every two settings of precision, memory, compression, layout and model together: refused in a line, or a program that trains."""

import itertools
import math
import random

import jax
import numpy as np
import pytest
from tiny import run_steps, tiny_batch, tiny_config

from maxlm.config import ConfigError, rules
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program

EXPERTS = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64}}
DISPATCH = {"format": "int8"}
SIGN = {"kind": "sign", "warmup_steps": 2}
SETTINGS = {
    "int8": {"precision": {"matmul": {"format": "int8", "unembedding": True}}},
    "fp8": {"precision": {"matmul": {"format": "fp8", "stochastic_rounding": True}}},
    "mxfp8": {"precision": {"matmul": {"format": "mxfp8"}}},
    "weights only": {"precision": {"matmul": {"format": "int4", "weights_only": True, "first_layers": 1}}},
    "float16": {"precision": {"compute": "float16"}},
    "zero 1": {"mesh": {"fsdp": 2, "zero": 1}},
    "zero 2": {"mesh": {"fsdp": 2, "zero": 2}},
    "zero 3": {"mesh": {"fsdp": 2, "zero": 3}},
    "tensor": {"mesh": {"tensor": 2}},
    "context": {"mesh": {"context": 2}},
    "stage": {"mesh": {"stage": 2}, "train": {"microbatches": 2}},
    "expert": {"mesh": {"expert": 2}, "model": EXPERTS, "precision": {"dispatch": DISPATCH}},
    "layer inputs on the host": {"memory": {"remat": "full", "offload": ["layer_input"]}},
    "no loop over layers": {"memory": {"unroll": True}},
    "state on the host": {"memory": {"offload_state": {"optimizer": "host", "master": "host"}}},
    "int8 between slices": {"mesh": {"data": 2, "slices": 2}, "compression": {"kind": "int8"}},
    "signs between slices": {"mesh": {"data": 2, "slices": 2}, "compression": SIGN},
    "small states": {"optimizer": {"state": {"moments": "int8", "second_moment": "factored", "masters": "split24"}}},
    "muon": {"optimizer": {"name": "muon"}},
    "schedule free": {"optimizer": {"name": "schedule_free", "schedule": "constant"}},
    "diloco": {"mesh": {"data": 2}, "diloco": {"workers": 2, "every": 2}},
    "average": {"ema": {"decay": 0.9}},
    "lora": {"model": {"lora": {"rank": 4}}},
    "two tokens ahead": {"model": {"mtp": {"depth": 1}}},
    "experts": {"model": EXPERTS},
}
STEPS, SAMPLED = 3, 30
SAME_LOSS = 0.02  # of first losses: a format of 4 bits moves this model's by less than a hundredth
PAIRS = list(itertools.combinations(SETTINGS, 2))


def merged(*sections):
    """The sections together; the later wins."""
    found = {}
    for section in sections:
        for name, value in section.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if both else value
    return found


def program_of(names):
    """The program of these settings together. Raises ConfigError."""
    config = tiny_config(**merged({"precision": {"compute": "bfloat16"}, "mesh": {"fsdp": 1}}, *(SETTINGS[name] for name in names)))
    devices = math.prod(config.mesh.sizes().values())
    rules.check_devices(config, devices)
    return build_program(config, build_mesh(config, jax.devices()[:devices]))


def sections_of(names):
    return {section for name in names for section in SETTINGS[name]}


def refused(names, traced=True):
    """The line that refuses these settings together, or None; a line that blames something else is an error. `traced`: by the first state,
    too, which takes most of the time.
    """
    try:
        program = program_of(names)
        assert program.updater
        assert not traced or jax.tree.leaves(program.abstract_state)
    except ConfigError as error:
        line = str(error)
        assert "\n" not in line and error.field.split(".")[0] in sections_of(names), line
        return line
    return None


def test_each_setting_stands_alone():
    assert {name: line for name in SETTINGS if (line := refused([name]))} == {}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.soak), 4], ids=["all", "a quarter"])
def test_every_pair_is_refused_in_a_line_or_builds(every):
    lines = {pair: refused(pair, number % every == 0) for number, pair in enumerate(PAIRS)}
    print(*(f"{' + '.join(pair)}: {line}" for pair, line in lines.items() if line), sep="\n")
    assert sum(line is None for line in lines.values()) > len(PAIRS) // 2, "most settings go together"


def first_loss(program):
    """(loss of the first update, records of three), all finite and none refused."""
    _, seen = run_steps(program, STEPS, tiny_batch, type(program).init)
    for metrics in seen:
        assert np.isfinite(metrics.loss) and 0 < metrics.grad_norm < np.inf
    return float(seen[0].loss), seen


@pytest.mark.soak
def test_what_is_not_refused_trains():
    """Three steps of a drawn part of the pairs: the first loss is that of the same model without the other settings."""
    drawn = random.Random(0).sample(PAIRS, SAMPLED)
    models: dict[str, float] = {}
    for pair in drawn:
        if refused(pair) is not None:
            continue
        model = merged(*(SETTINGS[name].get("model", {}) for name in pair))
        if str(model) not in models:
            plain = tiny_config(model=model, precision={"compute": "bfloat16"})
            models[str(model)] = first_loss(build_program(plain, build_mesh(plain, jax.devices()[:1])))[0]
        loss, seen = first_loss(program_of(pair))
        print(" + ".join(pair), loss, [float(metrics.loss) for metrics in seen])
        assert abs(loss / models[str(model)] - 1) < SAME_LOSS, (pair, loss, models[str(model)])
