"""XLA refuses a flag that it does not know, and some that it does: every set is compiled on every chip it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from topologies import compiled, devices

from maxlm.config import load
from maxlm.hardware.chips import CHIPS, chip_of
from maxlm.hardware.topologies import parse
from maxlm.hardware.xla_flags import FLAGS, compiler_options
from maxlm.kernels import attention
from maxlm.kernels.attention import Mask
from maxlm.kernels.attention.tpu import why_not
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def test_every_set_is_for_a_chip_we_know_and_says_why():
    assert set(FLAGS) <= {chip.name for chip in CHIPS} | {"cpu"}
    for flags in FLAGS.values():
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(len(flag.why) > 5 for flag in flags)


def test_cpu_accepts_its_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # those of the tests
    assert compiler_options("cpu").keys() == {flag.name for flag in FLAGS["cpu"]}
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=compiler_options("cpu"))


def test_a_flag_that_the_environment_sets_is_left_to_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere --xla_backend_optimization_level=3")
    assert compiler_options("cpu") == {"xla_disable_hlo_passes": "all-reduce-promotion"}
    assert compiler_options("v5p").keys() == {flag.name for flag in FLAGS["v5p"]}


def test_gpu_flags_are_known_to_xla():
    """The CPU's compiler knows the names of the GPU's, and refuses any other."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options=compiler_options("H100", traced=True))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={"xla_gpu_graph_level": "0"})


@pytest.mark.parametrize("chip", sorted(SMALLEST.keys() & FLAGS.keys()))
def test_chip_accepts_its_flags(chip):
    mesh = Mesh(np.array(devices(SMALLEST[chip])), ("x",), axis_types=(AxisType.Auto,))
    assert chip_of(mesh.devices.flat[0].device_kind).name == chip
    split = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=split)
    compiled = jax.jit(lambda a, b: a @ b.T, out_shardings=split).lower(x, x).compile(compiler_options=compiler_options(chip))
    assert "all-gather" in compiled.as_text() or "all-reduce" in compiled.as_text()


def test_weights_are_gathered_gradients_scattered_and_attention_is_a_kernel(tmp_path, monkeypatch):
    """The step on v5p, a sequence a chip: weights come by all-gather, each twice, and nothing else does; gradients are reduce-scattered;
    nothing waits for either; no score matrix is in memory.
    """
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path))
    overrides = "cluster.topology=v5p:4x4x4 cluster.accelerator=null train.global_batch=64 train.microbatches=1 data.seq_len=256"
    model = "model.d_model=512 model.d_ff=1024 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.head_dim=128 model.vocab_size=1024"
    config = load("runs/llama3-8b-v5p-128", [*overrides.split(), *model.split()]).config
    topology = parse("v5p:4x4x4")
    program = build_program(config, build_mesh(config, devices(topology.name)))
    text, cost = compiled(program, topology)
    matrices = config.model.n_layers * (512 * 128 * (4 + 2 + 2 + 4) + 3 * 512 * 1024)
    gathers = [row for row in cost.traffic if row.opcode == "all-gather"]
    assert sum(row.bytes for row in gathers) == 2 * (2 * matrices + 2 * 1024 * 512)  # bfloat16; embedding and unembedding once each
    scatters = [row for row in cost.traffic if row.opcode == "reduce-scatter"]
    assert sum(row.bytes for row in scatters) == 2 * (matrices + 1024 * 512) + 4 * 1024 * 512  # the unembedding's is float32
    assert {row.how for row in (*gathers, *scatters)} == {"sparsecore"}
    assert "attention_forward" in text
    assert "attention_backward" in text
    assert "[1,4,256,256]" not in text


def gradients_of_attention(chip, device, rows, seq_len, mask):
    """The compiled text of attention's forward and backward pass on one device."""
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((rows, seq_len, 2, 128), jnp.bfloat16, sharding=everywhere)
    segments = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32, sharding=everywhere)

    def total(q, k, v, segments):
        out = attention(q, k, v, query_segments_BS=segments, key_segments_BT=segments, scale=0.1, mask=mask, implementation="flash")
        return jnp.sum(out.astype(jnp.float32))

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x, segments)
    return lowered.compile(compiler_options=compiler_options(chip)).as_text()


# v5e and v6e have twice the VMEM of the others: the longest sequences, and the longest compilations; tpu7x has that of v5p.
@pytest.mark.soak
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x", "v5p"])
def test_attention_fits_into_vmem_where_it_says_so(chip):
    """At the longest sequence that `why_not` allows, in the kernels of a step: the memory they ask for is enough."""
    device = devices(SMALLEST[chip])[0]
    longest = max(s for s in (2**n for n in range(10, 18)) if not why_not(s, 128, device.device_kind))
    assert longest >= 8192
    assert "attention_backward" in gradients_of_attention(chip, device, 1, longest, Mask(window=3000))


@pytest.mark.soak
def test_attention_of_many_short_rows_fits_into_smem():
    """Which blocks overlap is read from SMEM, which has 1 MiB here."""
    assert "attention_backward" in gradients_of_attention("v5e", devices(SMALLEST["v5e"])[0], 2048, 256, Mask())
