"""Rows of the kernel lab for this machine's chip: its kernels, timed."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from maxlm.hardware.chips import chip_named, chip_of
from maxlm.kernel_lab.counted import table
from maxlm.telemetry.formatting import percent

FIND_DEVICE = "import jax; print(jax.devices()[0].device_kind)"  # in a process of its own, since it claims the chip
ROUNDS = 7
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
    ratio: float | None = None  # of its time to ours


def present() -> str:
    """The name of the chip that jax finds here, in lower case; empty without one that is known."""
    done = subprocess.run([sys.executable, "-c", FIND_DEVICE], capture_output=True, text=True, check=False)
    kind = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    chip = chip_of(kind[0]) if kind else None
    return chip.name.lower() if chip else ""


def rows(operation: str, shape: str, chip: str, *, tiny: bool = False) -> Iterator[Row]:
    """The implementation that is chosen here, and its alternatives; `tiny`: shapes that a CPU can compute."""
    import jax

    from maxlm.kernel_lab.benchmark import BENCHMARKS, measure

    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("device",))):  # kernels are chosen for the current mesh
        for benchmark in BENCHMARKS[operation]([shape], tiny=tiny):
            for result in measure(benchmark, ROUNDS, chip_named(chip)):
                at = (operation, benchmark.shape, chip, result["kernel"])
                if "failed" in result:
                    yield Row(*at, problem=result["failed"])
                else:
                    yield Row(*at, milliseconds=result["ms"], tflops=result["tflops"], peak=result["of_peak"], ratio=result["ratio"])


def show(results: Sequence[Row], console: Console) -> None:
    shown = table("shape", "kernel", "ms", "TFLOP/s", "of peak", "ratio")
    for row in results:
        figures = (f"{row.milliseconds:.3f}", f"{row.tflops:.1f}", percent(row.peak), "" if row.ratio is None else f"{row.ratio:.2f}")
        shown.add_row(row.shape, row.implementation, *((row.problem[:40],) if row.problem else figures))
    console.print(shown)
    console.print(NOTE, style="dim", highlight=False)
