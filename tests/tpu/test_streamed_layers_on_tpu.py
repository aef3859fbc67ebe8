"""Layers whose weights and gradients are in host memory, compiled for a TPU: their copies go beside matmuls."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.hlo.parser import HOST as SPACE, read
from maxlm.memory.layer_stream import scan_layers
from maxlm.memory.spaces import HOST, peak_on_device

LAYERS, WIDTH, INSIDE, ROWS = 16, 1024, 4096, 8192
STARTS = ("dynamic-slice-start", "dynamic-update-slice-start")
A_MATMUL = 5_000  # cycles by XLA's estimate; what writes a layer's input takes more, too
DIMS = ((WIDTH, 8, WIDTH // 8), (WIDTH, INSIDE), (INSIDE, WIDTH))


@pytest.mark.soak
def test_copies_of_a_layer_begin_before_its_matmuls_and_end_after_them():
    """In the loop of each pass of a scan over a stack that `fsdp` splits. No stack is in HBM, nor a second one in host memory."""
    mesh = Mesh(np.array(devices("v6e:2x2")), ("fsdp",), axis_types=(AxisType.Auto,))

    def layer(x_BD, matrices):
        x_BD = jax.lax.with_sharding_constraint(x_BD, P("fsdp", None))
        query_DHK, up_DF, down_FD = (jax.lax.with_sharding_constraint(w, P()) for w in matrices)
        x_BD += jnp.tanh(jnp.einsum("BD,DHK->BHK", x_BD, query_DHK)).reshape(x_BD.shape)
        return x_BD + jnp.tanh(x_BD @ up_DF) @ down_FD, None

    def loss(stacks, x_BD):
        specs = [P("fsdp")] * len(stacks)
        y_BD, _ = scan_layers(layer, x_BD, stacks, weights=[None] * len(stacks), specs=specs, inputs_on_host=False)
        return jnp.mean(y_BD.astype(jnp.float32) ** 2)

    def abstract(shape, spec, **memory):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec, **memory))

    stacks = [abstract((LAYERS, *dims), P(None, "fsdp"), memory_kind=HOST) for dims in DIMS]
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss), out_shardings=[stack.sharding for stack in stacks])
        compiled = program.lower(stacks, abstract((ROWS, WIDTH), P("fsdp"))).compile()
    stats, size = compiled.memory_analysis(), LAYERS * sum(map(math.prod, DIMS)) * 2 // 4
    assert stats.host_argument_size_in_bytes == stats.host_output_size_in_bytes == size and stats.host_temp_size_in_bytes == 0
    assert peak_on_device(stats) < LAYERS * ROWS * WIDTH * 2 // 4 + size  # layers' inputs, and less than the stacks
    forward, backward = matmuls_beside_copies(read(compiled.as_text()))
    assert forward >= 3 and backward >= 7, (forward, backward)  # all; all but the first of three that are recomputed and six others


def matmuls_beside_copies(module):
    """For each loop that copies between host and device, the matmuls between the last start and the first end of its copies, sorted."""
    found = []
    for body in (computation for name, computation in module.computations.items() if name != module.entry):
        copies = [op.name for op in body.ops if op.opcode in STARTS and any(shape.memory_space == SPACE for shape in op.shapes)]
        if copies:
            started = max(i for i, op in enumerate(body.ops) if op.name in copies)
            ended = min(i for i, op in enumerate(body.ops) if op.start in copies)
            found.append(sum((op.cycles or 0) > A_MATMUL for op in body.ops[started:ended]))
    return sorted(found)
