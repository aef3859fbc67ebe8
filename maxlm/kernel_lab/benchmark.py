"""Time our kernels on this machine against the alternatives, alternating in one run.

- attention: what `maxlm.kernels` chooses, XLA, and on GPUs cuDNN (with a mask where documents are packed)
- gated_mlp: our kernels, and XLA's matmuls with what it fuses into them
- grouped_matmul: what is chosen, XLA's ragged dot, and one dense matmul of as many FLOPs
- cross_entropy: without logits, and with all of them in memory
Operands are normal random numbers, in bfloat16 (float32 on a CPU). FLOPs are useful ones: what masks leave, nothing computed again.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.hardware.chips import Chip
from maxlm.kernels import attention, gated_mlp, grouped_matmul, linear_cross_entropy
from maxlm.kernels.attention.shapes import SHAPES as ATTENTION
from maxlm.kernels.grouped_matmul.shapes import SHAPES as GROUPED
from maxlm.kernels.linear_cross_entropy.shapes import SHAPES as CROSS_ENTROPY
from maxlm.kernels.matmul.reference import gated_mlp_reference
from maxlm.kernels.matmul.shapes import SHAPES as MLP

REPEATS = 3  # of a candidate in its turn

S = TypeVar("S")


@dataclass(frozen=True)
class Benchmark:
    """Functions of the same operands, ours first, and the useful FLOPs of each. The first `differentiated` operands get gradients."""

    operation: str
    shape: str
    candidates: dict[str, Callable[..., jax.Array]]
    operands: tuple[jax.Array, ...]
    flops: float
    differentiated: int


def normal(*shapes: tuple[int, ...]) -> Iterator[jax.Array]:
    """Normal random arrays, of deviation 1 over the root of the last dim but one."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    for key, shape in zip(jax.random.split(jax.random.key(0), len(shapes)), shapes, strict=True):
        yield (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)


def _selected(shapes: Sequence[S], names: Sequence[str], *, tiny: bool) -> Iterator[S]:
    """The shapes of these names, all if there are none; the first two if `tiny`."""
    selected = [shape for shape in shapes if not names or getattr(shape, "name", "") in names]
    yield from selected[: 2 if tiny else None]


def attention_benchmarks(names: Sequence[str], *, tiny: bool) -> Iterator[Benchmark]:
    """Queries, keys and values get gradients."""
    for shape in _selected(ATTENTION, names, tiny=tiny):
        if tiny:
            shape = replace(shape, heads=2, groups=1, seq_len=256, documents=shape.documents and 64, window=shape.window and 64)
        segments_BS = jnp.asarray(shape.segments(1))
        scale = shape.head_dim**-0.5
        at = {
            "query_segments_BS": segments_BS,
            "key_segments_BT": segments_BS,
            "scale": scale,
            "mask": shape.mask,
            "softcap": shape.softcap,
        }
        sizes = [(1, shape.seq_len, heads, shape.head_dim) for heads in (shape.heads, shape.groups, shape.groups)]

        def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, at: dict[str, Any] = at, packed: bool = bool(shape.documents)) -> jax.Array:
            segments, window = at["query_segments_BS"], at["mask"].window
            mask = (segments[:, None, :, None] == segments[:, None, None, :]) if packed else None
            local = None if window is None else (window - 1, 0)
            options = {"scale": at["scale"], "is_causal": True, "mask": mask, "local_window_size": local}
            return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

        candidates: dict[str, Callable[..., jax.Array]] = {
            "ours": lambda q, k, v, at=at: attention(q, k, v, **at),
            "xla": lambda q, k, v, at=at: attention(q, k, v, **at, implementation="xla"),
        }
        if jax.default_backend() == "gpu" and shape.softcap is None:  # which it lacks
            candidates["cudnn"] = cudnn
        flops = 3.5 * 4 * shape.pairs(np.asarray(segments_BS)) * shape.heads * shape.head_dim
        yield Benchmark("attention", shape.name, candidates, tuple(x * shape.seq_len**0.5 for x in normal(*sizes)), flops, 3)


