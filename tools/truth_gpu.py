"""Compare the analytic model's step times on GPUs with those of public runs, and write docs/lab/truth_gpu.md.

    python tools/truth_gpu.py          reads tools/truth_gpu_rows.yml

No factor is fitted to what was published: shares of peak are those of maxlm/cost/efficiency.py. The runs are of other programs (MaxText,
torchtitan, llm-foundry) with kernels of their own, so attention is charged as by kernels that keep scores on the chip.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from maxlm.config import load, rules
from maxlm.planning.analytic import Estimate
from maxlm.planning.layouts import LayoutSpace
from maxlm.planning.plan import analytic_model

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_name("truth_gpu_rows.yml")
PAGE = REPOSITORY / "docs" / "lab" / "truth_gpu.md"
BEGIN, END = "<!-- tools/truth_gpu.py writes from here -->", "<!-- to here -->"
AIM = 0.15  # of the published step time
COMMON = ("data.store=none", "train.steps=1", "train.loss_chunks=8")


@dataclass(frozen=True)
class Row:
    """A public run, its published seconds a step, and ours."""

    name: str
    topology: str
    published_s: float
    estimate: Estimate
    source: str
    note: str

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return sum(self.estimate.parts) / self.published_s - 1


def rows(path: Path = ROWS) -> Iterator[Row]:
    """Every run of the file, estimated. Raises UserError for settings that do not exist."""
    file = YAML(typ="safe", pure=True).load(path)
    for name, entry in file["rows"].items():
        yield _row(name, entry, file["groups"])


def _row(name: str, entry: Mapping[str, Any], groups: Mapping[str, list[str]]) -> Row:
    settings = list(_expanded(entry["settings"], groups))
    cluster: dict[str, Any] = {"topology": entry["topology"]}
    if "network_gbit_per_s" in entry:
        cluster["network_gbit_per_s"] = entry["network_gbit_per_s"]
    config = load(entry["config"], [*COMMON, *settings, f"cluster={json.dumps(cluster)}"]).config
    topology = rules.topology_of(config)
    model = analytic_model(config, topology, flash=True)
    published_s = entry.get("step_s") or config.tokens_per_step / (entry["tokens_per_s"] * topology.devices)
    return Row(
        name,
        topology.name,
        published_s,
        model.estimate(LayoutSpace(config, topology.devices).own()),
        entry["source"],
        entry.get("note", ""),
    )


def _expanded(settings: Sequence[str], groups: Mapping[str, list[str]]) -> Iterator[str]:
    """Settings, with the names of groups replaced by theirs."""
    for setting in settings:
        if setting in groups:
            yield from _expanded(groups[setting], groups)
        else:
            yield setting


def table(found: list[Row]) -> Iterator[str]:
    """Lines of the page: the comparison, the parts of each estimate, the notes."""
    good = sum(abs(row.error) <= AIM for row in found)
    yield f"{datetime.datetime.now(datetime.UTC).date()}, `python tools/truth_gpu.py`. **{good} of {len(found)} within 15%.**"
    yield ""
    yield "| row | GPUs | published s | predicted s | error | source |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        seconds = f"{row.published_s:.3f} | {sum(row.estimate.parts):.3f} | {row.error:+.1%}"
        yield f"| {row.name} | {row.topology} | {seconds} | {row.source} |"
    yield ""
    yield "| row | matmul s | attention s | memory s | exposed communication s | memory, GiB a GPU |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        figures = " | ".join(f"{part:.3f}" for part in row.estimate.parts[:4])
        yield f"| {row.name} | {figures} | {(row.estimate.state + row.estimate.temporaries) / 2**30:.1f} |"
    yield ""
    yield from (f"- {row.name}: {row.note}." for row in found if row.note)


def main() -> int:
    """Write the page's tables, and print them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = "\n".join(table(list(rows())))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
