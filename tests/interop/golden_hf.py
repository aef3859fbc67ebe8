"""Record small cases of the Hugging Face library, one a family: logits, loss and the gradient of every tensor.

Usage, in an environment of its own with torch, transformers and safetensors:
    python tests/interop/golden_hf.py [FOLDER] [CASE ...]
    python tests/interop/golden_hf.py --compare FOLDER     load what `maxlm export` made of the cases, and compare the logits
Weights are drawn from a seed by the name of each tensor (`drawn`), so that only results are stored; tests/interop replays them.
"""

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().with_name("golden")
SHAPE, SEQ_LEN, VOCAB = (2, 24), 24, 48

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_LONG = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0, 12.0]}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32}),
    "llama2": ("llama", {**_DENSE, "num_key_value_heads": 4, "head_dim": 6, "rope_parameters": _PLAIN}),
    "llama3": ("llama", {**_DENSE, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases-linear": ("llama", {**_DENSE, "rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {**_DENSE, "num_hidden_layers": 2, "rope_parameters": _PLAIN, "attention_bias": True}),
    "llama-exact-gelu": (
        "llama",
        {**_DENSE, "num_hidden_layers": 2, "rope_parameters": _PLAIN, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "gpt2-exact-gelu": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "activation_function": "gelu"},
    ),
    "mistral": ("mistral", {**_DENSE, "sliding_window": 7, "rope_parameters": _PLAIN}),
    "qwen2": ("qwen2", {**_DENSE, "hidden_size": 32, "rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_DENSE, "rope_parameters": _YARN}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **_DENSE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "rope_parameters": _PLAIN,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **_DENSE,
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "rope_parameters": _PLAIN,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_DENSE,
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _LOCAL],
            "rope_parameters": {_GLOBAL: {**_LINEAR, "rope_theta": 1000000.0}, _LOCAL: _PLAIN},
        },
    ),
    "mixtral": ("mixtral", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "rope_parameters": _PLAIN}),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_DENSE,
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_DENSE,
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": [_LOCAL, _GLOBAL] * 2,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    # Kimi K2's ramp begins and ends at the same number of rotations.
    "kimi-k2": (
        "deepseek_v3",
        {
            **_DENSE,
            **_LATENT,
            "num_hidden_layers": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**_YARN, "beta_fast": 1.0, "original_max_position_embeddings": 12, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    # The batch has 24 tokens a row: as many as the original length of RoPE, or more.
    "phi3": (
        "phi3",
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "sliding_window": 9,
            "pad_token_id": None,
            "original_max_position_embeddings": 24,
            "rope_parameters": {**_PLAIN, **_LONG, "rope_type": "longrope", "original_max_position_embeddings": 24},
        },
    ),
    "phi4-mini": (
        "phi3",
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [1.0, 4.0, 9.0],
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama-dynamic": (
        "llama",
        {
            **_DENSE,
            "num_hidden_layers": 2,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-dynamic-short": (
        "llama",
        {
            **_DENSE,
            "num_hidden_layers": 1,
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "granite": (
        "granite",
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
            "rope_parameters": _PLAIN,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "seed-oss": (
        "seed_oss",
        {**_DENSE, "num_hidden_layers": 2, "rope_parameters": _PLAIN, "attention_dropout": 0.0, "residual_dropout": 0.0, "pad_token_id": 0},
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            **_DENSE,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5},
        },
    ),
    "ernie": ("ernie4_5", {**_DENSE, "num_hidden_layers": 2, "rope_parameters": _PLAIN, "use_bias": True, "tie_word_embeddings": True}),
    # Part of each head is turned, and YaRN's factor, which is of that part alone, is a quotient.
    "stablelm": (
        "stablelm",
        {
            **{key: value for key, value in _DENSE.items() if key not in ("head_dim", "rms_norm_eps")},
            "hidden_size": 32,
            "use_qkv_bias": True,
            "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5, "mscale": 0.8, "mscale_all_dim": 0.3},
        },
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            **_DENSE,
            **_LATENT,
            "num_hidden_layers": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "gpt-oss-clamp": (
        "gpt_oss",
        {
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "num_hidden_layers": 2,
            "layer_types": [_LOCAL, _GLOBAL],
            "swiglu_limit": 0.4,
            "swiglu_alpha": 1.3,
            "rope_parameters": {**_YARN, "attention_factor": 1.4},
        },
    ),
    "deepseek-v3-mtp": (
        "deepseek_v3",
        {
            **_DENSE,
            **_LATENT,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_parameters": _PLAIN,
        },
    ),
}
WEIGHT_AHEAD = 0.3  # in the loss, of the mean over modules that predict further


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of a tensor, float32, a function of its name and shape alone."""
    name = re.sub(r"model\.layers\.\d+\.embed_tokens", "model.embed_tokens", name)  # copies, which modules that predict further hold
    name = re.sub(r"model\.layers\.\d+\.shared_head\.head", "lm_head", name)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(shape)
    if len(shape) > 1:
        return (values * 0.6 * shape[-1] ** -0.5).astype(np.float32)
    scale = name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight"))
    return (0.2 * values + (1.0 if scale else 0.0)).astype(np.float32)


def tokens() -> np.ndarray:
    """The batch of every case, without token 0, which pads in some families and then has no gradient."""
    return np.random.default_rng(7).integers(1, VOCAB, SHAPE)


def weights_ahead(weights: dict[str, np.ndarray], layers: int, modules: int) -> dict[str, np.ndarray]:
    """Weights of modules that predict further, as DeepSeek-V3 stores them: layers after the last, with tensors and copies of their own."""
    width, last = weights["lm_head.weight"].shape[1], f"model.layers.{layers - 1}."
    shapes = {key.removeprefix(last): value.shape for key, value in weights.items() if key.startswith(last)}
    shapes |= {
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
        "shared_head.norm.weight": (width,),
    }
    shapes |= dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), weights["lm_head.weight"].shape)
    names = [(f"model.layers.{layer}.{key}", shape) for layer in range(layers, layers + modules) for key, shape in shapes.items()]
    return {key: drawn(key, shape) for key, shape in names}


def modules_ahead(model: Any) -> Any:
    """The library's modules that predict further, from the folder that `model` was loaded from."""
    from transformers.modeling_layers import MtpModel

    model._keys_to_ignore_on_load_unexpected = [  # by which it finds their tensors; the model's own list is of the published depth
        rf"model\.layers\.{model.config.num_hidden_layers + module}\..*" for module in range(model.config.num_mtp_layers)
    ]
    return MtpModel.from_pretrained(model)


def run_ahead(model: Any, modules: Any, ids: Any) -> list[Any]:
    """Logits of every module: those of the first at place i read token i + 1, and what the model says of i."""
    import torch

    hidden, logits = model.model(input_ids=ids, use_cache=False).last_hidden_state, []
    for depth in range(1, len(modules.layers) + 1):
        positions = torch.arange(depth, ids.shape[1])[None].expand(len(ids), -1)
        hidden = modules.forward_layer(depth - 1, hidden[:, : ids.shape[1] - depth], positions, None, input_ids=ids[:, depth:])
        logits.append(model.lm_head(hidden))
    return logits


def grads_ahead(modules: Any, layers: int) -> dict[str, np.ndarray]:
    """Gradients of these modules by the names that their tensors have on disk; 0 for copies and biases of the choice."""
    named: dict[str, np.ndarray] = {}
    for key, parameter in modules.layers.named_parameters():
        module, _, rest = key.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        grad, name = parameter.grad.numpy(), f"model.layers.{layers + int(module)}.{rest}"
        if rest.startswith("mlp.experts.gate_up_proj"):
            halves = {"gate_proj": grad[:, : grad.shape[1] // 2], "up_proj": grad[:, grad.shape[1] // 2 :]}
        elif rest.startswith("mlp.experts.down_proj"):
            halves = {"down_proj": grad}
        else:
            named[name] = grad
            continue
        experts = name.rpartition(".")[0]
        named |= {f"{experts}.{expert}.{half}.weight": rows[expert] for half, rows in halves.items() for expert in range(len(rows))}
    return named


def record(name: str, folder: Path) -> None:
    """Run one case with the Hugging Face library and write its results to `folder`/`name`.npz."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = CASES[name]
    config = AutoConfig.for_model(model_type, **settings, attn_implementation="eager")
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    with tempfile.TemporaryDirectory() as place:
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        file = Path(place) / "model.safetensors"
        weights = {key: drawn(key, value.shape) for key, value in load_file(file).items()}
        layers, further = config.num_hidden_layers, settings.get("num_nextn_predict_layers", 0)
        main = set(weights)
        weights |= weights_ahead(weights, layers, further) if further else {}
        save_file(weights, file, metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager", dtype=torch.float32).train()
        ids = torch.tensor(tokens())
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        modules = modules_ahead(model).train() if further else None
        ahead = run_ahead(model, modules, ids) if further else []
        for depth, predicted in enumerate(ahead, 1):
            targets = ids[:, depth + 1 :].reshape(-1)
            nearer = torch.nn.functional.cross_entropy(predicted[:, :-1].reshape(-1, logits.shape[-1]), targets)
            loss = loss + WEIGHT_AHEAD / further * nearer
        loss.backward()
        settings = json.loads((Path(place) / "config.json").read_text())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(place)
        grads = {key: value for key, value in load_file(file).items() if key in main}
        if further:
            grads |= {key: np.zeros_like(value) for key, value in weights.items() if key not in main} | grads_ahead(modules, layers)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"grad {key}": value for key, value in grads.items() if key in weights}
    arrays |= {"config": json.dumps(settings), "logits": logits.detach().numpy(), "loss": loss.item()}
    arrays |= {f"logits ahead {depth}": predicted.detach().numpy() for depth, predicted in enumerate(ahead, 1)}
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    print(f"{name}: loss {loss.item():.6f}, {len(weights)} tensors, {sum(w.size for w in weights.values()):,} weights")


def record_mxfp4(folder: Path) -> None:
    """Record how the library turns blocks and scales of MXFP4 into numbers: two experts of 6 outputs and 64 inputs."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(3)
    blocks, scales = random.integers(0, 256, (2, 6, 2, 16), np.uint8), random.integers(120, 132, (2, 6, 2), np.uint8)
    numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.savez_compressed(folder / "mxfp4.npz", blocks=blocks, scales=scales, numbers=numbers.numpy())


def record_fp8(folder: Path) -> None:
    """Record how the library turns blocks of fp8 into numbers: a matrix of 12 outputs and 16 inputs in blocks of 4 by 8."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random = np.random.default_rng(5)
    numbers, scales = random.standard_normal((12, 16)).astype(np.float32) * 50, random.uniform(1e-4, 1e-2, (3, 2)).astype(np.float32)
    stored = torch.tensor(numbers).to(torch.float8_e4m3fn)
    read = Fp8Dequantize(None).convert({"weight": [stored], "weight_scale_inv": [torch.tensor(scales)]})["weight"]
    np.savez_compressed(folder / "fp8.npz", bits=stored.view(torch.uint8).numpy(), scales=scales, numbers=read.numpy())


def compare(name: str, folder: Path) -> float:
    """Load what `maxlm export` made of a recorded case, and return the largest relative difference of its logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    further = CASES[name][1].get("num_nextn_predict_layers", 0)
    of_modules = tuple(f"model.layers.{model.config.num_hidden_layers + module}." for module in range(further))
    wrong = {kind: sorted(key for key in names if not str(key).startswith(of_modules)) for kind, names in told.items()}
    assert not any(wrong.values()), f"{name}: {wrong}"
    recorded, ids = np.load(FOLDER / f"{name}.npz"), torch.tensor(tokens())
    with torch.no_grad():
        logits = {"logits": model.eval()(input_ids=ids, use_cache=False).logits}
        if further:
            ahead = run_ahead(model, modules_ahead(model).eval(), ids)
            logits |= {f"logits ahead {depth}": predicted for depth, predicted in enumerate(ahead, 1)}
    return max(float(np.abs(got.numpy() - recorded[key]).max() / np.abs(recorded[key]).max()) for key, got in logits.items())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:  # exports of the cases, each in a folder of its name
        for exported in sorted(Path(sys.argv[2]).iterdir()):
            print(f"{exported.name}: {compare(exported.name, exported):.1e}")
    else:
        for case in sys.argv[2:] or CASES:
            record(case, Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
        for record_numbers in (record_mxfp4, record_fp8):
            record_numbers(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