def mlp_benchmarks(names: Sequence[str], *, tiny: bool) -> Iterator[Benchmark]:
    """Input and weights get gradients."""
    for shape in _selected(MLP, names, tiny=tiny):
        rows, d_model, d_ff = (256, 128, 256) if tiny else (shape.rows, shape.d_model, shape.d_ff)
        operands = tuple(normal((1, rows, d_model), (d_model, d_ff), (d_model, d_ff), (d_ff, d_model)))
        candidates: dict[str, Callable[..., jax.Array]] = {
            "ours": gated_mlp,
            "xla": lambda x, gate, up, down: gated_mlp_reference(x, gate, up, down, "silu"),
        }
        yield Benchmark("gated_mlp", shape.name, candidates, operands, 18.0 * rows * d_model * d_ff, 4)


def grouped_benchmarks(names: Sequence[str], *, tiny: bool) -> Iterator[Benchmark]:
    """Rows and weights get gradients."""
    for shape in _selected(GROUPED, names, tiny=tiny):
        if tiny:
            shape = replace(shape, experts=4, d_in=128, d_out=128, rows=256)
        sizes_E = jnp.asarray(shape.group_sizes())
        x_MK, w_KG = normal((shape.rows, shape.d_in), (shape.d_in, shape.experts * shape.d_out))
        candidates: dict[str, Callable[..., jax.Array]] = {
            "ours": lambda x, w, sizes_E=sizes_E: grouped_matmul(x, w, sizes_E),
            "xla": lambda x, w, sizes_E=sizes_E: grouped_matmul(x, w, sizes_E, implementation="xla"),
            "dense": lambda x, w, wide=shape.d_out: x @ w[:, :wide],
        }
        yield Benchmark("grouped_matmul", shape.name, candidates, (x_MK, w_KG), 6.0 * shape.rows * shape.d_in * shape.d_out, 2)


def cross_entropy_benchmarks(names: Sequence[str], *, tiny: bool) -> Iterator[Benchmark]:
    """One shape, whatever the names. Input and table get gradients."""
    (shape,) = CROSS_ENTROPY
    tokens, width, vocab_size = (256, 128, 1000) if tiny else (shape.tokens, shape.d_model, shape.vocab_size)
    x_BSD, w_VD = normal((1, tokens, width), (vocab_size, width))
    targets_BS = jnp.asarray(np.random.default_rng(0).integers(0, vocab_size, (1, tokens)))
    candidates = {
        name: lambda x, w, chunks=chunks: linear_cross_entropy(x, w, targets_BS, jnp.ones((1, tokens)), chunks=chunks).total
        for name, chunks in {"ours": shape.chunks, "all logits": 1}.items()
    }
    yield Benchmark("cross_entropy", f"{tokens} x {vocab_size}", candidates, (x_BSD, w_VD), 6.0 * tokens * width * vocab_size, 2)


BENCHMARKS = {
    "attention": attention_benchmarks,
    "gated_mlp": mlp_benchmarks,
    "grouped_matmul": grouped_benchmarks,
    "cross_entropy": cross_entropy_benchmarks,
}


def measure(benchmark: Benchmark, rounds: int, chip: Chip | None) -> Iterator[dict[str, Any]]:
    """Rows of the table: each candidate forward and backward, one after the other in every round, so that all see the same machine.

    `chip`: of whose peak shares are taken, none where it is None. A ratio is of medians, the other seconds over ours.
    """
    programs, failed = {}, {}
    for name, candidate in benchmark.candidates.items():

        def loss(*operands: jax.Array, candidate: Callable[..., jax.Array] = candidate) -> jax.Array:
            return candidate(*operands).astype(jnp.float32).sum()

        try:
            lowered = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(benchmark.differentiated)))).lower(*benchmark.operands)
            programs[name] = lowered.compile()
            jax.block_until_ready(programs[name](*benchmark.operands))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            failed[name] = str(error).strip().splitlines()[0][:200]
            programs.pop(name, None)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            for _ in range(REPEATS):
                out = program(*benchmark.operands)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - began) / REPEATS)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        rate = benchmark.flops / median
        memory = programs[name].memory_analysis()
        yield {
            "operation": benchmark.operation,
            "shape": benchmark.shape,
            "kernel": name,
            "ms": 1e3 * median,
            "tflops": rate / 1e12,
            "of_peak": rate / chip.peak_bf16_flops_per_device if chip else None,
            "mib_beside": memory.temp_size_in_bytes / 2**20 if memory else None,
            "ratio": median / medians["ours"] if "ours" in medians and name != "ours" else None,
        }
    for name, why in failed.items():
        yield {"operation": benchmark.operation, "shape": benchmark.shape, "kernel": name, "failed": why}
