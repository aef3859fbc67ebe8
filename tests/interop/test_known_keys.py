"""Keys of published config.json files: those that change nothing are accepted, all others are named at once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from maxlm.base.errors import LONGEST, UserError
from maxlm.config.schema import ModelConfig
from maxlm.interop.families.keys import NEUTRAL
from maxlm.interop.hf_config import family_of, read_config
from maxlm.interop.published_files import ends_of, read_object, write_object

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llama3", "mistral", "qwen3-moe", "gemma3", "gpt2", "deepseek-v3", "gpt-oss")
# As published files carry them: of old versions of the library, of programs for fine-tuning, and defaults that say "off".
WITHOUT_EFFECT = {
    "unsloth_fixed": True,
    "_attn_implementation_autoset": True,
    "tokenizer_class": "LlamaTokenizer",
    "qkv_bias": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "num_beams": 1,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "torchscript": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "problem_type": None,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "_name_or_path": "somebody/something",
    "transformers_version": "4.28.1",
    "use_cache": False,
    "output_attentions": False,
    "return_dict": True,
    "sep_token_id": None,
    "finetuning_task": None,
    "tf_legacy_loss": False,
    "use_bfloat16": False,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "max_sequence_length": 2048,
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
}


def published(name):
    """The config.json of a recorded case."""
    return json.loads(str(np.load(GOLDEN / f"{name}.npz")["config"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_without_effect_change_nothing(name):
    assert read_config(WITHOUT_EFFECT | published(name), "config.json") == read_config(published(name), "config.json")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", [key for key, values in NEUTRAL.items() if values[0] is False and True not in values])
def test_the_same_keys_with_an_effect_are_applied_or_refused(name, key):
    if (name, key) == ("gpt-oss", "attention_bias"):
        pytest.skip("this family always has one")
    try:
        read = read_config(published(name) | {key: True}, "config.json")
    except UserError as told:
        assert f"{key} = True" in str(told)
    else:
        assert read != read_config(published(name), "config.json")


def test_all_unknown_keys_are_named_at_once_in_one_line():
    wrong = {"clever_trick": 3, "pruned_heads": {"0": [1]}, "add_cross_attention": True, "a\nkey": "x" * 500, "nothing": None}
    with pytest.raises(UserError) as told:
        read_config(published("llama3") | wrong, "config.json")
    said = str(told.value)
    for part in ("clever_trick = 3", "pruned_heads = {'0': [1]}", "add_cross_attention = True", r"'a\nkey' = 'xxx", "are settings that"):
        assert part in said
    assert "\n" not in said and "nothing" not in said and len(said) < 400


ODD = (None, True, -1, 0, 1, 10**400, 1e308, math.nan, "a\nb: \x1b[31m", [], [1], {"rope_type": "odd\nkind"})


def paths(values, outer=()):
    for key, value in values.items():
        yield (*outer, key)
        yield from paths(value, (*outer, key)) if isinstance(value, dict) else ()


# One of each family, the one with most keys.
RECORDED = sorted(
    (file.stem for file in GOLDEN.glob("*.npz") if "config" in np.load(file).files), key=lambda name: len([*paths(published(name))])
)
NAMES = sorted({published(name)["model_type"]: name for name in RECORDED}.values())


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_value_of_any_key_is_read_or_refused_in_one_line(name):
    for *outer, key in paths(published(name)):
        for odd in ODD:
            values = section = published(name)
            for part in outer:
                section = section[part]
            section[key] = odd
            try:
                read_config(values, "config.json")
            except UserError as told:
                assert str(told).isprintable() and len(str(told)) <= LONGEST


WHOLE, LOCAL = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def test_the_older_key_of_rope_takes_the_place_of_the_newer_as_in_the_library():
    """Also its base: one that only `rope_parameters` names is not read then."""
    values = published("llama3") | {"rope_scaling": YARN}
    rope = read_config(values, "config.json")[1]["rope"]
    assert (rope["theta"], rope["scaling"]["kind"]) == (10_000.0, "yarn")
    assert read_config(values | {"rope_theta": 7e4}, "config.json")[1]["rope"]["theta"] == 7e4
    assert read_config(values | {"rope_scaling": {}}, "config.json") == read_config(published("llama3"), "config.json")


def test_of_gemma_3_the_older_key_is_for_layers_without_a_window():
    values = published("gemma3") | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    section = read_config(values, "config.json")[1]
    assert section["rope"]["scaling"]["factor"] == 8 and "scaling" not in section["rope_local"]


@pytest.mark.parametrize("cap", [None, 3.0, 50.0])
def test_the_cap_of_attention_that_the_library_never_applies_in_gemma_3_is_not_applied(cap):
    assert "softcap" not in read_config(published("gemma3") | {"attn_logit_softcapping": cap}, "config.json")[1]
    assert ("attention" in read_config(published("gemma2") | {"attn_logit_softcapping": cap}, "config.json")[1]["softcap"]) == bool(cap)


@pytest.mark.parametrize(
    ("name", "changes", "pattern"),
    [
        ("gpt-oss", {"layer_types": [WHOLE] * 4}, None),
        ("gemma2", {"layer_types": [WHOLE] * 3}, None),
        ("gemma3", {"layer_types": [WHOLE] * 5, "rope_parameters": {WHOLE: {"rope_theta": 5e5}}}, None),
        ("gemma3", {"layer_types": [LOCAL] * 5, "rope_parameters": {LOCAL: {"rope_theta": 5e4}}}, ["local"]),
    ],
)
def test_layers_of_one_kind_are_read(name, changes, pattern):
    section = read_config(published(name) | changes, "config.json")[1]
    assert section.get("layer_pattern") == pattern and ("window" in section) == (pattern is not None)
    if name == "gemma3":
        assert section["rope"]["theta"] == (5e4 if pattern else 5e5) and section.get("rope_local") is None


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported here: this family scales"),
        ("gpt-oss", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("mistral", {"layer_types": [WHOLE, LOCAL, LOCAL]}, "layer_types = .* is not applied by the library's Mistral"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling = .* name its kind rope_type"),
        ("gemma3", {"layer_types": None, "_sliding_window_pattern": 2}, "_sliding_window_pattern = 2 is not read by the library"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 must be a whole number above 0"),
        ("phi4-mini", {"sliding_window": 0}, "sliding_window = 0 must be a whole number above 0"),
        ("llama3", {"max_position_embeddings": "4k"}, "max_position_embeddings = '4k' must be a whole number above 0"),
        ("llama3", {"model_type": ["llama"]}, "model_type = .* is not a family"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = .* an object for each of full_attention and sliding_"),
    ],
)
def test_a_refusal_names_the_key_that_is_wrong(name, changes, said):
    with pytest.raises(UserError, match=said):
        read_config(published(name) | changes, "config.json")


@pytest.mark.parametrize("stated", [None, 64])
def test_a_longer_training_is_stated_where_the_source_says_less_or_nothing(stated):
    values = published("llama3") | {"max_position_embeddings": stated}
    config = ModelConfig(**read_config(values, "config.json")[1])
    assert family_of(config, 8192, values)[1]["max_position_embeddings"] == 8192
    assert family_of(config, 0, values)[1]["max_position_embeddings"] == stated


@pytest.mark.parametrize("stated", ["x", [[1], 2], {"a": 1}, [True], 1.5])
def test_an_end_of_texts_that_is_no_id_is_one_line(stated):
    with pytest.raises(UserError, match=r"config\.json: eos_token_id = .* must be the id of a token"):
        ends_of({"eos_token_id": stated}, Path("config.json"))


@pytest.mark.parametrize(
    "content", [b'\xef\xbb\xbf{"a": 1}', '{"a": "\u00e9"}'.encode("utf-16"), '{"a": "\\ud800", "b": "\u00e9"}'.encode()]
)
def test_a_file_in_another_encoding_is_restated(content, tmp_path):
    (tmp_path / "source").write_bytes(content)
    values = read_object(tmp_path / "source")
    write_object(tmp_path / "same", values, tmp_path / "source")
    assert (tmp_path / "same").read_bytes() == content
    write_object(tmp_path / "changed", values | {"c": 2}, tmp_path / "source")
    assert read_object(tmp_path / "changed") == values | {"c": 2}
