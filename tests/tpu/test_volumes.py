"""What each way of splitting a step says to the other chips, in bytes of the step compiled for eight chips of v5p: as papers count."""

import math

import jax
import pytest

from maxlm.compiler.aot import build
from maxlm.config import load
from maxlm.cost.mesh_links import axis_links
from maxlm.cost.step_cost import estimate
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read
from maxlm.models import abstract_parameters, parameter_axes
from maxlm.models.parameters import is_matrix

MODEL = "model.d_model=512 model.d_ff=1024 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 model.head_dim=128 model.vocab_size=1024"
DATA = "data.seq_len=512 train.loss_chunks=2"
HALF, FULL = 2, 4  # bytes of bfloat16, in which weights travel and single microbatches' gradients; of float32, in which they are added up


def volumes(mesh, microbatches, *more):
    """Bytes a chip by (kind of collective, mesh axes) over a step; scalars aside. A microbatch has a row for each place of the batch."""
    batch = microbatches * mesh.get("data", 1) * mesh["fsdp"]
    overrides = (
        f"{MODEL} {DATA} cluster.topology=v5p:2x2x2 cluster.accelerator=null train.global_batch={batch} train.microbatches={microbatches}"
    )
    config = load("runs/llama3-8b-v5p-128", [*overrides.split(), *more, *(f"mesh.{axis}={size}" for axis, size in mesh.items())]).config
    topology = parse("v5p:2x2x2")
    program = build(config, topology)
    with jax.set_mesh(program.mesh):
        cost = estimate(read(program.step.as_text()), topology.chip, dict(program.mesh.shape), axis_links(program.mesh, topology))
    found = {}
    for row in cost.traffic:
        if row.bytes > 1000 * row.count:
            found[row.opcode, row.axes] = found.get((row.opcode, row.axes), 0) + row.bytes
    return config, found


def sizes(config):
    """Numbers in (the layers' matrices, the embedding, the unembedding, everything else)."""
    axes, shapes = parameter_axes(config.model), abstract_parameters(config.model)
    layers = [
        (is_matrix(names), math.prod(shape.shape))
        for names, shape in zip(flat(axes["layers"]), jax.tree.leaves(shapes["layers"]), strict=True)
    ]
    rest = sum(size for matrix, size in layers if not matrix) + config.model.d_model
    return sum(size for matrix, size in layers if matrix), *(math.prod(shapes[name].shape) for name in ("embedding_VD", "output_VD")), rest


def flat(axes):
    return jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def activations(config):
    """Bytes of (hidden states, queries, keys and values) that a chip has of a microbatch, the sequence whole over `tensor`."""
    tokens, model = config.data.seq_len // config.mesh.context, config.model
    return tuple(HALF * tokens * width for width in (model.d_model, model.n_heads * model.head_dim, 2 * model.n_kv_heads * model.head_dim))


CASES = {  # mesh and microbatches, and other settings
    "ddp": ({"data": 8, "fsdp": 1}, 1),
    "ddp accumulating": ({"data": 8, "fsdp": 1}, 4),
    "zero 1": ({"fsdp": 8, "zero": 1}, 1),
    "zero 2": ({"fsdp": 8, "zero": 2}, 1),
    "zero 2 accumulating": ({"fsdp": 8, "zero": 2}, 4),
    "zero 3": ({"fsdp": 8}, 1),
    "hybrid accumulating": ({"data": 2, "fsdp": 4}, 2),
    "local updates": ({"data": 2, "fsdp": 4}, 1, "diloco={workers: 2, every: 10}"),
    "tensor": ({"data": 2, "fsdp": 1, "tensor": 4}, 1),
    "tensor, zero 3": ({"fsdp": 4, "tensor": 2}, 1),
    "ring": ({"fsdp": 2, "context": 4, "context_attention": "ring"}, 1),
    "ring accumulating": ({"fsdp": 2, "context": 4, "context_attention": "ring"}, 4),
    "gather": ({"fsdp": 2, "context": 4, "context_attention": "gather"}, 1),
    "ulysses": ({"fsdp": 2, "context": 4, "context_attention": "ulysses"}, 1),
    "pipeline": ({"data": 2, "fsdp": 1, "stage": 4}, 4),
    "pipeline, zero 3": ({"fsdp": 4, "stage": 2}, 4),
}


