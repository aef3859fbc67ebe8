"""What import accepts, export restates: every key of every family, whatever training changed since."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.rope import Llama3Scaling, RopeConfig, YarnScaling
from maxlm.interop import hf_config
from maxlm.interop.hf_config import family_of, read_config

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz") if "config" in np.load(path).files)
FACTS = {  # which say nothing of the network, and which the library has defaults of its own for
    "bos_token_id": 7,
    "eos_token_id": [3, 5],
    "pad_token_id": 9,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "temperature": 0.6,
    "unsloth_fixed": True,
    "_name_or_path": "somebody/something",
}


def published(name):
    return json.loads(str(np.load(GOLDEN / f"{name}.npz")["config"]))


def imported(values):
    """(family, our model) of a config.json."""
    family, section = read_config(values, "config.json")
    further = {"mtp": {"depth": values["num_nextn_predict_layers"]}} if values.get("num_nextn_predict_layers") else {}
    return family, ModelConfig(**section, **further)


def varied(value):
    """Another value of the same kind, that a file may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 1.5 * value or 0.25
    return value[::-1] if isinstance(value, str | list) else 3


def asked_of(values, monkeypatch):
    """All keys that reading this config.json asks for."""
    seen = set()
    get = hf_config.Keys.get

    def recorded(self, key, default=None):
        seen.update([key] if "rope" not in self._source else [])
        return get(self, key, default)

    with monkeypatch.context() as patched:
        patched.setattr(hf_config.Keys, "get", recorded)
        read_config(values, "config.json")
    return seen


@pytest.mark.parametrize("name", CASES)
def test_every_key_comes_back_as_it_was_or_is_refused_by_name(name, monkeypatch):
    """One key after another has a value that is not in the recorded file; also keys that the file lacks and that are read."""
    plain = published(name) | ({} if name.startswith("gpt2") else FACTS)
    taken = 0
    for key in sorted(plain.keys() | asked_of(plain, monkeypatch)):
        values = plain | {key: varied(plain.get(key))}
        try:
            family, model = imported(values)
        except (UserError, ValueError):
            continue  # refused: of another kind, or it does not go with the other keys
        taken += 1
        assert family_of(model, 0, values) == (family, values), key
    assert taken > 15


@pytest.mark.parametrize("name", CASES)
def test_without_the_published_file_the_network_comes_back(name, monkeypatch):
    """As of a model that was trained here from the beginning: read again, each config gives the same model."""
    plain = published(name)
    for key in sorted(plain.keys() | asked_of(plain, monkeypatch)):
        try:
            model = imported(plain | {key: varied(plain.get(key))})[1]
            written = family_of(model, 16)[1]
        except (UserError, ValueError):
            continue
        again = imported(written)[1]
        free = {"mtp": None, "init_std": 1, "d_ff": 1}
        same = [one.model_dump(exclude=free.keys() | {"moe"}) for one in (model, again)]
        assert same[0] == same[1], key
        assert written["bos_token_id"] is written["pad_token_id"] is None, "the library has defaults of its own"


PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_published_come_back(name):
    """That of a text tower as one of a text model, and a type that the library lacks by the one that it has."""
    values = PUBLISHED[name]["config"]
    family, model = imported(values)
    out = family_of(model, 0, values)[1]
    if out["model_type"] == values["model_type"]:
        assert out == values
        return
    assert (values["model_type"], out["model_type"]) in {("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("kimi_k2", "deepseek_v3")}
    assert out["architectures"] == [family.architecture] and "auto_map" not in out and "vision_config" not in out
    inner = values.get("text_config", values)
    same = {key for key in inner if key not in ("architectures", "auto_map", "model_type", "quantization_config")}
    assert {key: out.get(key) for key in same} == {key: inner[key] for key in same}
    assert imported(out)[1] == model
    assert all(out.get(key) == values[key] for key in ("eos_token_id", "bos_token_id") if values.get(key) is not None)


YARN = RopeConfig(theta=5e5, scaling=YarnScaling(kind="yarn", factor=4, original_seq_len=131072))


@pytest.mark.parametrize(
    ("change", "seq_len", "keys"),
    [
        ({}, 4096, {}),
        ({}, 200_000, {"max_position_embeddings": 200_000}),
        ({"vocab_size": 64}, 0, {"vocab_size": 64}),
        ({"init_std": 0.5}, 0, {"initializer_range": 0.5}),
        ({"rope": YARN}, 8192, {"max_position_embeddings": 4 * 131072, "rope_theta": None, "rope_scaling": None, "rope_parameters": ...}),
    ],
)
def test_only_what_changed_is_written_otherwise(change, seq_len, keys):
    """Of a file with the older keys of RoPE, as Llama 3.1 was published."""
    values = published("llama3") | FACTS
    values |= {"rope_theta": 5e5, "rope_scaling": values.pop("rope_parameters") | {"rope_theta": 5e5}}
    model = imported(values)[1]
    assert isinstance(model.rope.scaling, Llama3Scaling)
    out = family_of(model.model_copy(update=change), seq_len, values)[1]
    assert {key for key in {**out, **values} if out.get(key) != values.get(key)} == keys.keys()
    for key, value in keys.items():
        assert out.get(key) == value or value is ..., key
    assert imported(out)[1].rope == change.get("rope", model.rope)


def test_a_mistral_without_a_window_stays_one():
    values = published("mistral") | {"sliding_window": None}
    assert family_of(imported(values)[1], 0, values)[1]["model_type"] == "mistral"


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_a_model_without_local_layers_gets_the_window_that_the_library_asks_for(name):
    """It makes the mask of local layers whether or not one of them reads it."""
    plain = published(name)
    values = plain | {"sliding_window": None, "layer_types": ["full_attention"] * plain["num_hidden_layers"]}
    values |= {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}} if name == "gemma3" else {}
    model = imported(values)[1]
    for source in (None, values):
        family, out = family_of(model, 16, source)
        assert family.model_type == plain["model_type"] and out["sliding_window"] == 4096
        assert imported(out)[1] == model


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gemma2", {"attention_scale": 0.3}, "model.attention_scale .*one over the square root of a whole number"),
        ("gemma2", {"d_model": 26, "head_dim": 8}, "model.d_model .hidden_size = 26.: the library wants num_attention_heads to divide it"),
        ("gemma3", {"softcap": {"attention": 3.0, "logits": None}}, "model.softcap.attention = 3.0"),
    ],
)
def test_what_the_library_cannot_run_is_refused_with_the_field(name, change, said):
    model = imported(published(name))[1]
    with pytest.raises(UserError, match=said):
        family_of(ModelConfig(**(model.model_dump(exclude={"rope"}) | {"rope": model.rope} | change)), 16)
