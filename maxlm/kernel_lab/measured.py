"""Rows of the kernel lab for this machine's chip: its kernels, timed against the alternatives, alternating in one run."""

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.base.console import Console
from maxlm.base.host import python_command
from maxlm.hardware.chips import chip_named, chip_of
from maxlm.kernel_lab.counted import table
from maxlm.kernel_lab.problems import PROBLEMS, Problem, shape_of
from maxlm.telemetry.formatting import percent

FIND_DEVICE = "import jax; print(jax.devices()[0].device_kind)"  # in a process of its own, since it claims the chip
ROUNDS = 7
REPEATS = 3  # of a candidate in its turn
TINY: dict[str, dict[str, Any]] = {  # shapes that a CPU can compute
    "attention": {"heads": 2, "groups": 1, "seq_len": 256},
    "gated_mlp": {"rows": 256, "d_model": 128, "d_ff": 256},
    "grouped_matmul": {"experts": 4, "d_in": 128, "d_out": 128, "rows": 256},
    "linear_cross_entropy": {"tokens": 256, "d_model": 128, "vocab_size": 1000},
}
NOTE = (
    "Measured on this machine: medians of forward and backward together, all heads of one sequence, compiled and run once before. Of peak: "
    "FLOPs that masks leave. Ratio: of the other's time to ours."
)


@dataclass(frozen=True)
class Row:
    """One implementation at one shape, forward and backward. `problem`: why it cannot run; the fields after it are then 0 or None."""

    operation: str
    shape: str
    chip: str
    implementation: str
    how: str = "measured"
    problem: str = ""
    milliseconds: float = 0.0
    tflops: float = 0.0  # TFLOP/s
    peak: float | None = None  # share of it
    temporaries_mib: float | None = None  # memory, operands and results not counted
    ratio: float | None = None  # of its median time to our median time


def present() -> str:
    """The name of the chip that jax finds here, in lower case; empty without one that is known."""
    done = subprocess.run(python_command("-c", FIND_DEVICE), capture_output=True, text=True, check=False)
    kind = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    chip = chip_of(kind[0]) if kind else None
    return chip.name.lower() if chip else ""


def rows(operation: str, name: str, chip_name: str, *, rounds: int = 0, tiny: bool = False) -> Iterator[Row]:
    """The implementation that is chosen here, and its alternatives, forward and backward; `tiny`: at a shape that a CPU can compute.

    One after the other in each of `rounds` (0: ROUNDS), so that all see the same machine. Without a chip there are no shares of its peak.
    """
    shape, chip = shape_of(operation, name), chip_named(chip_name) if chip_name else None
    if tiny:
        shape = replace(shape, **TINY[operation], **{name: 64 for name in ("documents", "window") if getattr(shape, name, None)})
    problem = PROBLEMS[operation](shape)
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("device",))):  # kernels are chosen for the current mesh
        operands = (*_normal(problem.sizes), *map(jnp.asarray, problem.given))
        programs, problems = _compile(problem, operands)
        medians = _time(programs, operands, rounds or ROUNDS)
    for candidate, seconds in medians.items():
        rate, memory = problem.flops / seconds, programs[candidate].memory_analysis()
        yield Row(
            operation,
            name,
            chip_name,
            candidate,
            milliseconds=1e3 * seconds,
            tflops=rate / 1e12,
            peak=rate / chip.peak_bf16_flops_per_device if chip else None,
            temporaries_mib=memory.temp_size_in_bytes / 2**20 if memory else None,
            ratio=seconds / medians["ours"] if "ours" in medians and candidate != "ours" else None,
        )
    for candidate, why in problems.items():
        yield Row(operation, name, chip_name, candidate, problem=why)


def _normal(sizes: Sequence[tuple[int, ...]]) -> Iterator[jax.Array]:
    """Normal random arrays, of deviation 1 over the root of the last dim but one, in bfloat16 (float32 on a CPU)."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    for key, size in zip(jax.random.split(jax.random.key(0), len(sizes)), sizes, strict=True):
        yield (jax.random.normal(key, size) * size[-2] ** -0.5).astype(dtype)


def _compile(problem: Problem, operands: Sequence[jax.Array]) -> tuple[dict[str, jax.stages.Compiled], dict[str, str]]:
    """(programs that have run once, why each of the other candidates cannot)."""
    programs, failed = {}, {}
    for name in problem.candidates:
        try:
            program = jax.jit(problem.step(name)).lower(*operands).compile()
            jax.block_until_ready(program(*operands))
            programs[name] = program
        except (ValueError, RuntimeError, NotImplementedError) as error:
            failed[name] = str(error).strip().splitlines()[0][:200]
    return programs, failed


def _time(programs: Mapping[str, Callable[..., Any]], operands: Sequence[jax.Array], rounds: int) -> dict[str, float]:
    """Median seconds of each program."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            for _ in range(REPEATS):
                out = program(*operands)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - began) / REPEATS)
    return {name: statistics.median(times) for name, times in seconds.items()}


def show(results: Sequence[Row], console: Console) -> None:
    """Print a table of the timings."""
    shown = table("shape", "kernel", "ms", "TFLOP/s", "of peak", "ratio")
    for row in results:
        figures = (f"{row.milliseconds:.3f}", f"{row.tflops:.1f}", percent(row.peak), "" if row.ratio is None else f"{row.ratio:.2f}")
        shown.add_row(row.shape, row.implementation, *((row.problem[:40],) if row.problem else figures))
    console.print(shown)
    console.print(NOTE, style="dim", highlight=False)
