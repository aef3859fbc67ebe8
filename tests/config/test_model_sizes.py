"""Every size under configs/models/ is short, keeps the rules, and has exactly the parameters it was published with."""

import math
import re
from pathlib import Path

import jax
import pytest
from ruamel.yaml import YAML

from maxlm.config import rules
from maxlm.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from maxlm.models import abstract_parameters

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = sorted((CONFIGS / "models").glob("*.yml"))

each_size = pytest.mark.parametrize("path", SIZES, ids=[path.stem for path in SIZES])


def read_model(path: Path) -> ModelConfig:
    """The `model` section of a size file, which must hold nothing else."""
    values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    assert list(values) == ["model"]
    return ModelConfig(**values["model"])


def published_count(path: Path) -> int:
    """The count its comment states, as in `8,030,261,248 parameters`."""
    (count,) = re.findall(r"^#.*?\b(\d[\d,]*) parameters\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return int(count.replace(",", ""))


def formula(m: ModelConfig) -> int:
    """Parameters by arithmetic from the published architectures alone, independent of the model code."""
    queries, keys = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    gated = m.activation in ("swiglu", "geglu")
    inputs = 2 if gated else 1  # matrices from d_model to d_ff
    norm = m.d_model * (2 if m.norm == "layernorm" else 1)  # a LayerNorm has a bias as well
    layer = m.d_model * (2 * queries + 2 * keys) + (inputs + 1) * m.d_model * m.d_ff
    layer += norm * (4 if m.norm_position == "sandwich" else 2)
    layer += 2 * m.head_dim if m.qk_norm else 0
    layer += queries + 2 * keys if m.bias in ("qkv", "all") else 0
    layer += m.d_model + inputs * m.d_ff + m.d_model if m.bias == "all" else 0
    tables = m.vocab_size * m.d_model * (1 if m.tie_embeddings else 2)
    tables += m.d_model * (m.max_seq_len or 0) if m.positions == "learned" else 0
    return m.n_layers * layer + norm + tables


@each_size
def test_model_has_the_published_number_of_parameters(path):
    """Counted on the abstract model: nothing is allocated."""
    leaves = jax.tree.leaves(abstract_parameters(read_model(path)))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == published_count(path)


@each_size
def test_arithmetic_gives_the_published_number_of_parameters(path):
    assert formula(read_model(path)) == published_count(path)


@each_size
def test_size_keeps_every_rule(path):
    """Rules that join fields, such as a window that some layer uses, hold for the size as shipped."""
    rules.check(Config(model=read_model(path), data=DataConfig(store="corpus", seq_len=1024), train=TrainConfig(steps=1, global_batch=1)))


@each_size
def test_size_reads_in_half_a_minute(path):
    """At most 30 lines, and no line that only repeats a default."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 30
    given = YAML(typ="safe", pure=True).load("\n".join(lines))["model"]
    for key in given:
        without = {name: value for name, value in given.items() if name != key}
        needed = ModelConfig.model_fields[key].is_required() or ModelConfig(**without) != ModelConfig(**given)
        assert needed, f"{path.name}: {key} = {given[key]} is what it would be anyway"


def test_the_sizes_the_product_promises_are_there():
    names = "gpt2-124m llama3-1b llama3-8b llama3-70b llama3-405b qwen3-0.6b qwen3-8b qwen3-32b mistral-7b gemma3-4b gemma3-27b"
    assert {path.stem for path in SIZES} >= set(names.split())


def test_gemma_27b_scales_its_scores_as_published():
    """`query_pre_attn_scalar` is 168 in its config.json, the file holds the inverse root: every digit counts."""
    assert read_model(CONFIGS / "models" / "gemma3-27b.yml").attention_scale == 168**-0.5
