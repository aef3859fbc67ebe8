"""Which implementation runs at the matmul precision in force."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from maxlm.kernels import ProductScales, attention, grouped_matmul, quantized_grouped_matmul
from maxlm.kernels.attention import Mask, chunk_attention
from maxlm.kernels.matmul import gated_mlp, gated_mlp_problem


def on(platform, kind):
    """A mesh of a device that is not there."""
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform))


TPU, CPU = on("tpu", "TPU v6 lite"), on("cpu", "cpu")


def attended(mask, implementation=None):
    q, segments = jnp.zeros((1, 256, 2, 128)), jnp.ones((1, 256), int)
    return attention(q, q, q, query_segments_BS=segments, key_segments_BT=segments, scale=1.0, mask=mask, implementation=implementation)


def of_a_chunk():
    q, segments = jnp.zeros((1, 2, 256, 128)), jnp.ones((1, 256), int)
    return chunk_attention(q, q, q, segments, segments, scale=1.0)


def grouped(dtype):
    x, w, sizes = jnp.zeros((256, 128), dtype), jnp.zeros((128, 256), dtype), jnp.array([100, 156])
    if dtype == jnp.int8:
        return quantized_grouped_matmul(x, w, sizes, ProductScales(jnp.ones(256), jnp.ones((2, 128))), dtype=jnp.float32)
    return grouped_matmul(x, w, sizes)


def fed_forward():
    x, up, down = (jnp.zeros(shape, jnp.bfloat16) for shape in ((2, 4096, 4096), (4096, 14336), (14336, 4096)))
    return x if gated_mlp_problem(x.shape, 14336, x.dtype) else gated_mlp(x, up, up, down)


OPERATIONS = {
    "flash": lambda: attended(Mask()),
    "splash": lambda: attended(Mask("bidirectional")),
    "chunks": of_a_chunk,
    "experts": lambda: grouped(jnp.float32),
    "quantized experts": lambda: grouped(jnp.int8),
    "gated_mlp": fed_forward,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matmuls_of_several_passes_are_left_to_xla_on_a_tpu(operation):
    """Pallas refuses dots of "high" precision and some of "highest", and the others take VMEM that no kernel counts."""

    def runs_a_kernel(precision):
        with jax.sharding.use_abstract_mesh(TPU), jax.default_matmul_precision(precision):
            return "pallas_call" in str(jax.make_jaxpr(lambda: OPERATIONS[operation]())())

    assert [runs_a_kernel(precision) for precision in ("default", "high", "highest")] == [True, False, False]


def test_a_kernel_that_is_asked_for_says_why_it_cannot_run():
    with jax.default_matmul_precision("high"):
        with jax.sharding.use_abstract_mesh(TPU), pytest.raises(ValueError, match="no matmuls of high precision"):
            jax.eval_shape(lambda: attended(Mask(), "flash"))
        with jax.sharding.use_abstract_mesh(CPU):
            jax.eval_shape(lambda: attended(Mask(), "flash"))
