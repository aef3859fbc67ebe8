"""Decompositions of whole matrices, compiled for a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from topologies import devices

from maxlm.training.matrices import each_on_its_device, gather, spread

COUNT, SIDE = 8, 64
EXCHANGES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def test_each_device_decomposes_its_own_matrices():
    """Matrices go to their devices and back, and nothing else is sent. Left to itself the partitioner gathers all on each device, which
    finds the eigenvectors of all.
    """
    mesh = Mesh(np.array(devices("v5p:2x2x1")), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P(None, "fsdp"))

    def bases(x, count):
        return jnp.linalg.eigh(x)[1] + jnp.linalg.qr(x)[0] + count

    with jax.set_mesh(mesh):
        run = jax.jit(lambda x: gather(each_on_its_device(bases, spread([x]), jnp.float32(0)), [COUNT])[0], out_shardings=split)
        text = run.lower(jax.ShapeDtypeStruct((COUNT, SIDE, SIDE), jnp.float32, sharding=split)).compile().as_text()
    assert re.findall(rf" ({EXCHANGES})(?:-start)?\(", text) == ["all-to-all"] * 2
    assert {"EighTpu", "QrDecompositionBlock"} <= set(re.findall(r'custom_call_target="(\w+)"', text))
    assert f"f32[{COUNT // 4},{SIDE},{SIDE}]" in text
