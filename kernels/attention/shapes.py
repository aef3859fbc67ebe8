"""Attention of real models, at the lengths they are trained on, for tests, the kernel lab and benchmarks."""

from dataclasses import dataclass

import numpy as np

from maxlm.kernels.attention.mask import Mask


@dataclass(frozen=True)
class AttentionShape:
    """Heads and lengths of one layer. `documents`: mean tokens of those packed into a sequence, None for one that fills it."""

    name: str
    heads: int
    groups: int
    head_dim: int
    seq_len: int
    source: str
    window: int | None = None
    documents: int | None = None
    softcap: float | None = None

    @property
    def mask(self) -> Mask:
        """The attention mask."""
        return Mask(window=self.window)

    def segments(self, batch: int, seed: int = 0) -> np.ndarray:
        """Segment ids, int32 [batch, seq_len], the last document cut off: lengths are exponential, as of web text they roughly are."""
        if self.documents is None:
            return np.ones((batch, self.seq_len), np.int32)
        lengths = np.random.default_rng(seed).exponential(self.documents, (batch, self.seq_len)).astype(int) + 1
        ends = lengths.cumsum(axis=1)
        places = np.arange(self.seq_len)
        return np.stack([np.searchsorted(row, places, side="right") + 1 for row in ends]).astype(np.int32)

    def pairs(self, segments: np.ndarray) -> int:
        """(query, key) pairs that the mask leaves in these sequences."""
        total = 0
        for row in segments:
            _, lengths = np.unique(row, return_counts=True)
            for length in lengths.tolist():
                total += self.mask.attended_pairs(length)
        return total


_LLAMA = "Llama 3.1 8B (arXiv 2407.21783, table 3)"
SHAPES = (
    AttentionShape("llama-8k", 32, 8, 128, 8192, _LLAMA),
    AttentionShape("llama-8k-packed", 32, 8, 128, 8192, f"{_LLAMA}, documents of 2,048 tokens in the mean", documents=2048),
    *(AttentionShape(f"llama-{tokens // 1024}k", 32, 8, 128, tokens, _LLAMA) for tokens in (2048, 4096, 16384, 32768)),
    AttentionShape("llama1b-8k", 32, 8, 64, 8192, "Llama 3.2 1B (meta-llama/Llama-3.2-1B config.json)"),
    AttentionShape("gemma-local-8k", 8, 4, 256, 8192, "Gemma 3 4B (arXiv 2503.19786, table 1)", window=1024),
    AttentionShape("gemma2-27b-8k", 32, 16, 128, 8192, "Gemma 2 27B, its global layers (arXiv 2408.00118, table 1)", softcap=50.0),
    AttentionShape("mistral-8k", 32, 8, 128, 8192, "Mistral 7B (arXiv 2310.06825, table 1)", window=4096),
)