def textbook(case, config):
    """The bytes that a chip must gather, scatter, reduce, exchange and hand on; a ring sends (n - 1) / n of all but the last, twice that of
    what it reduces.
    """
    layers, embedding, unembedding, rest = sizes(config)
    mesh, depth, microbatches = config.mesh, config.model.n_layers, config.train.microbatches
    weights, first, last = HALF * layers, HALF * embedding, HALF * unembedding  # to gather, and of one microbatch's gradients
    everything, gradients = layers + embedding + unembedding, weights + first + FULL * unembedding
    zero_3 = {  # a layer is gathered again for the backward pass: three halves of what replicas say
        ("all-gather", "fsdp"): microbatches * (2 * weights + first + last) / mesh.tensor / mesh.stage,
        ("reduce-scatter", "fsdp"): microbatches * gradients / mesh.tensor / mesh.stage,
    }
    x, q, kv = activations(config)
    tensor = {  # two regions a layer: into each a gather, out a scatter; as many for gradients; what went in is gathered again for them
        ("all-gather", "tensor"): (6 * depth + 2) * x,  # and what the loss reads, and the gradient of what the embedding gives
        ("reduce-scatter", "tensor"): (4 * depth + 2) * x,  # and what the embedding gives, and the gradient of what the loss reads
    }
    over_context = {**zero_3, ("all-reduce", "context"): gradients / mesh.fsdp}
    hops = mesh.context - 1
    ring = microbatches * depth * hops * (2 * kv + FULL // HALF * kv)  # keys and values, twice; their gradients, added up in float32
    stages = {  # what one stage has for all is written as a sum, to which the others add zeros
        ("collective-permute", "stage"): 2 * microbatches * x,  # there, and the gradient back
        # Weights dealt out, and gradients brought back, once: as they are added up, or as they were reduced over `data` before
        ("all-to-all", "stage"): (HALF + (FULL if mesh.data == 1 else HALF)) * layers / mesh.fsdp / mesh.stage,
        # What the embedding gives, what the last stage gives to the loss, and the gradients of both: scattered, and whole again
        ("reduce-scatter", "stage"): 4 * microbatches * x,
        ("all-gather", "stage"): 4 * microbatches * x,
    }
    return {
        "ddp": {("all-reduce", "data"): gradients + FULL * rest},
        "ddp accumulating": {("all-reduce", "data"): HALF * everything + FULL * rest},
        "zero 1": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): HALF * everything},
        "zero 2": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): gradients},
        "zero 2 accumulating": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): HALF * everything},
        "zero 3": zero_3,
        "hybrid accumulating": {**zero_3, ("all-reduce", "data"): HALF * everything / 4 + FULL * rest},
        "local updates": {**zero_3, ("all-reduce", "data"): FULL * (everything / 4 + rest)},  # where workers meet: once in ten updates
        "tensor": {**tensor, ("all-reduce", "data"): gradients / mesh.tensor},
        "tensor, zero 3": {**tensor, **zero_3},
        "ring": {**over_context, ("collective-permute", "context"): ring},
        "ring accumulating": {**zero_3, ("collective-permute", "context"): ring, ("all-reduce", "context"): FULL * everything / mesh.fsdp},
        "gather": {
            **over_context,
            ("all-gather", "context"): 2 * depth * mesh.context * kv,  # again for the backward pass
            ("reduce-scatter", "context"): FULL // HALF * depth * mesh.context * kv,
        },
        "ulysses": {**over_context, ("all-to-all", "context"): 2 * depth * (2 * q + kv)},  # queries, keys, values, and what attention gives
        "pipeline": {**stages, ("all-reduce", "data"): HALF * everything / mesh.stage + FULL * rest},
        "pipeline, zero 3": {**stages, **zero_3},
    }[case]


def excess(case, config):
    """What the program says beyond that, and need not: whoever mends it takes it out here."""
    layers, embedding, unembedding, _ = sizes(config)
    mesh, depth, microbatches = config.mesh, config.model.n_layers, config.train.microbatches
    x, q, kv = activations(config)
    # Keys and values take n hops each pass, the last one home. So do their gradients, which set out from home; their last is in bfloat16
    ring = {("collective-permute", "context"): 3 * microbatches * depth * kv}
    # Gradients are reduced over `context` after every microbatch, only the embedding's after the last
    early = microbatches * (HALF * layers + FULL * unembedding) - FULL * (layers + unembedding)
    # Attention's result is kept as it was before the exchange back, which its own backward pass reads, and exchanged again for the next
    ulysses = {("all-to-all", "context"): depth * q}
    idle = mesh.stage - 1  # ticks of each pass in which a stage has nothing to do: it says as much as in others
    stages = {
        ("collective-permute", "stage"): 2 * idle * x,
        ("reduce-scatter", "stage"): (3 if idle > 1 else 2) * idle * x,  # of what no stage has XLA leaves out a single tick
        ("all-gather", "stage"): 2 * idle * x,
    }
    return {
        "ring": ring,
        "ring accumulating": {**ring, ("all-reduce", "context"): early / mesh.fsdp},
        "ulysses": ulysses,
        "pipeline": stages,
        "pipeline, zero 3": {
            **stages,
            ("all-gather", "fsdp"): idle * HALF * (2 * layers + embedding) / mesh.stage,
            ("reduce-scatter", "fsdp"): idle * HALF * (layers + embedding) / mesh.stage,
        },
    }.get(case, {})


# The suite reads the bytes of ZeRO stage 3 in test_xla_flags.py, and the collectives of all on virtual devices (tests/parallel)
@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_textbook(case):
    config, found = volumes(*CASES[case])
    wanted, known = textbook(case, config), excess(case, config)
    for (kind, axis), size in wanted.items():
        size += known.get((kind, axis), 0)
        assert found.pop((kind, (axis,)), 0) == pytest.approx(size, rel=0.02), (kind, axis, found)
    assert sum(found.values()) < 0.02 * sum(wanted.values()), f"nothing else of any size is said: {found}"
