"""Exports in int8, int4 and fp8: what comes back is what training computes with, bit for bit; what cannot be stored so is one line."""

import json
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_hf import drawn
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny import drawn_parameters, tiny_batch, tiny_config

from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.config.loader import dump
from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.interop import packed
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model
from maxlm.interop.tensor_files import TensorFiles, read_e4m3
from maxlm.objectives import build_objective
from maxlm.precision import dequantize, quantized_weight
from maxlm.training.saved_run import open_run

GOLDEN = Path(__file__).parent / "golden"
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
Q = "model.layers.0.self_attn.q_proj.weight"
INPUTS = {"query_DHK": 1, "key_DGK": 1, "value_DGK": 1, "out_HKD": 2, "gate_DF": 1, "up_DF": 1, "down_FD": 1}  # dims that are summed


def nothing(done: int, total: int) -> None:
    pass


def load_file(file: Path) -> dict[str, np.ndarray]:
    """All tensors; the library reads none in e4m3 into numpy."""
    with safe_open(file, "numpy") as stored:
        kinds = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118  (no mapping)
        return {name: read_e4m3(file, name) if kind == "F8_E4M3" else stored.get_tensor(name) for name, kind in kinds.items()}


def imported(folder: Path, name: str) -> Path:
    """A golden case of the Hugging Face library, imported."""
    recorded = np.load(GOLDEN / f"{name}.npz")
    source = folder / f"{name}-source"
    source.mkdir()
    (source / "config.json").write_text(str(recorded["config"]))
    names = [key.removeprefix("grad ") for key in recorded.files if key.startswith("grad ")]
    save_file({key: drawn(key, recorded[f"grad {key}"].shape) for key in names}, source / "model.safetensors")
    import_model(source, folder / name, [], nothing)
    return folder / name


def parameters(folder: Path):
    saved = open_run(folder)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1, 1), ("data", "stage", "fsdp", "context", "tensor", "expert")
    )
    return jax.device_get(saved.weights(mesh).params)


def rounded(params, config):
    """The parameters, with the matrices of stacked layers as training reads them."""

    def one(path, leaf):
        inputs = INPUTS.get(path[-1].key)
        return leaf if inputs is None else dequantize(quantized_weight(config, leaf, 1, inputs).form)

    return jax.device_get(jax.jit(lambda tree: jax.tree_util.tree_map_with_path(one, tree))(params))


def test_words_by_hand():
    """The first value in the lowest bits, as value + 2^(bits - 1)."""
    row = np.array([[-8, 7, 0, 1, -1, 2, 3, 4, 5]], np.int8)
    words = packed.pack(row, 4)
    assert [hex(word) for word in words.view(np.uint32)[0]] == ["0xcba798f0", "0xd"]
    assert [hex(word) for word in packed.pack(row[:, :3], 8).view(np.uint32)[0]] == ["0x808778"]
    rng = np.random.default_rng(0)
    for bits in (4, 8):
        values = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 21)).astype(np.int8)
        assert packed.bits_of((5, 21), packed.pack(values, bits).shape) == bits
        np.testing.assert_array_equal(packed.unpack(packed.pack(values, bits), bits, 21), values)


CASES = [("llama2", "int8"), ("stablelm", "int4"), ("stablelm", "fp8")]


