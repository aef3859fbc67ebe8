"""What each way of splitting the state says to the other chips, in bytes of the step compiled for eight chips of v5p: as papers count."""

import math

import jax
import pytest

from maxlm.config import load
from maxlm.hardware.topologies import parse
from maxlm.models import abstract_parameters, parameter_axes
from maxlm.models.parameters import is_matrix
from maxlm.planning.aot import build
from maxlm.planning.cost import estimate
from maxlm.planning.hlo import read
from maxlm.planning.links import axis_links

MODEL = "model.d_model=512 model.d_ff=1024 model.n_layers=4 model.n_heads=4 model.n_kv_heads=2 model.head_dim=128 model.vocab_size=1024"
DATA = "data.seq_len=512 train.loss_chunks=2"
HALF, FULL = 2, 4  # bytes of bfloat16, in which weights travel and single microbatches' gradients; of float32, in which they are added up


def volumes(mesh, microbatches, batch):
    """Bytes a chip by (kind of collective, mesh axes) over a step; scalars aside."""
    overrides = (
        f"{MODEL} {DATA} cluster.topology=v5p:2x2x2 cluster.accelerator=null train.global_batch={batch} train.microbatches={microbatches}"
    )
    config = load("runs/llama3-8b-v5p-128", [*overrides.split(), *(f"mesh.{axis}={size}" for axis, size in mesh.items())]).config
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


CASES = {  # mesh and microbatches
    "ddp": ({"data": 8, "fsdp": 1}, 1),
    "ddp accumulating": ({"data": 8, "fsdp": 1}, 4),
    "zero 1": ({"fsdp": 8, "zero": 1}, 1),
    "zero 2": ({"fsdp": 8, "zero": 2}, 1),
    "zero 2 accumulating": ({"fsdp": 8, "zero": 2}, 4),
    "zero 3": ({"fsdp": 8}, 1),
    "hybrid accumulating": ({"data": 2, "fsdp": 4}, 2),
}


def textbook(case, layers, embedding, unembedding, rest, microbatches):
    """The bytes that a chip must gather, scatter and reduce; a ring sends (n - 1) / n of the first two."""
    weights, first, last = HALF * layers, HALF * embedding, HALF * unembedding  # to gather, and of one microbatch's gradients
    everything = layers + embedding + unembedding
    return {
        "ddp": {("all-reduce", "data"): weights + first + FULL * unembedding + FULL * rest},
        "ddp accumulating": {("all-reduce", "data"): FULL * (everything + rest)},
        "zero 1": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): HALF * everything},
        "zero 2": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): weights + first + FULL * unembedding},
        "zero 2 accumulating": {("all-gather", "fsdp"): HALF * everything, ("reduce-scatter", "fsdp"): FULL * everything},
        "zero 3": {  # a layer is gathered again for the backward pass: three halves of what replicas say
            ("all-gather", "fsdp"): 2 * weights + first + last,
            ("reduce-scatter", "fsdp"): weights + first + FULL * unembedding,
        },
        "hybrid accumulating": {
            ("all-gather", "fsdp"): microbatches * (2 * weights + first + last),
            ("reduce-scatter", "fsdp"): microbatches * (weights + first + FULL * unembedding),
            ("all-reduce", "data"): FULL * (everything / 4 + rest),
        },
    }[case]


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_textbook(case):
    mesh, microbatches = CASES[case]
    config, found = volumes(mesh, microbatches, 8 * microbatches)
    wanted = textbook(case, *sizes(config), microbatches)
    for (kind, axis), size in wanted.items():
        assert found.pop((kind, (axis,)), 0) == pytest.approx(size, rel=0.02), (kind, axis, found)
    assert sum(found.values()) < 0.02 * sum(wanted.values()), f"nothing else of any size is said: {found}"
