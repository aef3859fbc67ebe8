"""Compare our estimate of MaxText's own compiled steps with the step times that its public runs logged.

    python tools/truth.py FOLDER --maxtext-python ENV/bin/python

ENV is a virtual environment of its own, of Python 3.12, with MaxText in it: `pip install 'maxtext[tpu]==0.2.5'`. FOLDER/ROW.hlo, the
scheduled program of MaxText's step of each row of tools/truth_rows.yml, is made where it is missing, and docs/lab/truth.md is written. A
row without a program keeps its line of an earlier day, or is listed as not compiled yet. No factor is fitted to what was published here;
tools/published_runs.py fits the correction of estimates.
"""

import argparse
import datetime
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from jax.experimental import mesh_utils
from maxtext_schedule import schedule_missing
from ruamel.yaml import YAML

from maxlm.config import load
from maxlm.cost import step_cost
from maxlm.cost.mesh_links import links_of
from maxlm.cost.network import AxisLinks
from maxlm.hardware import topologies
from maxlm.hardware.topologies import Topology
from maxlm.hardware.xla_flags import VMEM
from maxlm.hlo import parser
from maxlm.models.counts import token_flops

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_name("truth_rows.yml")
UNTRAINED = ("data.store=none", "train.steps=1", "train.global_batch=1")
LAST = "## Correction by published runs"
COLUMNS, PART_COLUMNS = 7, 8  # of the page's two tables of rows
AIM = 0.15  # of the published step time


