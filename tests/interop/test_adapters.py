"""A PEFT adapter is exactly what separates the merged export from the export of the frozen model, tensor by tensor."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError
from maxlm.config.loader import dump
from maxlm.interop.exporting import export_model
from maxlm.interop.peft import export_adapter
from maxlm.models.adapters import leaf, put, stored
from maxlm.training.saved_run import open_run

LATENT = {"latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}, "n_kv_heads": 8}
GPT2 = {"activation": "gelu", "norm": "layernorm", "bias": "all", "n_kv_heads": 8, "tie_embeddings": True, "d_ff": 256}
MOE = {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_shared": 1, "n_dense": 1, "router": {"normalize": False}}
MODELS = {  # model, adapted matrices, modules that have an adapter, of which some with another rank
    "llama": ({}, None, 14, 0),
    "gpt2, queries and values in one tensor": (GPT2 | {"learned_positions": {"max_seq_len": 64}}, ["query", "value", "down"], 4, 2),
    "stablelm, a share of each head turned": ({"rope": {"share": 0.5}, "norm": "layernorm", "n_kv_heads": 8}, None, 14, 0),
    "phi, queries, keys and values in one tensor, gate and up in another": (
        {"rope": {"share": 0.5}, "n_kv_heads": 4},
        ["query", "value", "out", "up", "down"],
        8,
        2,
    ),
    "deepseek, rotary pairs": (LATENT | {"moe": MOE}, ["query", "out", "query_down", "kv_down", "kv"], 10, 0),
}


def save(folder, config, state):
    folder.mkdir()
    (folder / "config.yml").write_text(dump(config))
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, {})
    checkpoints.save(0, state, {})
    checkpoints.close()


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] if name == "llama" else []) for name in MODELS])
def runs(request, tmp_path):
    """(folder of a run with adapters, of the model that it froze; modules, those of another rank): random numbers, nothing is compiled."""
    model, matrices, *counts = MODELS[request.param]
    program = tiny_program(1, model={**model, "lora": {"rank": 3, "matrices": matrices}}, train={"start_from": {"path": "x"}})
    drawn = np.random.default_rng(0)

    def draw(shape):
        return jax.device_put(drawn.normal(0, 0.1, shape.shape).astype(np.float32), shape.sharding)

    abstract = program.abstract_state
    state = {"params": jax.tree.map(draw, abstract.params), "model_state": jax.tree.map(draw, abstract.model_state)}
    save(tmp_path / "run", program.config, state)
    plain = open_run(tmp_path / "run").config
    base = {"params": {}, "model_state": {}}
    for (entry, name), place in stored(program.config.model).items():
        put(base[entry], name, leaf(state[place.entry], place.name))
    save(tmp_path / "base", plain, base)
    return tmp_path / "run", tmp_path / "base", *counts


def test_it_is_the_difference_of_the_exports(runs, tmp_path):
    run, base, modules, others = runs
    for source, out in ((run, "merged"), (base, "frozen")):
        export_model(source, tmp_path / out, "float32", "5GB", None, lambda done, total: None)
    export_adapter(run, tmp_path / "adapter", None, "raw")
    merged, frozen = (load_file(tmp_path / out / "model.safetensors") for out in ("merged", "frozen"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (len(config["target_modules"]), len(config["rank_pattern"]), config["r"]) == (modules, others, 3)
    assert {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in adapter} == set(config["target_modules"])
    for name, wanted in merged.items():
        module = name.removesuffix(".weight")
        found = frozen[name]
        if module in config["target_modules"]:
            a, b = (adapter[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            rank, alpha = config["rank_pattern"].get(module, 3), config["alpha_pattern"].get(module, config["lora_alpha"])
            assert (len(a), b.shape[1]) == (rank, rank)
            found = found + alpha / rank * ((b @ a).T if config["fan_in_fan_out"] else b @ a)
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| started from | `x` |" in card and "LoRA of rank 3, merged" in card
    for folder in ("merged", "adapter"):
        modes = {path.name: path.stat().st_mode for path in (tmp_path / folder).iterdir()}
        assert len(set(modes.values())) == 1, f"whoever may read one file may read all: {modes}"


def test_what_peft_cannot_say_is_refused(tmp_path):
    cases = [({}, None, "without model.lora"), ({"moe": {**MOE, "n_shared": 0}}, {"rank": 2}, "adapts `gate` in a model with experts")]
    for number, (model, lora, said) in enumerate(cases):
        program = tiny_program(1, model={**model, "lora": lora}, train={"start_from": {"path": "x"}})
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "config.yml").write_text(dump(program.config))
        with pytest.raises(UserError, match=said):
            export_adapter(tmp_path / f"{number}", tmp_path / "out", None, "raw")
    assert not (tmp_path / "out").exists()
