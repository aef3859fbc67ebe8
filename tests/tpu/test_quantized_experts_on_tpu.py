"""Experts in 8 bits as compiled for TPUs: every grouped matmul is a kernel of 8-bit operands, and half the bytes travel."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from maxlm.compiler.aot import devices
from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.config.sections.mesh import AXES
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read
from maxlm.kernels.grouped_matmul import tpu
from maxlm.models.feed_forward.dense import gated
from maxlm.models.feed_forward.experts import _compute
from maxlm.parallel.experts import through_experts
from maxlm.parallel.quantized_rows import RowFormats
from maxlm.precision import expert_weight

B, S, D, E, F, K = 4, 1024, 256, 8, 384, 2
NAMES = ("gate_DEF", "up_DEF", "down_DEF")
AXES_OF = ("embed", "expert", "mlp")


def gradient(config, formats, weights, x_BSD, weights_BSK, dy_BSD, chosen_BSK):
    def run(weights, x_BSD, weights_BSK):
        weights = {name: w.astype(jnp.bfloat16) for name, w in weights.items()}
        if config is not None:
            weights = {name: expert_weight(config, w, transposed=name.startswith("down")) for name, w in weights.items()}

        def compute(*given):
            return _compute(partial(gated, "swiglu"), *given)

        return through_experts(compute, weights, dict.fromkeys(NAMES, AXES_OF), x_BSD, chosen_BSK, weights_BSK, E, formats)

    return jax.vjp(run, weights, x_BSD, weights_BSK)[1](dy_BSD)


def compiled(topology, sizes, config=None, formats=RowFormats()):
    """Gradients of weights, rows and router weights, and all that they need of the forward pass."""
    places = [sizes.get(axis, 1) for axis in AXES]
    found = np.asarray(devices(parse(topology))[: int(np.prod(places))])
    mesh = Mesh(found.reshape(places), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def shaped(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: shaped((D, E, F), jnp.float32, P("fsdp", "expert", "tensor")) for name in NAMES}
    rows = P(("data", "fsdp", "expert"))
    sizes_of = (((B, S, D), jnp.bfloat16), ((B, S, K), jnp.float32), ((B, S, D), jnp.bfloat16), ((B, S, K), jnp.int32))
    with jax.set_mesh(mesh):
        return jax.jit(partial(gradient, config, formats)).lower(weights, *(shaped(*of, rows) for of in sizes_of)).compile().as_text()


def operands_of_kernels(text):
    """Kernels of grouped matmuls in the program: their names, each with the dtypes of its 8-bit, bfloat16 and float32 matrices."""
    found = Counter()
    for line in text.splitlines():
        name = re.match(r"\s*(?:ROOT )?%\w*(grouped_matmul_(?:forward|by_transpose|transposed_dw))", line)
        if name and " custom-call(" in line:
            taken = re.findall(r"(\w+)\[[\d,]+\]\{", line.split("operand_layout_constraints=")[1].split("custom_call_has")[0])
            found[name[1], *taken[-2:]] += 1
    return found


def traffic(text, opcode):
    """Bytes of arrays of the model's width that a kind of collective moves, by dtype."""
    moved = Counter()
    for run in read(text).executed():
        if run.times and run.op.opcode.removesuffix("-start") == opcode and run.op.shapes[0].dims[-1] == D:
            moved[run.op.shapes[0].dtype] += run.op.bytes
    return moved


@pytest.mark.soak
@pytest.mark.parametrize(
    ("topology", "format", "element", "dtypes"),
    [
        ("v5p:2x2x1", "int8", "int8", {"s8"}),
        ("v6e:2x2", "int8", "int8", {"s8"}),
        ("tpu7x:2x2x1", "fp8", "e4m3", {"f8e4m3fn", "f8e5m2"}),  # forward, and of gradients
    ],
)
def test_every_grouped_matmul_has_8_bit_operands(topology, format, element, dtypes):
    """And what is gathered, weights over fsdp and tokens over experts' devices, comes in 8 bits."""
    text = compiled(topology, {"fsdp": 2, "expert": 2}, QuantizedConfig(format=format), RowFormats(element, element, element))
    found = operands_of_kernels(text)
    assert {dtype for _, *taken in found for dtype in taken} == dtypes, found
    assert all(sum(count for (name, *_), count in found.items() if name == kernel) >= 3 for kernel in (tpu.FORWARD, tpu.ROWS, tpu.WEIGHTS))
    gathered = Counter()
    for run in read(text).executed():
        if run.op.opcode.startswith("all-gather"):
            gathered[run.op.shapes[0].dtype] += run.op.bytes
    small = sum(gathered[dtype] for dtype in ("s8", *dtypes - {"s8"}))
    assert small > 10 * (gathered.total() - small), gathered


@pytest.mark.soak
def test_tokens_travel_in_half_the_bytes():
    """Choices are sent to four devices: tokens, outputs and the gradients of both, each with a float32 scale."""
    sizes = {"expert": 4}
    plain, small = (compiled("v5p:2x2x1", sizes, None, formats) for formats in (RowFormats(), RowFormats("int8", "int8", "int8")))
    more, less = traffic(plain, "all-to-all"), traffic(small, "all-to-all")
    assert set(more) == {"bf16"} and less == {"s8": more["bf16"] / 2}, (more, less)
