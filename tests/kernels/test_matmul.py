"""Matmuls that end in something elementwise, against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import interpreted_tpu
from jax.sharding import NamedSharding, PartitionSpec as P

from maxlm.kernels.matmul import MlpLayout, gated_mlp, gated_mlp_problem, tpu
from maxlm.kernels.matmul.reference import gated_mlp_reference
from maxlm.kernels.platform import VMEM_BYTES

# B batch, S sequence, D model width, F feed-forward width


def operands(seed=0, B=2, S=256, D=128, F=384, dtype=jnp.float32):
    shapes = [(B, S, D), (D, F), (D, F), (F, D), (B, S, D)]
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) * shape[0 if len(shape) == 2 else 1] ** -0.5 * (4 if len(shape) == 3 else 1) for shape in shapes]
    return [jnp.asarray(array, dtype) for array in arrays]


@functools.partial(jax.jit, static_argnums=0)
def everything(run, *operands):
    """The result, and the gradients of all that enters."""
    out, transposed = jax.vjp(run, *operands[:4])
    return out, *transposed(operands[4])


def errors(found, exact):
    return [float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y)) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_equals_the_definition(activation):
    given = operands()
    ours = everything(lambda *args: gated_mlp(*args, activation=activation), *given)
    theirs = everything(lambda *args: gated_mlp_reference(*args, activation), *given)
    assert max(errors(ours, theirs)) < 1e-5


@pytest.mark.parametrize("wide", [False, True])
def test_bfloat16_is_as_exact_as_xla(wide, monkeypatch, capfd):
    """On a machine that finds races and unwritten memory; `wide`: what comes between matmuls is computed in bfloat16, too."""
    monkeypatch.setattr(tpu, "WIDE", ("",) if wide else ())
    monkeypatch.setattr(tpu, "SIZES", (256, 128))
    given, reference = operands(1, B=1, S=512, F=512, dtype=jnp.bfloat16), functools.partial(gated_mlp_reference, activation="silu")
    everything.clear_cache()
    exact = everything(reference, *(x.astype(jnp.float32) for x in given))
    with interpreted_tpu(capfd):
        ours = jax.block_until_ready(everything(gated_mlp, *given))
    plain = everything(reference, *given)
    for mine, other in zip(errors(ours, exact), errors(plain, exact), strict=True):
        assert mine < 2 * other


def test_any_split_of_rows_and_width_computes_the_same():
    given = operands(2, B=4, S=128, F=512)
    alone = everything(gated_mlp, *given)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = [P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor"), P("data")]
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
        layout = MlpLayout(("data",), ("tensor",))
        together = everything(lambda *four: gated_mlp(*four, layout=layout), *split)
    assert max(errors(together, alone)) < 1e-6


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"B": 1, "S": 100}, "rows of a device, 100, is no multiple of 128"),
        ({"D": 64}, "d_model of a device, 64, is no multiple of 128"),
        ({"F": 200}, "d_ff of a device, 200, is no multiple of 128"),
    ],
)
def test_what_cannot_run_is_refused(changed, named):
    with pytest.raises(ValueError, match=f"gated_mlp: cannot run this: {named}"):
        gated_mlp(*operands(**changed)[:4])


def test_operands_that_do_not_fit_are_refused():
    x, gate, up, down, _ = operands()
    with pytest.raises(ValueError, match=r"gated_mlp: shapes do not fit: x \(2, 256, 128\), gate \(384, 128\)"):
        gated_mlp(x, gate.T, up, down)
    with pytest.raises(ValueError, match="gated_mlp: x float32 and weights float32, float32, bfloat16"):
        gated_mlp(x, gate, up, down.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="no activation 'relu': there are silu, gelu"):
        gated_mlp(x, gate, up, down, activation="relu")
    assert gated_mlp_problem(x.shape, 384, x.dtype) == "the device is no TPU and no GPU"


@pytest.mark.parametrize("kind", VMEM_BYTES)
def test_blocks_are_large_or_a_reason_is_given(kind):
    """Of Llama 3.1 8B, 70B and 405B, whole or split by `tensor`."""
    for d_model, d_ff in ((4096, 14336), (8192, 28672), (16384, 53248), (16384, 6656)):
        asked = (8192, d_model, d_ff, jnp.dtype(jnp.bfloat16), kind)
        assert not tpu.why_not(*asked)
        blocks = [tpu.block_of(8192, d_model, d_ff, 2, kind, weights=weights) for weights in (2, 1)]
        slow = any(one.part < 256 or one.time(2) * one.columns > 1.1 * one.cycles for one in blocks)
        assert bool(tpu.why_slow(*asked)) == slow
        assert not (slow and d_model <= 8192 and kind == "TPU v6 lite")
        for one in blocks:
            assert 8192 % one.rows == 0 and d_ff % one.columns == 0 and one.rows % one.part == 0
            assert one.vmem(2) <= VMEM_BYTES[kind]
