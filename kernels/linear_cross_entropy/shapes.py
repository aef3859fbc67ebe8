"""Losses of real models, as much as a GPU computes at once, for tests, the kernel lab and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CrossEntropyShape:
    """`tokens` of a device; `chunks`: as few as keep temporaries under 1 GiB, not counting gradients."""

    name: str
    tokens: int
    d_model: int
    vocab_size: int
    chunks: int
    source: str


SHAPES = (CrossEntropyShape("llama-8b", 32768, 4096, 128256, 16, "Llama 3.1 8B (arXiv 2407.21783, table 3), four sequences of 8,192"),)
