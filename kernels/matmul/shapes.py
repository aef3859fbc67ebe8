"""Matmuls and gated feed-forward layers of real models, as a chip computes them, for tests, the kernel lab and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MlpShape:
    """`rows`: tokens of a device."""

    name: str
    rows: int
    d_model: int
    d_ff: int
    source: str


SHAPES = (
    MlpShape("llama-8b", 16384, 4096, 14336, "Llama 3.1 8B (arXiv 2407.21783, table 3), two sequences of 8,192"),
    MlpShape(
        "llama-8b-quarter", 8192, 4096, 4096, "the same, one sequence, and a width that XLA's estimates of machine code can be had of"
    ),
    MlpShape("llama-70b", 8192, 8192, 28672, "Llama 3.1 70B (the same table), one sequence of 8,192"),
    MlpShape("gemma-27b", 8192, 5376, 21504, "Gemma 3 27B (arXiv 2503.19786), one sequence of 8,192"),
)


@dataclass(frozen=True)
class MatmulShape:
    """x [rows, d_in] times a weight [d_in, d_out]; `rows`: tokens of a device."""

    name: str
    rows: int
    d_in: int
    d_out: int


MATMULS = (  # of the same models: queries and what follows attention, keys and values, what leaves the feed-forward layer
    MatmulShape("llama-8b-out", 16384, 4096, 4096),
    MatmulShape("llama-8b-key", 16384, 4096, 1024),
    MatmulShape("llama-8b-down", 16384, 14336, 4096),
    MatmulShape("llama-70b-out", 8192, 8192, 8192),
    MatmulShape("llama-70b-key", 8192, 8192, 1024),
    MatmulShape("llama-70b-down", 8192, 28672, 8192),
    MatmulShape("cube-4096", 4096, 4096, 4096),
    MatmulShape("qwen3-0.6b-up", 16384, 1024, 3072),
    MatmulShape("gpt2-up", 32768, 768, 3072),
    MatmulShape("gpt2-out", 32768, 768, 768),
)
