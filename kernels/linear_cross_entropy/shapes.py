"""Losses of real models, as much of one as a GPU computes at once: what tests, the kernel lab and benchmarks run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CrossEntropyShape:
    """`tokens` of a device; `chunks`: as few as leave its temporaries under 1 GiB beside the gradients, that of the weights in float32."""

    name: str
    tokens: int
    d_model: int
    vocab_size: int
    chunks: int
    source: str


SHAPES = (CrossEntropyShape("llama-8b", 32768, 4096, 128256, 16, "Llama 3.1 8B (arXiv 2407.21783, table 3), four sequences of 8,192"),)
