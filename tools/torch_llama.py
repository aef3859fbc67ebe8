"""Llama in plain torch, with what makes it fast there: what `bench_step.py --against torch` compares with. Knows nothing of maxlm.

usage: python tools/torch_llama.py FOLDER    (bench_step.py fills the folder and reads the JSON line that is printed)

Precision is maxlm's: float32 master weights, moments, norms, rotary angles and loss; matrices, hidden states and attention in the compute
dtype. torch.compile sees loss and gradients as one graph; clipping and AdamW are torch's own fused ones.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint
except ImportError:
    sys.exit("torch is not installed")

# B batch, S sequence, D model width, H query heads, G key/value heads, K head dim, F feed-forward width, V vocabulary


def rotary_angles(model: dict[str, Any], seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [S, 1, K] in float32; scaling as Llama 3.1 has it (arXiv 2407.21783)."""
    dim, rope = model["head_dim"], model["rope"]
    plain = rope["theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = rope["scaling"]
    if scaling is not None:
        turns = scaling["original_seq_len"] * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        plain = keep * plain + (1 - keep) * plain / scaling["factor"]
    angle_SK = torch.arange(seq_len, dtype=torch.float32)[:, None] * plain.float().repeat(2)
    return angle_SK.cos()[:, None], angle_SK.sin()[:, None]


def rotate(x_BSHK: Tensor, cos_S1K: Tensor, sin_S1K: Tensor) -> Tensor:
    """Pairs (i, i + K/2) of every head, turned."""
    wide = x_BSHK.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_S1K + torch.cat((-second, first), dim=-1) * sin_S1K).to(x_BSHK.dtype)


class Linear(nn.Linear):
    """Without a bias; its float32 weight is cast to what it multiplies."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """In float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        width, hidden, self.head_dim = model["d_model"], model["d_ff"], model["head_dim"]
        heads, groups = model["n_heads"] * self.head_dim, model["n_kv_heads"] * self.head_dim
        self.attention_norm, self.mlp_norm = (RMSNorm(width, eps=model["norm_eps"]) for _ in range(2))
        self.query, self.key, self.value = Linear(width, heads), Linear(width, groups), Linear(width, groups)
        self.out = Linear(heads, width)
        self.gate, self.up, self.down = Linear(width, hidden), Linear(width, hidden), Linear(hidden, width)

    def forward(self, x_BSD: Tensor, cos_S1K: Tensor, sin_S1K: Tensor) -> Tensor:
        h_BSD = self.attention_norm(x_BSD)
        q_BSHK, k_BSGK, v_BSGK = (w(h_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.query, self.key, self.value))
        q_BSHK, k_BSGK = rotate(q_BSHK, cos_S1K, sin_S1K), rotate(k_BSGK, cos_S1K, sin_S1K)
        q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
        mixed_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.out(mixed_BHSK.transpose(1, 2).flatten(2))
        h_BSD = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h_BSD)) * self.up(h_BSD))


