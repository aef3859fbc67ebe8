"""XLA refuses a flag that it does not know, and some that it does: every set is compiled on every chip it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from topologies import devices

from maxlm.config import load
from maxlm.hardware.chips import CHIPS, chip_of
from maxlm.hardware.xla_flags import FLAGS, compiler_options
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def test_every_set_is_for_a_chip_we_know_and_says_why():
    assert set(FLAGS) <= {chip.name for chip in CHIPS} | {"cpu"}
    for flags in FLAGS.values():
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(len(flag.why) > 5 for flag in flags)


def test_cpu_accepts_its_flags():
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=compiler_options("cpu"))


@pytest.mark.parametrize("chip", sorted(set(FLAGS) - {"cpu"}))
def test_chip_accepts_its_flags(chip):
    mesh = Mesh(np.array(devices(SMALLEST[chip])), ("x",), axis_types=(AxisType.Auto,))
    assert chip_of(mesh.devices.flat[0].device_kind).name == chip
    split = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=split)
    compiled = jax.jit(lambda a, b: a @ b.T, out_shardings=split).lower(x, x).compile(compiler_options=compiler_options(chip))
    assert "all-gather" in compiled.as_text() or "all-reduce" in compiled.as_text()


def test_weights_are_gathered_and_attention_is_a_kernel():
    """The step on v5p: weights come by all-gather, not as zeros that are all-reduced; no score matrix is in memory."""
    overrides = "cluster.topology=v5p:4x4x4 cluster.accelerator=null train.global_batch=64 train.microbatches=1 data.seq_len=512"
    model = "model.d_model=512 model.d_ff=1024 model.n_layers=4 model.n_heads=4 model.n_kv_heads=2 model.head_dim=128 model.vocab_size=1024"
    config = load("runs/llama3-8b-v5p-128", [*overrides.split(), *model.split()]).config
    program = build_program(config, build_mesh(config, devices("v5p:4x4x4")))
    with jax.set_mesh(program.mesh):
        text = program.step.as_text()
    assert text.count(" all-gather(") + text.count(" all-gather-start(") >= 7  # q, k, v, out, gate, up, down
    assert "splash_mha_fwd" in text
    assert "splash_mha_dkv" in text
    assert "[1,4,512,512]" not in text
