"""What `maxlm import` and `maxlm export` cannot do is one line with the name of what is wrong, and nothing is written."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from golden_hf import drawn
from safetensors.numpy import load_file, save_file

from maxlm.base.errors import UserError
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model

GOLDEN = Path(__file__).parent / "golden"
Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def nothing(done: int, total: int) -> None:
    pass


def make(folder: Path, name: str = "llama2") -> Path:
    recorded = np.load(GOLDEN / f"{name}.npz")
    folder.mkdir()
    (folder / "config.json").write_text(str(recorded["config"]))
    names = [key.removeprefix("grad ") for key in recorded.files if key.startswith("grad ")]
    save_file({key: drawn(key, recorded[f"grad {key}"].shape) for key in names}, folder / "model.safetensors")
    return folder


def config(**changes):
    """Change keys of config.json; None removes one."""

    def apply(folder):
        values = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            values.pop(key, None) if value is None else values.update({key: value})
        (folder / "config.json").write_text(json.dumps(values))

    return apply


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def tensors(change):
    def apply(folder):
        values = load_file(folder / "model.safetensors")
        change(values)
        save_file(values, folder / "model.safetensors")

    return apply


def cut(at):
    def apply(folder):
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: at if at > 0 else len(content) + at])

    return apply


def shards(change):
    """Split the tensors over two files with an index, then change the index."""

    def apply(folder):
        values = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(values)
        files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: values[name] for name in names if files[name] == file}, folder / file)
        index = {"metadata": {}, "weight_map": files}
        change(index, folder)
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def torch_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def pickle_in_disguise(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps({"a": list(range(100))}))


def zip_in_disguise(folder):
    with zipfile.ZipFile(folder / "model.safetensors", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps([1]))


def moved(index, folder):
    index["weight_map"][Q] = next(file for file in set(index["weight_map"].values()) if file != index["weight_map"][Q])


def tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def rename(values, old, new):
    values[new] = values.pop(old)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}
CASES = {
    "adapters alone": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "holds only adapters"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config no JSON": (text("config.json", b"{"), "is no JSON"),
    "config no object": (text("config.json", b"[1]"), "holds no JSON object"),
    "config too deep": (text("config.json", b"[" * 100_000), "is no JSON"),
    "config not UTF-8": (text("config.json", b"\xff\xfe{"), "is no JSON"),
    "no model_type": (config(model_type=None), "model_type = None"),
    "unknown family": (config(model_type="mamba"), "model_type = 'mamba' is not a family that maxlm imports: llama, mistral"),
    "unknown setting": (config(clever_trick=3), "clever_trick = 3 is a setting that maxlm does not know"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "activation": (config(hidden_act="relu"), "hidden_act = 'relu' is not supported: silu, swish, gelu_pytorch_tanh"),
    "width a text": (config(hidden_size="24"), "hidden_size = '24' must be a whole number above 0"),
    "width negative": (config(hidden_size=-24), "hidden_size = -24 must be a whole number above 0"),
    "width true": (config(hidden_size=True), "hidden_size = True must be a whole number above 0"),
    "width missing": (config(hidden_size=None), "hidden_size = None must be a whole number above 0"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers = 0 must be"),
    "more layers than tensors": (config(num_hidden_layers=4), "lacks model.layers.3.input_layernorm.weight"),
    "fewer layers than tensors": (config(num_hidden_layers=2), "holds model.layers.2.input_layernorm.weight"),
    "another width": (
        config(intermediate_size=48),
        "mlp.gate_proj.weight has shape [40, 24] in the source, and its config.json makes it [48, 24]",
    ),
    "heads that do not divide": (config(num_attention_heads=5, head_dim=None), "n_heads"),
    "biases without tensors": (config(attention_bias=True), "lacks model.layers.0.self_attn.k_proj.bias"),
    "unknown rope": (config(rope_parameters={**ROPE, "rope_type": "spiral"}), "rope_type = 'spiral' is not supported: default, linear"),
    "longrope without factors": (
        config(rope_parameters={**ROPE, "rope_type": "longrope", "short_factor": [1.0]}),
        "long_factor = None must",
    ),
    "longrope of other pairs": (config(rope_parameters=LONG), "must have a factor for each of the 3 pairs of rotary dims; give 3"),
    "longrope with a text": (
        config(rope_parameters={**LONG, "long_factor": [1.0, "2"]}),
        "long_factor = [1.0, '2'] must be a list of numbers",
    ),
    "unknown key of rope": (config(rope_parameters={**ROPE, "twist": 2}), "rope_parameters: twist = 2"),
    "partial rotary": (config(rope_parameters={**ROPE, "partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5 is not supported here"),
    "partial rotary, old": (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported here"),
    "share a text": (config(rope_parameters={**ROPE, "partial_rotary_factor": "half"}), "partial_rotary_factor = 'half' must be a finite"),
    "temperature a text": (config(rope_parameters={**YARN, "attention_factor": "1"}), "attention_factor = '1' must be a finite number"),
    "temperature 0": (config(rope_parameters={**YARN, "attention_factor": 0}), "attention_factor = 0.0 must be above 0"),
    "temperature not finite": (config(rope_parameters={**YARN, "attention_factor": float("inf")}), "attention_factor = inf must be"),
    "negative mscale": (config(rope_parameters={**YARN, "mscale": -1.0}), "mscale = -1.0 and mscale_all_dim must not be below 0"),
    "mscale without yarn": (config(rope_parameters={**ROPE, "mscale": 0.7}), "mscale = 0.7 is a setting that maxlm does not know"),
    "rope without factor": (config(rope_parameters={**ROPE, "rope_type": "linear"}), "factor = None"),
    "rope not finite": (config(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}), "theta"),
    "rope no object": (config(rope_parameters=[1]), "rope_parameters = [1]"),
    "eps a text": (config(rms_norm_eps="small"), "rms_norm_eps = 'small'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no safetensors files"),
    "only pickle": (torch_file, "holds only pickle files (pytorch_model.bin), which can run code"),
    "pickle in disguise": (pickle_in_disguise, "is a pickle file, which can run code"),
    "zip in disguise": (zip_in_disguise, "is a pickle file, which can run code"),
    "empty file": (text("model.safetensors", b""), "cannot be read as safetensors"),
    "header cut": (cut(100), "cannot be read as safetensors"),
    "data cut": (cut(-64), "cannot be read as safetensors"),
    "header lies": (text("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"), "cannot be read as safetensors"),
    "tensor missing": (tensors(lambda values: values.pop(Q)), f"lacks {Q}, which its config.json asks for"),
    "tensor unknown": (tensors(lambda values: values.update({"model.extra": np.ones(3, np.float32)})), "holds model.extra"),
    "tensor renamed": (tensors(lambda values: rename(values, Q, Q + "s")), f"lacks {Q}"),
    "tensor turned": (tensors(lambda values: values.update({Q: np.ones((24, 12), np.float32)})), f"{Q} has shape [24, 12]"),
    "NaN": (tensors(lambda values: values[Q].__setitem__((3, 4), np.nan)), f"{Q} in model.safetensors holds numbers that are not finite"),
    "infinite": (tensors(lambda values: values[Q].__setitem__((0, 0), -np.inf)), "not finite"),
    "index no JSON": (text(INDEX, b"nonsense"), "is no index of safetensors files"),
    "index without map": (text(INDEX, b"{}"), "is no index of safetensors files"),
    "index out of the folder": (
        shards(lambda index, folder: index["weight_map"].update({Q: "../model.safetensors"})),
        "lists '../model.safetensors'",
    ),
    "index absolute": (shards(lambda index, folder: index["weight_map"].update({Q: "/etc/passwd"})), "lists '/etc/passwd'"),
    "listed and absent": (
        shards(lambda index, folder: index["weight_map"].update({Q: "model-3.safetensors"})),
        "model-3.safetensors, which is not there",
    ),
    "index and a whole file": (
        shards(lambda index, folder: (folder / "model.safetensors").write_bytes((folder / index["weight_map"][Q]).read_bytes())),
        "and it is not clear which of both counts",
    ),
    "index lies": (shards(moved), f"{Q} is not where it says"),
    "index forgets": (shards(lambda index, folder: index["weight_map"].pop(Q)), f"{Q} is not where it says"),
    "tensor twice": (
        lambda folder: (
            [(folder / f"{name}.safetensors").write_bytes((folder / "model.safetensors").read_bytes()) for name in "ab"]
            and (folder / "model.safetensors").unlink()
        ),
        "which one counts",
    ),
    "adapters of safetensors alone": (
        lambda folder: (folder / "model.safetensors").rename(folder / "adapter_model.safetensors"),
        "holds only adapters (adapter_model.safetensors)",
    ),
    "tokenizer damaged": (tokenizer, "is not a tokenizer.json that the tokenizers library reads"),
    "tied and different": (config(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_source_that_cannot_be_read_is_one_line(name, tmp_path):
    damage, said = CASES[name]
    source = make(tmp_path / "source")
    damage(source)
    with pytest.raises(UserError) as told:
        import_model(source, tmp_path / "out", [], nothing)
    assert said in str(told.value)
    assert "\n" not in str(told.value) and len(str(told.value)) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"], "nothing is written"


def test_a_whole_model_is_read_whatever_lies_beside_it(tmp_path):
    """Adapters, and the same tensors under names of their own; each is named, since nothing of it is in the import."""
    source = make(tmp_path / "source")
    for name in ("adapter_model", "consolidated", "consolidated.00", "model-00001-of-00002"):
        save_file({Q: np.ones(3, np.float32)}, source / f"{name}.safetensors")
    imported = import_model(source, tmp_path / "out", [], nothing)
    (note,) = (note for note in imported.notes if "not read" in note)
    names = "adapter_model.safetensors, consolidated.00.safetensors, consolidated.safetensors, and 1 more"
    assert note == f"not read, since the model is in other files: {names}"
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "model-00001-of-00002.safetensors").unlink()
    again = import_model(source, tmp_path / "again", [], nothing)
    assert again.parameters == imported.parameters


OF_FAMILIES = {
    "phi4-mini": {
        "another scaling": (
            config(rope_parameters={**ROPE, "rope_type": "linear"}),
            "rope_type = 'linear' is not supported in this family",
        ),
        "a bias of logits": (config(lm_head_bias=True), "lm_head_bias = True is not supported"),
        "wider than its tensors": (config(num_key_value_heads=4), "qkv_proj.weight has shape [64, 32] in the source"),
    },
    "seed-oss": {
        "biases of the output alone": (config(attention_bias=False, attention_out_bias=True), "attention_out_bias = True is not supported"),
    },
    "granite": {
        "embeddings times 0": (config(embedding_multiplier=0), "embedding_multiplier = 0.0 must be above 0"),
        "heads without width": (config(hidden_size=1), "model.d_model = 1"),
    },
    "stablelm": {
        "share of an odd number": (config(rope_parameters={**ROPE, "partial_rotary_factor": 0.4}), "turns 3 of model.head_dim = 8 dims"),
        "share of none": (config(rope_parameters={**ROPE, "partial_rotary_factor": 0.1}), "turns 0 of model.head_dim = 8 dims"),
        "share above all": (config(rope_parameters={**ROPE, "partial_rotary_factor": 1.5}), "model.rope.share = 1.5"),
        "norms of heads": (config(qk_layernorm=True), "qk_layernorm = True is not supported"),
        "parallel residual": (config(use_parallel_residual=True), "use_parallel_residual = True is not supported"),
    },
    "gpt-oss-clamp": {
        "limit 0": (config(swiglu_limit=0), "swiglu_limit = 0.0 must be above 0"),
        "limit a text": (config(swiglu_limit="7"), "swiglu_limit = '7' must be a finite number"),
        "slope negative": (config(swiglu_alpha=-1.7), "swiglu_alpha = -1.7 must be above 0"),
    },
    "deepseek-v2-groups": {
        "unknown choice": (config(topk_method="noaux_tc"), "topk_method = 'noaux_tc' is not supported"),
        "groups that do not divide": (config(n_group=3), "model.moe.router.groups = 3"),
        "groups of too few": (config(n_group=8, topk_group=2), "model.moe.top_k = 3"),
        "groups a text": (config(n_group="4"), "n_group = '4' must be a whole number above 0"),
        "share with latent heads": (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported here"),
    },
    "deepseek-v3-mtp": {
        "another embedding": (
            tensors(lambda values: values["model.layers.3.embed_tokens.weight"].__setitem__((7, 3), 9)),
            "model.layers.3.embed_tokens.weight differs from model.embed_tokens.weight",
        ),
        "another unembedding": (
            tensors(lambda values: values["model.layers.2.shared_head.head.weight"].__setitem__((0, 0), 9)),
            "model.layers.2.shared_head.head.weight differs from lm_head.weight",
        ),
        "fewer modules than tensors": (config(num_nextn_predict_layers=1), "holds model.layers.3.eh_proj.weight"),
        "more modules than tensors": (config(num_nextn_predict_layers=3), "lacks model.layers.4.eh_proj.weight"),
    },
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, cases in OF_FAMILIES.items() for name in cases])
def test_a_source_of_a_family_that_cannot_be_read_is_one_line(family, name, tmp_path):
    damage, said = OF_FAMILIES[family][name]
    source = make(tmp_path / "source", family)
    damage(source)
    with pytest.raises(UserError) as told:
        import_model(source, tmp_path / "out", [], nothing)
    assert said in str(told.value)
    assert "\n" not in str(told.value) and len(str(told.value)) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"], "nothing is written"


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    source, out = make(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(UserError, match="is there already, and not empty"):
        import_model(source, out, [], nothing)
    assert (out / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "--dtype int8 is not one of float32 and bfloat16"),
        ({"shard_size": "5 apples"}, "--shard-size 5 apples is not a size"),
        ({"shard_size": "0GB"}, "--shard-size 0GB is not a size"),
        ({"step": 7}, "7"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(options, said, tmp_path_factory, tmp_path):
    source = make(tmp_path / "source")
    import_model(source, tmp_path / "model", [], nothing)
    given = {"dtype": "float32", "shard_size": "5GB", "step": None, **options}
    with pytest.raises(UserError) as told:
        export_model(tmp_path / "model", tmp_path / "out", *given.values(), nothing)
    assert said in str(told.value) and "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()


def test_a_model_that_no_family_is_like_is_refused_by_what_differs(tmp_path):
    source = make(tmp_path / "source")
    import_model(source, tmp_path / "model", [], nothing)
    file = tmp_path / "model" / "config.yml"
    file.write_text(file.read_text().replace("activation: swiglu", "activation: gelu"))
    with pytest.raises(UserError, match=r"no published architecture is like it; the nearest, .* cannot say model.activation = gelu"):
        export_model(tmp_path / "model", tmp_path / "out", "float32", "5GB", None, nothing)
