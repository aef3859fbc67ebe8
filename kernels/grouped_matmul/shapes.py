"""Experts of real models, for tests, the kernel lab and benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupedShape:
    """One matmul of a layer's experts that a device holds: `rows` are tokens times the experts that each goes to.

    The matmul back to the model's width, by the transposes of such weights, is the same three kernels: its product is dx here.
    `skew`: None: every expert gets the same number of rows; s: rows are drawn, the n-th most popular expert with a share as n^-s.
    """

    name: str
    experts: int
    d_in: int
    d_out: int
    rows: int
    source: str
    skew: float | None = None

    def group_sizes(self, seed: int = 0) -> np.ndarray:
        """Rows of every expert, int32 [experts], in random order of popularity."""
        if self.skew is None:
            return np.full(self.experts, self.rows // self.experts, np.int32)
        random = np.random.default_rng(seed)
        shares = random.permutation(np.arange(1, self.experts + 1) ** -self.skew)
        return random.multinomial(self.rows, shares / shares.sum()).astype(np.int32)


_MIXTRAL = "Mixtral 8x7B (arXiv 2401.04088, table 1), top 2 of 8, 8,192 tokens"
_QWEN = "Qwen3-30B-A3B (Qwen/Qwen3-30B-A3B config.json), top 8 of 128, 8,192 tokens"
_DEEPSEEK = "DeepSeek-V3 (arXiv 2412.19437, section 4.2), 8 of 256 experts a device, 32,768 rows of tokens"
_LITE = "DeepSeek-V2-Lite (arXiv 2405.04434, appendix B), top 6 of 64, 8,192 tokens"
SHAPES = (
    GroupedShape("mixtral-up", 8, 4096, 14336, 16384, _MIXTRAL),
    GroupedShape("mixtral-up-drawn", 8, 4096, 14336, 16384, _MIXTRAL, skew=0.0),
    GroupedShape("mixtral-up-skewed", 8, 4096, 14336, 16384, _MIXTRAL, skew=1.0),
    GroupedShape("qwen3-up", 128, 2048, 768, 65536, _QWEN),
    GroupedShape("qwen3-up-drawn", 128, 2048, 768, 65536, _QWEN, skew=0.0),
    GroupedShape("qwen3-up-skewed", 128, 2048, 768, 65536, _QWEN, skew=1.0),
    GroupedShape("deepseek-v3-up", 8, 7168, 2048, 32768, _DEEPSEEK),
    GroupedShape("deepseek-v3-up-drawn", 8, 7168, 2048, 32768, _DEEPSEEK, skew=0.0),
    GroupedShape("deepseek-v2-lite-up", 64, 2048, 1408, 49152, _LITE),
    GroupedShape("deepseek-v2-lite-up-drawn", 64, 2048, 1408, 49152, _LITE, skew=0.0),
)
