"""Published mixtures of experts: all their parameters, and those that a token meets. Counted on the abstract model."""

import math
from pathlib import Path

import jax
import pytest
from ruamel.yaml import YAML

from maxlm.config.schema import ModelConfig
from maxlm.models import abstract_model_state, abstract_parameters, parameter_axes

SIZES = Path(__file__).resolve().parents[2] / "configs" / "models"
PUBLISHED = {  # parameters; those that a token meets: of the experts only the chosen ones, both tables whole
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b": (140_620_634_112, 39_152_031_744),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (671_026_419_200, 37_552_297_472),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
}
ACTIVE_IN_WORDS = {"mixtral-8x7b": 13, "mixtral-8x22b": 39, "qwen3-235b-a22b": 22, "deepseek-v3": 37}  # 10^9, as their makers say it


def read(name, **changes):
    values = YAML(typ="safe", pure=True).load((SIZES / f"{name}.yml").read_text(encoding="utf-8"))["model"]
    return ModelConfig(**{**values, **changes})


def numbers(config):
    """(all, met by a token)."""
    leaves = jax.tree.leaves(abstract_parameters(config))
    axes = jax.tree.leaves(parameter_axes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    total = met = 0
    for leaf, names in zip(leaves, axes, strict=True):
        size = math.prod(leaf.shape)
        total += size
        of_expert = "expert" in names or {"choices", "embed_act"} <= set(names)  # the last: biases, of which each device has all
        met += size * config.moe.top_k // config.moe.n_experts if of_expert else size
    biases = sum(leaf.size for leaf in jax.tree.leaves(abstract_model_state(config)))  # of loss-free balancing, which its maker counts
    return total + biases, met + biases


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    assert numbers(read(name, mtp=None)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_comment_says_both_counts(name):
    text = (SIZES / f"{name}.yml").read_text(encoding="utf-8")
    for count in PUBLISHED[name]:
        assert f"{count:,}" in text


@pytest.mark.parametrize("name", ACTIVE_IN_WORDS)
def test_those_met_are_what_the_makers_say(name):
    assert int(PUBLISHED[name][1] / 1e9 + 0.5) - ACTIVE_IN_WORDS[name] in (0, 1)


@pytest.mark.parametrize(("name", "card"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_the_card_of_gpt_oss_leaves_the_embedding_out(name, card):
    config = read(name)
    assert round((PUBLISHED[name][1] - config.vocab_size * config.d_model) / 1e9, 2) == card


def test_what_deepseek_predicts_further_ahead_has_the_size_it_was_published_with():
    """The hub stores it with copies of both tables: 2 x 0.9 of its 13.5 billion."""
    one, none = numbers(read("deepseek-v3"))[0], numbers(read("deepseek-v3", mtp=None))[0]
    assert one - none == 682_636_487_424 - 671_026_419_200
