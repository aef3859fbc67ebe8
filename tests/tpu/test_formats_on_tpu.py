"""Recipes in int8 and fp8: every matmul that they mean to quantize reads 8 bits in the program that XLA:TPU compiles."""

import importlib.util
import re
from pathlib import Path

import jax
import pytest
from topologies import devices

from maxlm.compiler.aot import build, compile_program
from maxlm.config import load, rules
from maxlm.cost import quantized_matmuls
from maxlm.cost.pricing import format_of
from maxlm.cost.quantized_matmuls import quantization_of
from maxlm.cost.step_cost import program_cost
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import Module, read
from maxlm.models import mfu_format
from maxlm.parallel import build_mesh
from maxlm.training.program import Program, build_program

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAME = re.compile(r"(?P<bf16>.+-\d+)-(?P<format>int8|fp8)")
VARIANTS = sorted(path.stem for path in (CONFIGS / "runs").glob("*.yml") if NAME.fullmatch(path.stem))
SMALL = (
    *("model.d_model=512", "model.d_ff=1280", "model.n_layers=3", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=128"),
    *("model.vocab_size=1536", "train.global_batch=16", "train.microbatches=1", "memory.remat=full", "data.seq_len=512"),
    "cluster.accelerator=null",
)


def test_there_are_variants_of_dense_models_and_of_experts():
    assert len(VARIANTS) >= 6 and any(name.startswith("mixtral") for name in VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_its_bf16_recipe_in_a_format_that_is_faster_on_its_chip(name):
    bf16, format = NAME.fullmatch(name).groups()
    config, high = load(f"runs/{name}").config, load(f"runs/{bf16}").config
    assert config.precision.matmul.format == format
    same = config.model_copy(update={"precision": high.precision, "run": high.run, "memory": high.memory})
    assert same == high.model_copy(update={"model": config.model}) and config.model == high.model
    assert rules.topology_of(config).chip.matmul_speed(mfu_format(config.precision.matmul)) > 1.5


def problems(program: Program, module: Module) -> list[str]:
    rows = quantized_matmuls.check(program.config, module, dict(program.mesh.shape))
    quantization = quantization_of(program.config)
    names = quantization.names | {"unembedding"} if quantization.unembedding else quantization.names
    assert {name for row in rows for name in row.names} == names
    return [row.problem for row in rows if row.problem]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "smallest"),
    [("llama3-8b-v5p-128-int8", "v5p:2x2x1"), ("llama3-70b-tpu7x-512-fp8", "tpu7x:2x2x1")],
)
def test_every_intended_matmul_of_a_small_step_reads_8_bits(name, smallest):
    """Forward, recomputed and in the gradient; what reads more is the unembedding, and the rotation of RoPE."""
    config, topology = load(f"runs/{name}", [*SMALL, f"cluster.topology={smallest}"]).config, parse(smallest)
    program = build_program(config, build_mesh(config, devices(smallest)))
    with jax.set_mesh(program.mesh):
        module = read(program.step.as_text())
    assert problems(program, module) == []
    cost = program_cost(program, module, topology)
    flops = {row.operands: row.flops for row in cost.formats}
    low = sum(number for operands, number in flops.items() if format_of(operands) != "bf16")
    assert low > 0.6 * sum(flops.values())


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler")
@pytest.mark.parametrize("name", ["llama3-8b-v6e-256-int8", "llama3-70b-tpu7x-512-fp8", "mixtral-8x7b-v5p-256-int8"])
def test_every_intended_matmul_of_a_recipe_reads_8_bits(name):
    """The others differ from these in size and chip only, and `test_recipe_compiles_and_fits` compiles them."""
    config = load(f"runs/{name}").config
    topology = rules.topology_of(config)
    program = build(config, topology)
    step = compile_program(program, topology)
    assert step.fits, f"{step.needed / 2**30:.1f} GiB of {step.available / 2**30:.1f}"
    assert problems(program, read(step.text)) == []
