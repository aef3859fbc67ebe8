"""Our estimate of MaxText's own compiled steps, against the step times its public runs logged.

    python tools/truth.py FOLDER_OF_HLO

reads FOLDER_OF_HLO/ROW.hlo, the scheduled program of MaxText's step, for each row of ROWS and writes docs/truth.md. Rows whose file is
missing are listed as not yet done. No factor is fitted to what was published.
"""

import argparse
import datetime
from dataclasses import dataclass
from pathlib import Path

from maxlm.hardware import topologies
from maxlm.planning import cost, hlo
from maxlm.planning.collectives import AxisLinks

REPOSITORY = Path(__file__).resolve().parents[1]
AIM = 0.15  # of the published step time
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes, training/trillium"


@dataclass(frozen=True)
class Row:
    """A public run. `step_s` and `tflops` (per second and chip, by MaxText's formula) are None where only the issue's figure is known."""

    name: str
    topology: str
    setting: str
    source: str
    published: str
    step_s: float | None = None
    tflops: float | None = None


# Seconds and TFLOP/s are those of the log line that the recipe's page shows, so nothing is converted.
ROWS = (
    Row(
        "llama3.1-8b-v6e-8",
        "v6e:2x4",
        "batch 3 a chip, sequence 8192, layer input and q/k/v/out offloaded",
        f"{RECIPES}/Llama3.1-8B-MaxText/v6e-8",
        "45.0% MFU",
        3.443,
        413.433,
    ),
    Row(
        "llama3.1-8b-v6e-256",
        "v6e:16x16",
        "batch 4 a chip, sequence 8192, layer input and q/k/v/out offloaded",
        f"{RECIPES}/Llama3.1-8B-MaxText/v6e-256",
        "45.5% MFU",
        4.546,
        417.397,
    ),
    Row(
        "llama3.1-70b-v6e-256",
        "v6e:16x16",
        "batch 5 a chip, sequence 8192, layer input and q/k/v offloaded",
        f"{RECIPES}/Llama3.1-70B-MaxText/v6e-256",
        "50.3% MFU",
        42.656,
        462.297,
    ),
)
# Their exact settings were not looked up: no step time is claimed for them.
UNRESEARCHED = (
    "Llama-3.1-405B, v5p-1024 (315 TFLOP/s a chip)",
    "Llama-2-70B, 512 v5p chips, sequence 4096 (65.4%, attention in full)",
    "32B, v5p-128, sequence 2048 (71.5%, in full)",
    "64B, v5p-128, sequence 2048 (70.3%, in full)",
    "128B, v5p-256, sequence 2048 (68.7%, in full)",
    "16B, v5e-256 (61.1%, in full)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    page = REPOSITORY / "docs" / "truth.md"
    page.write_text(_page(folder))
    print(page.read_text())


def predict(row: Row, program: Path) -> cost.StepCost:
    """The step of `program`, MaxText's mesh being one fsdp axis over the whole slice (its other axes are of one device)."""
    topology = topologies.parse(row.topology)
    links = {"fsdp": AxisLinks(dims=len(topology.sides), wrapped=all(topology.wraps))}
    return cost.estimate(hlo.read(program.read_text()), topology.chip, {"fsdp": topology.devices}, links)


def _page(folder: Path) -> str:
    table, notes, missing = [], [], []
    for row in ROWS:
        program = folder / f"{row.name}.hlo"
        if not program.exists() or row.step_s is None or row.tflops is None:
            missing.append(f"{row.name}: {row.setting}; published {row.step_s} s ({row.published}), {row.source}")
            continue
        step = predict(row, program)
        error = step.total_s / row.step_s - 1
        mfu = row.tflops * 1e12 / topologies.parse(row.topology).chip.peak_bf16_flops_per_device
        verdict = "yes" if abs(error) <= AIM else "no"
        table.append(f"| {row.name} | {row.source} | {row.step_s:.3f} | {mfu:.1%} | {step.total_s:.3f} | {error:+.1%} | {verdict} |")
        notes.append(
            f"- {row.name} ({row.setting}): matmul {step.matmul_s:.3f} s, attention {step.attention_s:.3f}, other kernels "
            f"{step.kernel_s:.3f}, memory {step.memory_s:.3f}, exposed communication {step.exposed_s:.3f} (hidden {step.hidden_s:.3f}). "
            f"Charged by shape: {', '.join(step.assumed) or 'none'}; charged nothing: {', '.join(step.uncharged) or 'none'}; "
            f"loops counted once: {', '.join(step.unknown_loops) or 'none'}."
        )
    head = ["| row | source | published s | MFU | predicted s | error | within 15% |", "|---|---|---|---|---|---|---|"]
    parts = [INTRO.format(date=datetime.date.today()).rstrip()]
    parts += ["\n".join(head + table), "## Where the predicted time goes", "\n".join(notes)] if table else ["No row is done yet."]
    parts += ["## Not yet done", "\n".join(f"- {line}" for line in [*missing, *(f"{u}: settings not looked up" for u in UNRESEARCHED)])]
    return "\n\n".join(parts) + "\n"


INTRO = """# Truth: predicted against published

{date}. Each program is MaxText 0.2.5's own step, compiled by its own stack (jax 0.12.0.1, libtpu 0.0.51) for the topology, without a
TPU; the estimator is `maxlm.planning.cost`. The published runs used MaxText's tag tpu-recipes-v0.1.4 on JAX 0.6.1. Nothing is fitted.

    python tools/truth.py FOLDER_OF_HLO

Batch 3 has been quoted for 8B on v6e-256. The recipe's page says 4, and its log agrees (7,207 tokens/s x 4.546 s = 4 x 8,192), so 4 is
what the row needs.

What compiling showed (2026-11-21, written by hand, not by this tool):

- 8B on v6e-8 with the recipe's settings, but of its XLA flags only the VMEM limit (`--xla_tpu_scoped_vmem_limit_kib=98304`):
  refused, "the total memory required for HLO temporaries (32.92G) exceeds available HBM (31.24G)". The recipe's flags for host
  offloading were missing; whether they make it fit is not known.
- 8B on v6e-256 with batch 3, no XLA flags recorded and MaxText's attention blocks at their defaults, which is no published run
  and so no row:
  predicted 5.421 s. At the published tokens/s, batch 3 would take 3.410 s (24,576 / 7,207.3), so the estimate is 59% above it. Of the
  5.421 s, matmuls are 2.553 (1,302 TFLOP, 56% of peak), attention 0.707, memory 0.588, exposed communication 1.573, of which
  1.388 s is copies to and from the host. How much of the gap is the missing flags, the batch or the estimator is not known.
"""


if __name__ == "__main__":
    main()
