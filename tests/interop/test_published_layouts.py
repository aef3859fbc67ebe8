"""Layouts in which models are published: text towers under prefixed names, and matrices in fp8 with a scale for each block."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_hf import drawn
from safetensors.numpy import load_file, save_file
from test_golden import restored

from maxlm.base.errors import UserError
from maxlm.config.schema import ModelConfig
from maxlm.interop.exporting import export_model
from maxlm.interop.hf_config import read_config, text_tower
from maxlm.interop.importing import import_model
from maxlm.interop.tensor_files import TensorFiles
from maxlm.models import count_parameters

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())  # factors of LongRoPE are 1 here
GEMMA, MISTRAL = ("gemma3", "gemma3", {"mm_tokens_per_image": 256}), ("mistral", "mistral3", {"spatial_merge_size": 2})
# Beginnings of names: of the model, of its unembedding, and of the other tower.
PUBLISHED = ("language_model.model.", "language_model.lm_head.", "vision_tower.")
SAVED = ("model.language_model.", "lm_head.", "model.vision_tower.")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 10]}


def nothing(done: int, total: int) -> None:
    pass


def case(name: str):
    """(config.json, tensors) of a recorded case."""
    recorded = np.load(GOLDEN / f"{name}.npz")
    shapes = {key.removeprefix("grad "): recorded[key].shape for key in recorded.files if key.startswith("grad ")}
    return json.loads(str(recorded["config"])), {key: drawn(key, shape) for key, shape in shapes.items()}


def write(folder: Path, config, tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_towers(config, tensors, model_type, names, **outer):
    """The same text model as the tower of a model that also sees."""
    model, unembedding, vision = names
    renamed = {
        unembedding + key.removeprefix("lm_head.") if key.startswith("lm_head.") else model + key.removeprefix("model."): value
        for key, value in tensors.items()
    }
    seen = {f"{vision}layers.{i}.weight": np.ones((2, 3), np.float32) for i in range(2)}
    bridge = {vision.replace("vision_tower", "multi_modal_projector") + "norm.weight": np.ones(3, np.float32)}
    values = {"model_type": model_type, "text_config": config, "vision_config": {"hidden_size": 8}, "image_token_index": 3, **outer}
    return values, renamed | seen | bridge


@pytest.mark.parametrize(
    ("name", "model_type", "outer", "names"),
    [
        pytest.param(*GEMMA, PUBLISHED, id="gemma3-published"),
        pytest.param(*MISTRAL, SAVED, id="mistral3-saved"),
        pytest.param(*GEMMA, SAVED, id="gemma3-saved", marks=pytest.mark.soak),
        pytest.param(*MISTRAL, PUBLISHED, id="mistral3-published", marks=pytest.mark.soak),
    ],
)
def test_the_text_tower_of_a_model_that_sees_is_the_text_model(name, model_type, outer, names, tmp_path):
    config, tensors = case(name)
    write(tmp_path / "text", config, tensors)
    write(tmp_path / "whole", *with_towers(config, tensors, model_type, names, **outer))
    import_model(tmp_path / "text", tmp_path / "a", [], nothing)
    imported = import_model(tmp_path / "whole", tmp_path / "b", [], nothing)
    assert [note for note in imported.notes if "tower" in note] == [
        f"a tensor of {names[2].replace('vision_tower.', 'multi_modal_projector')} is not read: only the text tower is",
        f"2 tensors of {names[2][:-1]} are not read: only the text tower is",
    ]
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "a"), restored(tmp_path / "b"))
    first, second = ((tmp_path / folder / "model.yml").read_text().splitlines()[1:] for folder in "ab")
    assert first == second
    if names == PUBLISHED:
        export_model(tmp_path / "b", tmp_path / "out", "float32", "5GB", None, nothing)
        said = json.loads((tmp_path / "out" / "config.json").read_text())
        assert {key: said[key] for key in config if key not in ("dtype", "transformers_version")} == {
            key: value for key, value in config.items() if key not in ("dtype", "transformers_version")
        }
        assert not {"text_config", "vision_config", "image_token_index", *outer} & said.keys()
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        ({"text_config": None}, "text_config = None is missing"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False contradicts text_config"),
        ({"bos_token_id": 7}, "bos_token_id = 7 contradicts text_config, where it is 2"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_scaling = {'rope_type': 'linear', 'factor': 8.0} is a setting that",
        ),
        ({"head_width": 8}, "head_width = 8 is a setting that maxlm does not know outside text_config"),
        ({"audio_config": {"layers": 2}}, "audio_config = {'layers': 2} is a setting that maxlm does not know"),
    ],
)
def test_a_model_of_towers_that_cannot_be_read_is_one_line(outer, said, tmp_path):
    config, tensors = case("gemma3")
    write(tmp_path / "whole", *with_towers(config, tensors, "gemma3", PUBLISHED, **outer))
    with pytest.raises(UserError) as told:
        import_model(tmp_path / "whole", tmp_path / "out", [], nothing)
    assert said in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_and_its_model_has_the_size_of_the_checkpoint(name):
    """Of the text tower, biases of the choice of experts included, without modules that predict further."""
    section = read_config(CONFIGS[name]["config"], "config.json")[1]
    assert count_parameters(ModelConfig(**section)) == CONFIGS[name]["parameters"]


def test_null_in_the_text_tower_is_no_default():
    """Mistral Small 3.1 states that it has no window; a Mistral that is silent has one of 4,096 tokens."""
    published = CONFIGS["mistral-small-3.1"]["config"]
    assert "window" not in read_config(published, "config.json")[1]
    silent = {name: value for name, value in published["text_config"].items() if name != "sliding_window"}
    assert read_config(published | {"text_config": silent}, "config.json")[1]["window"] == 4096


@pytest.mark.parametrize(
    ("outer", "inner", "joined"),
    [
        ([1, 2], 1, [1, 2]),
        ([1, 2], None, [1, 2]),
        ([1, 2], [3, 1], [1, 2, 3]),
        (None, 1, 1),
        (1, 1, 1),
        (None, None, None),
    ],
)
def test_the_ends_of_texts_are_of_both_levels(outer, inner, joined):
    config, _ = case("gemma3")
    text = config | {"eos_token_id": inner, "pad_token_id": None}
    values = {"model_type": "gemma3", "text_config": text, "eos_token_id": outer, "pad_token_id": 5}
    read = text_tower(values, "config.json")
    assert (read["eos_token_id"], read["pad_token_id"]) == (joined, 5)


def test_the_network_of_a_tower_is_read_from_its_own_config_alone():
    config, _ = case("gemma3")
    values = {"model_type": "gemma3", "text_config": config, "hidden_size": 999, "sliding_window": 3}
    assert read_config(values, "config.json") == read_config(config, "config.json")
    for name in ("hidden_size", "sliding_window", "vocab_size", "rope_theta", "max_position_embeddings"):
        text = {key: value for key, value in config.items() if key != name}
        with pytest.raises(UserError, match=f"{name} = 7 is a setting .* outside text_config"):
            read_config({**values, "text_config": text, name: 7}, "config.json")


def in_blocks(matrix, rows, columns):
    """(e4m3, scales) of a matrix, and its numbers as the format defines them, block by block."""
    blocks = [-(-n // size) for n, size in zip(matrix.shape, (rows, columns), strict=True)]
    values, scales, numbers = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn), np.zeros(blocks, np.float32), np.zeros_like(matrix)
    for i, j in np.ndindex(*blocks):
        place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = np.abs(matrix[place]).max() / 448
        values[place] = (matrix[place] / scales[i, j]).astype(values.dtype)
        numbers[place] = values[place].astype(np.float32) * scales[i, j]
    return values, scales, numbers


def test_blocks_of_fp8_are_the_numbers_recorded(tmp_path):
    recorded = np.load(GOLDEN / "fp8.npz")
    stored = recorded["bits"].view(ml_dtypes.float8_e4m3fn)
    save_file({"x.weight": stored, "x.weight_scale_inv": recorded["scales"]}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, (4, 8))
    assert dict(files) == {"x.weight": recorded["numbers"].shape}
    np.testing.assert_array_equal(files.read("x.weight"), recorded["numbers"])
    np.testing.assert_array_equal(files.read("x.weight", 5), recorded["numbers"][5])


def quantized(tensors):
    """(tensors as published, the same in float32): matrices of layers in blocks of fp8, all else as it was."""
    stored, plain = {}, {}
    for key, value in tensors.items():
        if value.ndim == 2 and ".layers." in key and not key.endswith("mlp.gate.weight"):
            stored[key], stored[key + "_scale_inv"], plain[key] = in_blocks(value, *FP8["weight_block_size"])
        else:
            stored[key] = plain[key] = value
    return stored, plain


@pytest.mark.parametrize("model_type", ["kimi_k2", pytest.param("deepseek_v3", marks=pytest.mark.soak)])
def test_a_model_in_blocks_of_fp8_is_the_one_of_its_numbers(model_type, tmp_path):
    """DeepSeek-V3 and Kimi K2 as published: import reads each matrix times its scales, exactly."""
    config, tensors = case("kimi-k2")
    stored, plain = quantized(tensors)
    write(tmp_path / "fp8", {**config, "model_type": model_type, "quantization_config": FP8}, stored)
    write(tmp_path / "plain", config, plain)
    for name in ("fp8", "plain"):
        import_model(tmp_path / name, tmp_path / f"{name}-in", [], nothing)
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "fp8-in"), restored(tmp_path / "plain-in"))
    export_model(tmp_path / "fp8-in", tmp_path / "out", "float32", "5GB", None, nothing)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == plain.keys()
    assert all(np.array_equal(again[key], plain[key]) for key in plain)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"weight_block_size": [128, 128]}, "has scales of shape [2, 3] in F32, and blocks of [128, 128] a float each, [1, 1]"),
        ({"weight_block_size": None}, "weight_block_size = None is not two sizes"),
        ({"weight_block_size": [16, 0]}, "weight_block_size = [16, 0] is not two sizes"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2' is not e4m3"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static' is not dynamic"),
        ({"twist": 1}, "twist in it may change what is computed"),
        (None, "has a scale for each block, and config.json has no weight_block_size"),
    ],
)
def test_blocks_that_do_not_fit_are_one_line(section, said, tmp_path):
    config, tensors = case("llama2")
    name = "model.layers.0.self_attn.q_proj.weight"
    values, scales, _ = in_blocks(tensors[name], 16, 10)
    stated = {} if section is None else {"quantization_config": FP8 | section}
    write(tmp_path / "fp8", config | stated, tensors | {name: values, name + "_scale_inv": scales})
    with pytest.raises(UserError) as told:
        import_model(tmp_path / "fp8", tmp_path / "out", [], nothing)
    assert said in str(told.value) and "\n" not in str(told.value) and len(str(told.value)) < 500