@dataclass(frozen=True)
class Row:
    """A public run: the keys of its entry in truth_rows.yml, which explains them."""

    name: str
    topology: str
    mesh: Mapping[str, int]
    settings: tuple[str, ...]
    flags: tuple[str, ...]
    source: str
    step_s: float | None = None
    tflops: float | None = None
    params: float = 0
    embedding: float = 0
    attention: int = 0
    experts: bool = False
    model: str = ""
    note: str = ""
    lacks: str = ""
    host_hidden: bool = False
    does_not_fit: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of the published step, stated or from its TFLOP/s."""
        if self.step_s is not None:
            return self.step_s
        assert self.tflops, f"{self.name} has neither step_s nor tflops"
        return (6e9 * self.params + 12 * self.attention * self.sequence) * self.tokens / (self.tflops * 1e12)

    @property
    def sequence(self) -> int:
        """Tokens of a sequence, MaxText's default if the settings name none."""
        return int(dict(setting.split("=", 1) for setting in self.settings).get("max_target_length", 2048))

    @property
    def tokens(self) -> float:
        """Tokens that a device trains on in a step."""
        return float(dict(setting.split("=", 1) for setting in self.settings)["per_device_batch_size"]) * self.sequence

    @property
    def published_mfu(self) -> float | None:
        """Model FLOPs of the published step over the bf16 peak, causal attention halved; None for a format of 8 bits, and where the row
        states neither `model` nor `params`.
        """
        if any(setting.startswith("quantization=") for setting in self.settings) or not (self.model or self.params):
            return None
        a_token = 6e9 * (self.params - self.embedding) + 6 * self.attention * self.sequence
        if self.model:
            a_token = _flops(self.model, self.sequence)
        return a_token * self.tokens / self.seconds / topologies.parse(self.topology).chip.peak_bf16_flops_per_device

    @property
    def compile_topology(self) -> str:
        """MaxText's name of the topology: Cloud TPU's, but for v5e, which that calls v5litepod."""
        return str(topologies.accelerator(topologies.parse(self.topology))).replace("v5litepod", "v5e")

    @property
    def to_compile(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(settings, flags) for MaxText's train_compile."""
        return (f"compile_topology={self.compile_topology}", *self.settings), self.flags


@dataclass(frozen=True)
class Result:
    """A row and the predicted cost of its program."""

    row: Row
    step: step_cost.StepCost

    @property
    def error(self) -> float:
        return self.step.total_s / self.row.seconds - 1

    @property
    def host_s(self) -> float:
        """Seconds the chip waits for copies to or from its host."""
        return sum(traffic.exposed_s for traffic in self.step.traffic if traffic.link == "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--maxtext-python", type=Path)
    given = parser.parse_args()
    rows = read_rows()
    schedule_missing(given.maxtext_python, {row.name: row.to_compile for row in rows}, given.folder)
    page = REPOSITORY / "docs" / "lab" / "truth.md"
    page.write_text(_page(rows, given.folder))
    sys.stdout.write(page.read_text())


def read_rows() -> list[Row]:
    """The rows of truth_rows.yml, with groups expanded, and flags that are refused today replaced."""
    document = YAML(typ="safe", pure=True).load(ROWS)
    return [_row(entry, document) for entry in document["rows"]]


def predict(row: Row, program: Path) -> step_cost.StepCost:
    """The step of `program`, on the row's mesh as MaxText lays it over the torus."""
    topology = topologies.parse(row.topology)
    return step_cost.estimate(read_program(row, program), topology.chip, row.mesh, dict(links(row, topology)))


def read_program(row: Row, program: Path) -> parser.Module:
    """The parsed program of a row."""
    return replace(parser.read(program.read_text()), raised_vmem=any(flag.startswith(f"--{VMEM[0].name}=") for flag in row.flags))


@cache
def _flops(model: str, sequence: int) -> float:
    """Model FLOPs of a token by a config of ours, as `maxlm compile` counts them."""
    name, *settings = model.split()
    config = load(f"models/{name}", [*settings, *UNTRAINED, f"data.seq_len={sequence}"]).config
    return token_flops(config.model, sequence)


def _row(entry: dict, document: dict) -> Row:
    texts = {key: tuple(word for name in entry[key] for word in document[key].get(name, name).split()) for key in ("settings", "flags")}
    swaps = {flag: new for flag, new in document["refused"].items() if flag in texts["flags"] and not entry["topology"].startswith("v5e")}
    kept = [flag for flag in texts["flags"] if flag not in swaps]
    new = [flag for flag in " ".join(swaps.values()).split() if flag not in kept]
    forced = ["--xla_tpu_no_crash_on_oom=true"] if "does_not_fit" in entry else []
    flags = (*kept, *new, *forced)
    whole = {"fsdp": topologies.parse(entry["topology"]).devices}
    return Row(**{"mesh": whole, **entry, "settings": texts["settings"], "flags": flags})


def links(row: Row, topology: Topology) -> Iterator[tuple[str, AxisLinks]]:
    """Links of each axis of the row's mesh, laid over the torus by jax's mesh_utils as MaxText lays it."""
    split = "allow_split_physical_axes=True" in row.settings
    sides, devices = topology.sides, _devices(topology)
    if "custom_mesh=hybrid_ring_64x4" in row.settings:  # the inner axis goes round squares of 2 x 2
        torus = mesh_utils.create_device_mesh(sides, devices)
        laid = torus.reshape(sides[0] // 2, 2, sides[1] // 2, 2).swapaxes(1, 2).reshape(tuple(row.mesh.values()))
    else:
        laid = mesh_utils.create_device_mesh(tuple(row.mesh.values()), devices, allow_split_physical_axes=split)
    for number, (axis, size) in enumerate(row.mesh.items()):
        line = laid.swapaxes(0, number).reshape(size, -1)[:, 0]
        yield axis, links_of([(0, device.coords) for device in line], topology)


@dataclass(frozen=True)
class Device:
    """Attributes of a jax device that mesh_utils reads."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def _devices(topology: Topology) -> list[Device]:
    """All devices of one slice, in jax's order: x fastest, cores of a chip side by side."""
    sides, cores = (*topology.sides, 1, 1)[:3], range(topology.chip.devices_per_chip)
    places = itertools.product(*(range(side) for side in reversed(sides)), cores)
    return [Device(number, (x, y, z), core, topology.chip.device_kinds[0]) for number, (z, y, x, core) in enumerate(places)]


def _page(rows: list[Row], folder: Path) -> str:
    results = [Result(row, predict(row, path)) for row in rows if (path := folder / f"{row.name}.hlo").exists()]
    done = {result.row.name for result in results}
    before = (REPOSITORY / "docs" / "lab" / "truth.md").read_text(encoding="utf-8").partition(LAST)[0].splitlines()
    lines = {**_before(before, COLUMNS), **{result.row.name: _line(result) for result in results}}
    parts_of = {**_before(before, PART_COLUMNS), **{result.row.name: _parts(result) for result in results}}
    head = ["| row | published s | predicted s | error | within 15% | published MFU | source |", "|---|---|---|---|---|---|---|"]
    shown = [row for row in rows if row.name in lines]
    earlier = [row.name for row in shown if row.name not in done]
    cells = {row.name: lines[row.name].split(" | ") for row in shown}
    errors = {name: float(cell[2]) / float(cell[1].split()[0]) - 1 for name, cell in cells.items()}
    outside = [row for row in shown if cells[row.name][4] == "no"]
    notes = {row.name: " ".join(_notes(row)) for row in shown}
    sections = {
        "Highest published MFU": [MFU, *best_mfu(rows)],
        "Where the predicted time goes": [*PARTS, *(parts_of[row.name] for row in rows if row.name in parts_of)],
        "Rows outside 15%": [f"- {row.name} ({errors[row.name]:+.0%}): {row.lacks or 'not explained yet'}" for row in outside],
        "Notes": [f"- {name}: {note}" for name, note in notes.items() if note],
        "Rows of an earlier day": [f"By the prices of then: {', '.join(earlier)}."] if earlier else [],
        "Rows not compiled yet": [f"- {row.name}: published {row.seconds:.3f} s" for row in rows if row.name not in lines],
    }
    parts = [
        INTRO.format(date=datetime.date.today(), within=len(shown) - len(outside), rows=len(shown)).rstrip(),
        "\n".join([*head, *(lines[row.name] for row in shown)]),
    ]
    parts += [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    parts.append(_kept())
    return "\n\n".join(parts) + "\n"


def _before(page: list[str], columns: int) -> dict[str, str]:
    """Lines of the page's table with so many columns, by the name of their row."""
    return {line.split(" | ")[0].removeprefix("| "): line for line in page if line.startswith("| ") and line.count(" | ") == columns - 1}


def _kept() -> str:
    """The last section of the page, on corrections: tools/published_runs.py writes its table."""
    page = (REPOSITORY / "docs" / "lab" / "truth.md").read_text(encoding="utf-8")
    return page[page.index(LAST) :].rstrip()


def _line(result: Result) -> str:
    row = result.row
    how = "" if row.step_s is not None else f" (from {row.tflops:.0f} TFLOP/s)"
    return (
        f"| {row.name} | {row.seconds:.3f}{how} | {result.step.total_s:.3f} | {result.error:+.1%} | "
        f"{'yes' if abs(result.error) <= AIM else 'no'} | {_percent(row.published_mfu)} | {row.source} |"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def best_mfu(rows: list[Row]) -> Iterator[str]:
    """Lines of the table of the highest published MFU of each chip."""
    yield "| chip | published MFU | as its page counts | row |"
    yield "|---|---|---|---|"
    best: dict[str, Row] = {}
    for row in rows:
        chip = row.topology.split(":")[0]
        if (row.published_mfu or 0) > (best[chip].published_mfu or 0 if chip in best else 0):
            best[chip] = row
    for chip, row in best.items():
        stated = row.tflops and row.tflops * 1e12 / topologies.parse(row.topology).chip.peak_bf16_flops
        yield f"| {chip} | {_percent(row.published_mfu)} | {_percent(stated)} | {row.name} |"


PARTS = (
    "| row | matmul s | of peak | attention s | memory s | exposed communication s | exposed host copies s | hidden s |",
    "|---|---|---|---|---|---|---|---|",
)


def _parts(result: Result) -> str:
    step, chip = result.step, topologies.parse(result.row.topology).chip
    share = step.matmul_flops / step.matmul_s / chip.peak_bf16_flops_per_device
    return (
        f"| {result.row.name} | {step.matmul_s:.3f} | {share:.0%} | {step.attention_s + step.kernel_s:.3f} | {step.memory_s:.3f} | "
        f"{step.exposed_s - result.host_s:.3f} | {result.host_s:.3f} | {step.hidden_s:.3f} |"
    )


def _notes(row: Row) -> Iterator[str]:
    if row.does_not_fit:
        yield f"Today's compiler refuses it ({row.does_not_fit}); the compile was forced."
    if row.note:
        yield row.note.strip()


MFU = """Rows in bf16: model FLOPs over the peak, as `maxlm compile` counts them, with causal attention halved and nothing that is computed
again. The pages that state TFLOP/s counted all of attention, and the embedding table.
"""
INTRO = """# Predicted and published step times

**The figure to rely on is the expected step**, which every report prints first: the estimate times the factor by which published runs were
slower, with a range that nine of ten of them lie in when each is predicted from the others. Below are the
[error by chip and kind of model](#correction-by-published-runs) and the [expected step of each recipe](#what-one-would-bet-on); first, the
rows themselves. [GPUs](truth_gpu.md) have a page of their own.

{date}. Each program is MaxText 0.2.5's own step, scheduled for the topology by its own stack (jax 0.12.0.1, libtpu 0.0.52) without
machine code ([how](../explanation/compiled-steps.md)), in half a minute, or in several where XLA compiles collectives for the SparseCore.
Settings and XLA flags are those of the published run (`tools/truth_rows.yml`). The estimator is `maxlm.cost.step_cost`;
where a run did not raise the limit of scoped VMEM, matmuls are charged what XLA states for such programs.
These estimates are of schedules alone, with no factor fitted
to published times: **{within} of {rows} are within 15%**.

    python tools/truth.py FOLDER --maxtext-python ENV/bin/python

The published runs are from 2024 to 2026, with the compilers of the time. Our compiler is from November 2026 and does not accept all of
their flags. Some runs fused their all-gathers with compute, which libtpu now accepts only on v5e; elsewhere the SparseCore gathers
instead, as in MaxText's current scripts. Where only TFLOP/s were published, seconds are computed from the FLOPs that MaxText counted at
the time: 6 a parameter, and full attention without halving it for causality. Experts are charged even loads.
"""


if __name__ == "__main__":
    main()