class Llama(nn.Module):
    """The decoder and its loss. `remat`: layers are computed again in the backward pass."""

    def __init__(self, model: dict[str, Any], seq_len: int, dtype: torch.dtype, *, remat: bool) -> None:
        super().__init__()
        self.dtype, self.remat = dtype, remat
        self.embedding = nn.Embedding(model["vocab_size"], model["d_model"])
        self.layers = nn.ModuleList(Block(model) for _ in range(model["n_layers"]))
        self.final_norm = RMSNorm(model["d_model"], eps=model["norm_eps"])
        self.output = None if model["tie_embeddings"] else nn.Embedding(model["vocab_size"], model["d_model"])
        cos_S1K, sin_S1K = rotary_angles(model, seq_len)
        self.register_buffer("cos_S1K", cos_S1K)
        self.register_buffer("sin_S1K", sin_S1K)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean negative log-likelihood, nats a token."""
        table_VD = self.embedding.weight.to(self.dtype)
        x_BSD = F.embedding(tokens_BS, table_VD)
        for layer in self.layers:
            again = (layer, x_BSD, self.cos_S1K, self.sin_S1K)
            x_BSD = checkpoint(*again, use_reentrant=False) if self.remat else layer(*again[1:])
        head_VD = table_VD if self.output is None else self.output.weight.to(self.dtype)
        logits_BSV = F.linear(self.final_norm(x_BSD), head_VD)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


WHOLE = {"embedding": "embedding_VD", "final_norm": "final_norm.scale_D", "output": "output_VD"}  # torch's name: maxlm's
OF_LAYERS = {f"{name}_norm": f"{name}_norm.scale_D" for name in ("attention", "mlp")}
OF_LAYERS |= {"query": "attention.query_DHK", "key": "attention.key_DGK", "value": "attention.value_DGK", "out": "attention.out_HKD"}
OF_LAYERS |= {"gate": "mlp.gate_DF", "up": "mlp.up_DF", "down": "mlp.down_FD"}


def load_weights(llama: Llama, folder: Path) -> None:
    """Weights as maxlm lays them out: layers stacked in front, and matrices [in, out] with heads apart, in torch [out, in]."""
    with torch.no_grad():
        for mine, theirs in WHOLE.items():
            if getattr(llama, mine) is not None:
                getattr(llama, mine).weight.copy_(torch.from_numpy(np.load(folder / f"{theirs}.npy")))
        for mine, theirs in OF_LAYERS.items():
            for layer, stacked in zip(llama.layers, np.load(folder / f"layers.0.{theirs}.npy"), strict=True):
                weight = layer.get_submodule(mine).weight
                weight.copy_(torch.from_numpy(stacked.reshape(weight.shape[::-1]).T))


def choose_attention(name: str) -> None:
    """Which of torch's kernels computes attention: "auto" leaves the choice to torch."""
    if name != "auto":
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


class Trainer:
    """A model with its optimizer, and one batch that it trains on again and again."""

    def __init__(self, settings: dict[str, Any], folder: Path, device: str) -> None:
        self.rates, self.clip = settings["rates"], settings["optimizer"]["clip_norm"]
        windows = torch.from_numpy(np.load(folder / "windows.npy")).long().to(device)
        self.tokens_BS, self.targets_BS = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        dtype = getattr(torch, settings["compute"])
        with torch.device(device):
            self.llama = Llama(settings["model"], self.tokens_BS.shape[1], dtype, remat=settings["remat"])
        load_weights(self.llama, folder / "weights")
        mode = settings["mode"]
        self.loss = self.llama if mode == "eager" else torch.compile(self.llama, mode=mode)
        optimizer = settings["optimizer"]
        matrices, scales = ([p for p in self.llama.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optimizer["weight_decay"]}, {"params": scales, "weight_decay": 0.0}],
            betas=(optimizer["beta1"], optimizer["beta2"]),
            eps=optimizer["eps"],
            fused=True,
        )

    def steps(self, start: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """(loss, gradient norm) of each of `count` updates; nothing waits for the device."""
        losses, norms = [], []
        for number in range(start, start + count):
            loss = self.loss(self.tokens_BS, self.targets_BS)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(self.llama.parameters(), self.clip or math.inf, foreach=True))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rates[number]
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().clone())  # a CUDA graph writes the next one over it
        return losses, norms


def main(folder: Path) -> dict[str, Any]:
    """The turn that `folder` describes."""
    settings = json.loads((folder / "torch.json").read_text(encoding="utf-8"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    choose_attention(settings["attention"])
    if settings["chunks"] > 1:  # Inductor cuts the graph around the logits itself
        from torch._inductor import config as inductor

        inductor.auto_chunker.enable = True
        inductor.auto_chunker.num_chunk = settings["chunks"]
    trainer = Trainer(settings, folder, device)
    began = time.perf_counter()
    first = trainer.steps(0, settings["warmup"])
    wait()
    warm = time.perf_counter()
    then = trainer.steps(settings["warmup"], settings["steps"])
    wait()
    took = time.perf_counter() - warm
    losses, norms = ([float(number) for number in (*a, *b)] for a, b in zip(first, then, strict=True))
    return {
        "step_s": took / settings["steps"],
        "warmup_s": warm - began,
        "losses": losses,
        "grad_norms": norms,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "version": torch.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