@pytest.mark.parametrize(("name", "format"), CASES)  # stablelm: some outputs are in another order
def test_an_import_reads_the_rounded_weights(name, format, tmp_path):
    model = imported(tmp_path, name)
    done = export_model(model, tmp_path / "out", "float32", "20KB", None, nothing, quantize=format)
    assert done.files > 1
    stored = {key: value for file in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(file).items()}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys() and index["metadata"]["total_size"] == sum(v.nbytes for v in stored.values())
    values = stored[Q if format == "fp8" else Q + "_packed"]
    assert values.dtype == (ml_dtypes.float8_e4m3fn if format == "fp8" else np.int32) and stored[Q + "_scale"].shape == (len(values), 1)
    import_model(tmp_path / "out", tmp_path / "back", [], nothing)
    before, after = parameters(model), parameters(tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, after, rounded(before, QuantizedConfig(format=format, weights_only=True)))
    assert not np.array_equal(before["layers"]["0"]["mlp"]["up_DF"], after["layers"]["0"]["mlp"]["up_DF"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with quantization-aware training, of which a matrix and the first layer are kept high."""
    folder = tmp_path_factory.mktemp("run")
    matmul = {"format": "int8", "weights_only": True, "skip": ["down"], "first_layers": 1}
    config = tiny_config(precision={"compute": "bfloat16", "matmul": matmul})
    (folder / "config.yml").write_text(dump(config))
    state = {"params": drawn_parameters(config.model), "model_state": {}}
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, {})
    checkpoints.save(1, state, {})
    checkpoints.close()
    return folder, config, state


def test_an_export_computes_what_training_did(trained, tmp_path):
    """The same loss to the bit, without precision.matmul."""
    folder, config, state = trained
    export_model(folder, tmp_path / "out", "float32", "5GB", None, nothing, quantize="int8")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["format"]) == ("compressed-tensors", "pack-quantized")
    layers = {name for name in written["ignore"] if "layers.0." in name}
    assert len(layers) == 7 and set(written["ignore"]) - layers == {"lm_head", "model.layers.1.mlp.down_proj"}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name in written["ignore"] if f"{name}.weight" in stored}
    assert kept == set(written["ignore"]) and f"{Q}_packed" not in stored and Q.replace("0", "1", 1) + "_packed" in stored
    import_model(tmp_path / "out", tmp_path / "back", [], nothing)
    plain = tiny_config(precision={"compute": "bfloat16"})
    params = parameters(tmp_path / "back")
    batch, trained_loss, plain_loss = tiny_batch(0), *(jax.jit(build_objective(one).loss) for one in (config, plain))
    losses = [
        float(loss(tree, state["model_state"], batch)[1].added["loss"])
        for loss, tree in ((trained_loss, state["params"]), (plain_loss, params), (plain_loss, state["params"]))
    ]
    assert losses[0] == losses[1] != losses[2]


REFUSED = {
    "int2": ("llama2", "--quantize int2 is not one of int8, int4, fp8"),
    "int8": ("gpt2", "c_attn.weight is not the weight of a Linear layer (this family stores it inputs first)"),
    "int4": ("mixtral", "it is one of experts"),
    "fp8": ("mixtral", "it is one of experts"),
}


@pytest.mark.parametrize("format", REFUSED)
def test_what_cannot_be_packed_is_refused(format, tmp_path):
    name, said = REFUSED[format]
    model = imported(tmp_path, name)
    with pytest.raises(UserError) as raised:
        export_model(model, tmp_path / "out", "float32", "5GB", None, nothing, quantize=format)
    assert said in str(raised.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("section", [{"hadamard": 16}, {"scaling": "tensor"}], ids=str)
def test_a_run_in_another_form_is_refused(trained, section, tmp_path):
    matmul = {"format": "int8", "weights_only": True, **section}
    (tmp_path / "config.yml").write_text(dump(tiny_config(precision={"compute": "bfloat16", "matmul": matmul})))
    (tmp_path / "checkpoints").symlink_to(trained[0] / "checkpoints")
    with pytest.raises(UserError, match=rf"precision\.matmul\.{next(iter(section))} = .*one scale for each output"):
        export_model(tmp_path, tmp_path / "out", "float32", "5GB", None, nothing, quantize="int8")


def lacks_scales(tensors, config):
    del tensors[Q + "_scale"]


def another_shape(tensors, config):
    tensors[Q + "_shape"] = np.array([24, 999])


def not_finite(tensors, config):
    tensors[Q + "_scale"][0] = np.nan


def activations(tensors, config):
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}


def rotated(tensors, config):
    config["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}


def sparse(tensors, config):
    config["quantization_config"]["sparsity_config"] = "24"


def asymmetric(tensors, config):
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False


def another_format(tensors, config):
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"


DAMAGE = {
    rotated: "transform_config in it may change what is computed",
    sparse: "sparsity_config in it may change what is computed",
    lacks_scales: "weight_packed has no model.layers.0.self_attn.q_proj.weight_scale",
    another_shape: "which fit neither 4 nor 8 bits",
    not_finite: "not finite",
    activations: "only quantized weights are, without activations",
    asymmetric: "symmetric = False",
    another_format: "only pack-quantized and float-quantized are",
}


def no_number(tensors, config):
    tensors[Q] = tensors[Q].copy()
    tensors[Q][0, 0] = np.nan


def a_scale_for_each_input(tensors, config):
    tensors[Q + "_scale"] = np.ones((1, tensors[Q].shape[1]), np.float32)


FP8_DAMAGE = {
    lacks_scales: "q_proj.weight (F8_E4M3) has no model.layers.0.self_attn.q_proj.weight_scale",
    no_number: "not finite",
    not_finite: "not finite",
    a_scale_for_each_input: "a float for each output or one for all",
    activations: "only quantized weights are, without activations",
}
DAMAGED = [("int4", *one) for one in DAMAGE.items()] + [("fp8", *one) for one in FP8_DAMAGE.items()]


@pytest.fixture(scope="module")
def exports(trained, tmp_path_factory):
    """An export in each format that is damaged."""
    folder = tmp_path_factory.mktemp("exports")
    for format in ("int4", "fp8"):
        export_model(trained[0], folder / format, "float32", "5GB", None, nothing, quantize=format)
    return folder


@pytest.mark.parametrize(("format", "change", "said"), DAMAGED, ids=[f"{format} {change.__name__}" for format, change, _ in DAMAGED])
def test_files_that_are_not_understood_are_refused(format, change, said, exports, tmp_path):
    shutil.copytree(exports / format, tmp_path / "out")
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), json.loads((tmp_path / "out" / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(said)):
        import_model(tmp_path / "out", tmp_path / "back", [], nothing)
    assert not (tmp_path / "back").exists()


def test_one_scale_for_a_whole_matrix_is_read(exports, tmp_path):
    """As others write fp8: the import has the stored numbers times it."""
    shutil.copytree(exports / "fp8", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[Q + "_scale"] = np.array([0.5], np.float32)
    save_file(tensors, file)
    files = TensorFiles(tmp_path / "out")
    assert Q + "_scale" not in files and files[Q] == tensors[Q].shape
    np.testing.assert_array_equal(files.read(Q), tensors[Q].astype(np.float32) / 2)
    assert not files.same(Q, Q.replace("q_proj", "o_proj")), "the same sizes, other numbers"
