"""Every size under configs/models/ is short, keeps the rules, and has exactly the parameters it was published with."""

import math
import re
from pathlib import Path

import jax
import pytest
from ruamel.yaml import YAML

from maxlm.config import rules
from maxlm.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from maxlm.models import abstract_model_state, abstract_parameters

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
    norm = m.d_model * (2 if m.norm == "layernorm" else 1)  # a LayerNorm has a bias as well
    attention = heads(m) + norm * (4 if m.norm_position == "sandwich" else 2)
    tables = m.vocab_size * m.d_model * (1 if m.tie_embeddings else 2)
    tables += m.d_model * (m.max_seq_len or 0)
    dense = m.n_layers if m.moe is None else m.moe.n_dense
    ahead = m.mtp_depth * (2 * m.d_model**2 + 3 * norm + attention + experts(m))  # what joins two vectors, norms of both and at the end
    return m.n_layers * attention + dense * fed(m, m.d_ff) + (m.n_layers - dense) * experts(m) + norm + tables + ahead


def heads(m: ModelConfig) -> int:
    """Parameters of a layer's attention."""
    sinks = m.n_heads if m.sinks else 0
    if m.latent is not None:
        (rank, narrow), latent = (m.latent.q_rank, m.latent.kv_rank), m.latent
        into = m.d_model * rank + rank if rank else 0
        into += (rank or m.d_model) * m.n_heads * (latent.nope_dim + latent.rope_dim)
        into += m.d_model * (narrow + latent.rope_dim) + narrow + narrow * m.n_heads * (latent.nope_dim + latent.value_dim)
        return into + m.n_heads * latent.value_dim * m.d_model + sinks
    queries, keys = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    norms = 2 * m.head_dim if m.qk_norm else 0
    biases = queries + 2 * keys if m.bias in ("qkv", "all") else 0
    return m.d_model * (2 * queries + 2 * keys) + norms + biases + (m.d_model if m.bias == "all" else 0) + sinks


def fed(m: ModelConfig, width: int) -> int:
    """Parameters of a feed-forward layer of that width, or of an expert."""
    inputs = 1 if m.activation == "gelu" else 2  # matrices from d_model to the width
    return (inputs + 1) * m.d_model * width + (inputs * width + m.d_model if m.bias == "all" else 0)


def experts(m: ModelConfig) -> int:
    """Parameters of a layer with experts: those, the router and its biases, and the shared ones, as one."""
    if m.moe is None:
        return 0
    biases = m.moe.n_experts * ((m.bias == "all") + (m.moe.router.bias_rate > 0))
    shared = fed(m, m.moe.n_shared * m.moe.d_ff) if m.moe.n_shared else 0
    return m.moe.n_experts * (fed(m, m.moe.d_ff) + m.d_model) + biases + shared


@each_size
def test_model_has_the_published_number_of_parameters(path):
    """Counted on the abstract model: nothing is allocated."""
    leaves = jax.tree.leaves((abstract_parameters(read_model(path)), abstract_model_state(read_model(path))))
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
    names = "gpt2-124m llama3-1b llama3-8b llama3-70b llama3-405b qwen3-0.6b qwen3-8b qwen3-32b mistral-7b gemma3-4b gemma3-27b "
    names += "mixtral-8x7b mixtral-8x22b qwen3-30b-a3b qwen3-235b-a22b deepseek-v2-lite deepseek-v3 gpt-oss-20b gpt-oss-120b"
    assert {path.stem for path in SIZES} >= set(names.split())


def test_gemma_27b_scales_its_scores_as_published():
    """`query_pre_attn_scalar` is 168 in its config.json, the file holds the inverse root: every digit counts."""
    assert read_model(CONFIGS / "models" / "gemma3-27b.yml").attention_scale == 168**-0.5
