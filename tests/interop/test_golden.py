"""Recorded results of the Hugging Face library, replayed: the same weights give the same logits, loss and gradients, and come out again."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_hf import CASES, WEIGHT_AHEAD, drawn, tokens
from safetensors.numpy import load_file, save_file

from maxlm.checkpoint import Checkpoints
from maxlm.config import load
from maxlm.interop import weights
from maxlm.interop.exporting import export_model
from maxlm.interop.families import families
from maxlm.interop.importing import import_model
from maxlm.interop.layouts import FROM_ONE
from maxlm.interop.tensor_files import TensorFiles
from maxlm.kernels.linear_cross_entropy import logits as unembed
from maxlm.models import abstract_model_state, abstract_parameters, bind
from maxlm.models.layers import BlockContext
from maxlm.parallel import build_mesh

GOLDEN = Path(__file__).parent / "golden"


def nothing(done: int, total: int) -> None:
    pass


def restored(folder: Path):
    """Parameters and model state of an imported model."""
    config = load(str(folder / "config.yml")).config
    wanted = {"params": abstract_parameters(config.model), "model_state": abstract_model_state(config.model)}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), wanted)
    return Checkpoints(folder / "checkpoints", config.checkpoint, {}).restore_entries(wanted).state


# Largest difference of logits, as a share of the largest one. Rounding alone moves gemma3's by 0.3e-5 to 1.9e-5, as the processor (with and
# without AVX-512) and XLA's level of optimization choose the order of sums; all others are within 5e-7.
CLOSE = {"gemma3": 4e-5}


class Case:
    """A recorded case, and its import. `slopes`: compare gradients."""

    def __init__(self, name: str, slopes: bool, folder: Path) -> None:
        self.name, self.slopes, self.recorded = name, slopes, np.load(GOLDEN / f"{name}.npz")
        self.source, self.out = folder / "source", folder / "imported"
        self.source.mkdir()
        (self.source / "config.json").write_text(str(self.recorded["config"]))
        grads = {key.removeprefix("grad "): self.recorded[key] for key in self.recorded.files if key.startswith("grad ")}
        self.grads = grads
        self.weights = {key: drawn(key, value.shape) for key, value in grads.items()}
        save_file(self.weights, self.source / "model.safetensors")
        self.imported = import_model(self.source, self.out, [], nothing)
        self.config = load(str(self.out / "config.yml")).config
        self.state = restored(self.out)

    def loss(self, params):
        """(loss, logits) of the recorded batch."""
        config, ids = self.config.model, jnp.asarray(tokens(), jnp.int32)
        model = bind(config, params, self.state["model_state"])
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        context = BlockContext(model.angles(positions), jnp.ones_like(ids))
        x_BSD = model.run(model.embed(ids, positions), context).x_BSD
        shifted = [jnp.pad(ids[:, depth:], ((0, 0), (0, depth))) for depth in range(1, config.mtp_depth + 1)]
        ahead = model.predict_further(x_BSD, shifted, context)[0] if shifted else []
        logits, losses = [], []
        for depth, hidden in enumerate([model.final_norm(x_BSD), *ahead]):  # `depth` tokens further than the next
            scores = unembed(hidden, model.unembedding_VD, config.logits_softcap).astype(jnp.float32)[:, : ids.shape[1] - depth]
            logp = jax.nn.log_softmax(scores[:, :-1])
            losses.append(-jnp.mean(jnp.take_along_axis(logp, ids[:, depth + 1 :, None], -1)))
            logits.append(scores)
        return losses[0] + sum(losses[1:]) * WEIGHT_AHEAD / max(1, len(ahead)), logits


# What they add to others of their family: a limit to groups, tokens further ahead, clamped gates, no scaled RoPE, biases with linear RoPE
SLOW = {"deepseek-v2-groups", "deepseek-v3-mtp", "gpt-oss-clamp", "llama2", "llama-biases-linear"}
# Parts of others, and what a test of its formula has (tests/models/test_gates_and_rope.py)
SLOW |= {
    "gpt2-exact-gelu",
    "llama-exact-gelu",
    "llama-attention-bias",
    "kimi-k2",
    "llama-dynamic",
    "llama-dynamic-short",
    "phi3",
    "seed-oss",
    "glm4-moe",
}


# Half of the time of these is the program of their gradients: tests of the models have those of experts, latents and windows.
FORWARD = {"gemma3", "gpt-oss", "deepseek-v2", "deepseek-v3", "qwen3-moe"}
KINDS = [pytest.param((name, True), marks=[pytest.mark.soak] if name in SLOW | FORWARD else [], id=name) for name in CASES]
KINDS += [pytest.param((name, False), id=f"{name} without gradients") for name in sorted(FORWARD)]


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    name, slopes = request.param
    return Case(name, slopes, tmp_path_factory.mktemp(name))


def test_logits_loss_and_gradients_are_those_recorded(case, tmp_path):
    loss_of = jax.value_and_grad(case.loss, has_aux=True) if case.slopes else lambda params: (case.loss(params), None)
    with jax.default_matmul_precision("highest"):
        (loss, logits), grads = jax.jit(loss_of)(case.state["params"])
    recorded = ["logits", *(f"logits ahead {depth}" for depth in range(1, len(logits)))]
    assert recorded == [key for key in case.recorded.files if key.startswith("logits")]
    for got, key in zip(logits, recorded, strict=True):
        wanted = case.recorded[key]
        assert np.abs(got - wanted).max() <= CLOSE.get(case.name, 1e-5) * np.abs(wanted).max(), key
    assert float(loss) == pytest.approx(float(case.recorded["loss"]), rel=1e-5)
    for target in weights.targets(case.config.model, weights_family(case)) if case.slopes else ():
        mine = weights.entry(grads, target.name)
        if mine is None:
            continue  # model state has no gradient
        for piece in target.pieces:
            theirs = case.grads[piece.theirs]
            theirs = target.rule.part(theirs if piece.row is None else theirs[piece.row], target.part)
            theirs = target.rule.layout.read(theirs, target.piece) - (1 if target.rule.layout == FROM_ONE else 0)
            scale = max(np.abs(theirs).max(), 1e-3)
            assert np.abs(np.asarray(mine)[piece.index] - theirs).max() <= 1e-4 * scale, piece.theirs


def weights_family(case):
    return families()[json.loads(str(case.recorded["config"]))["model_type"]]


def test_what_went_in_comes_out(case, tmp_path):
    exported = export_model(case.out, tmp_path / "out", "float32", "30KB", None, nothing)
    assert (tmp_path / "out" / "config.json").read_bytes() == (case.source / "config.json").read_bytes()
    assert not (tmp_path / "out" / "generation_config.json").exists(), "the source has none"
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == exported.files > 1
    again = {name: value for file in files for name, value in load_file(file).items()}
    assert again.keys() == case.weights.keys()
    from_one = {
        piece.theirs
        for target in weights.targets(case.config.model, weights_family(case))
        if target.rule.layout == FROM_ONE
        for piece in target.pieces
    }
    for name, value in case.weights.items():
        one = np.float32(name in from_one)  # a scale is stored as its difference from 1, in which float32 rounds
        np.testing.assert_array_equal(one + again[name], one + value, err_msg=name, strict=True)
    back = import_model(tmp_path / "out", tmp_path / "back", [], nothing)
    assert back[1:3] == case.imported[1:3]
    assert (tmp_path / "back" / "model.yml").read_text().splitlines()[2:] == (case.out / "model.yml").read_text().splitlines()[2:]
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "back"), case.state)


def test_a_mesh_reads_the_same(case):
    family = weights_family(case)
    found, files = weights.targets(case.config.model, family), TensorFiles(case.source)
    config = load(str(case.out / "config.yml"), ["mesh.fsdp=4", "mesh.data=2", "train.global_batch=8"]).config
    there = weights.load(config.model, found, files, build_mesh(config, jax.devices()), nothing)
    jax.tree.map(np.testing.assert_array_equal, there, case.state)


def test_blocks_of_mxfp4_are_the_numbers_recorded(tmp_path):
    recorded = np.load(GOLDEN / "mxfp4.npz")
    save_file({"x_blocks": recorded["blocks"], "x_scales": recorded["scales"]}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert dict(files) == {"x": recorded["numbers"].shape}
    np.testing.assert_array_equal(files.read("x"), recorded["numbers"])
    np.testing.assert_array_equal(files.read("x", 1), recorded["numbers"][1])


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_is_read_with_and_without_its_prefix_its_masks_and_a_copy_of_its_embedding(prefix, tmp_path):
    case = Case("gpt2", False, tmp_path)
    named = {prefix + name.removeprefix("transformer."): value for name, value in case.weights.items()}
    masks = {f"{prefix}h.{layer}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for layer in range(3)}
    tied = {"lm_head.weight": case.weights["transformer.wte.weight"]}
    save_file({**named, **masks, **tied}, case.source / "model.safetensors")
    imported = import_model(case.source, tmp_path / "again", [], nothing)
    assert len(imported.notes) == 3 + 1 + 1, "masks, the copy, and that there is no tokenizer"
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "again"), case.state)


@pytest.mark.parametrize("name", ["llama3", pytest.param("deepseek-v3-mtp", marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_read_exactly_and_written_back(name, dtype, tmp_path):
    """bfloat16 in, out and in again is the same to the bit; biases of the choice stay float32 in every file, as the library keeps them."""
    recorded = np.load(GOLDEN / f"{name}.npz")
    keys = [key.removeprefix("grad ") for key in recorded.files if key.startswith("grad ")]
    weights = {key: drawn(key, recorded[f"grad {key}"].shape).astype(np.float32 if "e_score" in key else dtype) for key in keys}
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder, kept in ((whole, {key: value.astype(np.float32) for key, value in weights.items()}), (half, weights)):
        folder.mkdir()
        (folder / "config.json").write_text(str(recorded["config"]))
        save_file(kept, folder / "model.safetensors")
        import_model(folder, tmp_path / f"{folder.name}-in", [], nothing)
    first = restored(tmp_path / "half-in")
    jax.tree.map(np.testing.assert_array_equal, first, restored(tmp_path / "whole-in"))
    if dtype == np.float16:
        return  # no export of ours has it
    export_model(tmp_path / "half-in", tmp_path / "out", "bfloat16", "5GB", None, nothing)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Imported from 'half' " in card and "optimizer" not in card, "settings of training are nobody's choice"
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in weights.items():
        np.testing.assert_array_equal(written[key].view(np.uint8), value.view(np.uint8), err_msg=key)
        assert written[key].dtype == value.dtype, key
    import_model(tmp_path / "out", tmp_path / "again", [], nothing)
    jax.tree.map(np.testing.assert_array_equal, first, restored(tmp_path / "again"))
