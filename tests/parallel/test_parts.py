"""A layer computes with the numbers of the whole model, whichever part of the model a program holds: nothing is derived from a part."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import tiny_config, tiny_program

from maxlm.models.decoder import Block
from maxlm.models.parameters import abstract_decoder
from maxlm.models.residual import ResidualRule
from maxlm.training import pipelined
from maxlm.training.cell_replay import CellReplay

PATTERN = {"n_layers": 17, "layer_pattern": ("local", "local", "global"), "window": 8}
EXPERTS = {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1, "n_dense": 1, "router": {"bias_rate": 0.01}}
COMPLETE = {"kind": "completep", "base_width": 16, "base_depth": 5, "base_head_dim": 4}
MODELS = {  # 16 layers in six periods, an incomplete one at the end, after a dense layer
    "everything": {
        **PATTERN,
        "moe": EXPERTS,
        "parametrization": COMPLETE,
        "multipliers": {"embedding": 3.0, "residual": 0.3, "logits_divisor": 2.0},
        "norm_position": "sandwich",
        "qk_norm": True,
        "scale_embeddings": True,
        "softcap": {"attention": 20.0, "logits": 30.0},
        "rope_local": {"theta": 1000, "scaling": {"kind": "yarn", "factor": 4, "original_seq_len": 16}},
        "mtp": {"depth": 1},
    },
    "CompleteP, dense": {"n_layers": 16, "parametrization": COMPLETE},
    "muP, experts": {**PATTERN, "moe": EXPERTS, "parametrization": {"kind": "mup", "base_width": 16}},
    "standard": {**PATTERN, "n_layers": 16},
    "latent": {
        "n_layers": 16,
        "n_kv_heads": 8,
        "latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8},
        "parametrization": COMPLETE,
        "mtp": {"depth": 2},
    },
}
OFFLOADED = {"optimizer": "host", "master": "host", "gradients": "host", "weights": "host"}
CUTS = {  # mesh, other sections
    "2 stages": ({"stage": 2}, {"train": {"microbatches": 4}}),
    "4 stages": ({"stage": 4}, {"train": {"microbatches": 4}}),
    "2 stages of 2 chunks": ({"stage": 2}, {"train": {"microbatches": 4}, "pipeline": {"chunks": 2}}),
    "2 stages, tensor": ({"stage": 2, "tensor": 2}, {"train": {"microbatches": 4}}),
    "tensor, expert or data": ({"tensor": 2, "data": 2}, {}),
    "layers unrolled": ({"fsdp": 2}, {"memory": {"unroll": True}}),
    "layers streamed from the host": ({"fsdp": 2}, {"memory": {"offload_state": OFFLOADED}}),
    "a replay of one period": ({"fsdp": 2}, {"integrity": {"replay_every": 5}}),
}

IN_SUITE = {("everything", "4 stages"), ("everything", "2 stages of 2 chunks")}


def numbers(module: nnx.Module) -> Iterator[tuple[str, str]]:
    """Everything that the module and the modules in it compute with, but for arrays; of parameters the initial values they declare."""
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            yield from ((f"{name}.{inner}", number) for inner, number in numbers(value))
        elif isinstance(value, nnx.Variable):
            yield name, str(value.get_metadata())
        elif isinstance(value, ResidualRule):
            yield name, f"{type(value).__name__} {vars(value)}"
        elif not name.startswith("_"):
            yield name, str(value)


class TracedError(Exception):
    """Ends a trace whose rest is of no interest."""


def each_function_once(schedule, functions, layers, constants, ends, microbatches):
    """In place of the loops of a pipeline: its first part and its ends, of one microbatch."""
    microbatch = jax.tree.map(lambda leaf: leaf[0], microbatches)
    part, state = (
        jax.tree.map(lambda leaf: leaf[: len(leaf) // (schedule.stages * schedule.chunks)], tree) for tree in (layers, constants)
    )
    (x_BSD, _), _ = functions.layers(part, state, functions.embed(ends, microbatch), functions.inputs(microbatch, jnp.int32(0)))
    functions.loss(ends, microbatch, x_BSD)
    raise TracedError


@pytest.fixture
def run_blocks(monkeypatch):
    """The numbers of every block that is traced. Nothing is compiled."""
    seen = set()
    call = Block.__call__

    def recorded(self, *inputs):
        seen.add(tuple(numbers(self)))
        return call(self, *inputs)

    monkeypatch.setattr(Block, "__call__", recorded)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, **options: None)
    monkeypatch.setattr(pipelined, "pipeline_gradients", each_function_once)
    return seen


def whole_blocks(config):
    model = abstract_decoder(config)
    return {tuple(numbers(block)) for block in [*model.head, *model.layers, *model.tail, *(module.block for module in model.ahead)]}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [pytest.param(kind, cut, marks=[] if (kind, cut) in IN_SUITE else [pytest.mark.soak]) for kind in MODELS for cut in CUTS],
)
def test_every_layer_of_a_part_computes_with_the_numbers_of_the_whole_model(kind, cut, run_blocks):
    mesh, sections = CUTS[cut]
    program = tiny_program(math.prod(mesh.values()), model=MODELS[kind], mesh={"fsdp": 1, **mesh}, **sections)
    with pytest.raises(TracedError) if "stage" in mesh else nullcontext():
        _ = CellReplay(program).program if "replay" in cut else program.lower()
    assert run_blocks == whole_blocks(program.config.model)


def test_numbers_derived_from_the_depth_are_seen():
    """The comparison sees them: blocks of a model of another depth differ."""
    whole, other = (tiny_config(model={**MODELS["CompleteP, dense"], "n_layers": depth}).model for depth in (16, 8))
    (mine,), (wanted,) = whole_blocks(whole), whole_blocks(other)
    differing = {name for (name, one), (_, another) in zip(mine, wanted, strict=True) if one != another}
    assert differing == {"residual", "attention.out_HKD", "mlp.down_FD"}
