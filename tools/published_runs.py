"""Copy the rows of two pages to maxlm/hardware/published_runs.toml, from which estimates are corrected.

    python tools/published_runs.py      after tools/truth.py or truth_gpu.py; also writes the tables of corrections in docs/lab/truth.md

Rows of TPUs are programs that were compiled: what the analytic model misses is no part of a correction of compiled steps.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from truth import read_rows

from maxlm.hardware import topologies
from maxlm.hardware.chips import CHIPS
from maxlm.hardware.published_runs import ROWS, PublishedRun, correction, left_out

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "lab" / "truth.md"
ROWS_MARKS = "run = [\n", "]\n"
PAGE_MARKS = "<!-- tools/published_runs.py writes from here -->\n", "<!-- to here -->\n"
PAGES = {"truth.md": "truth_rows.yml", "truth_gpu.md": "truth_gpu_rows.yml"}
FORMATS = {"fp8_full": "fp8", "int8": "int8"}  # MaxText's names
FORMAT = re.compile(r"(?<!\w)quantization=(?P<theirs>\w+)|precision.matmul={format: (?P<ours>\w+)")
ROW = re.compile(r"\| (?P<name>[\w.-]+) \|(?: \w[\w-]*:[\dx]+ \|)? (?P<published>\d+\.\d+)[^|]*\| (?P<predicted>\d+\.\d+) \| [+-]")
HOST = re.compile(r"\| (?P<name>[\w.-]+) \|(?: [\d.]+%? \|){5} (?P<host>[\d.]+) \| [\d.]+ \|$", re.MULTILINE)  # of its second table


def rows() -> list[PublishedRun]:
    """The rows of the pages."""
    found, mfus = [], {row.name: row.published_mfu for row in read_rows()}
    for page, file in PAGES.items():
        entries = _entries(YAML(typ="safe", pure=True).load(Path(__file__).with_name(file)))
        text = (REPOSITORY / "docs" / "lab" / page).read_text(encoding="utf-8")
        hosts = {row["name"]: float(row["host"]) for row in HOST.finditer(text)}
        for line in text.splitlines():
            if (row := ROW.match(line)) and (entry := entries.pop(row["name"], None)):  # its first table is of seconds
                chip = topologies.parse(entry["topology"]).chip.name
                seconds = float(row["predicted"]), float(row["published"]), hosts[row["name"]] if entry.get("host_hidden") else 0.0
                mfu = mfus.get(row["name"])
                kind = entry.get("experts", False), page != "truth.md", None if mfu is None else round(mfu, 3)
                found.append(PublishedRun(row["name"], chip, entry["format"], *seconds, *kind))
    return found


def _entries(file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries by name with their `format`."""
    entries = file["rows"] if isinstance(file["rows"], dict) else {entry["name"]: entry for entry in file["rows"]}
    groups = file["settings"] if "settings" in file else file["groups"]
    return {
        name: {**entry, "format": _format(" ".join(str(groups.get(one, one)) for one in entry["settings"]))}
        for name, entry in entries.items()
    }


def _format(settings: str) -> str:
    """Format of the matmuls, by MaxText's setting or by ours."""
    found = FORMAT.search(settings)
    return "bf16" if found is None else found["ours"] or FORMATS[found["theirs"]]


def toml(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of the file of rows."""
    for run in runs:
        texts = ", ".join(f'{name} = "{getattr(run, name)}"' for name in ("name", "chip", "format"))
        host = f", host_s = {run.host_s:.3f}" if run.host_s else ""
        flags = "".join(f", {name} = true" for name in ("experts", "modelled") if getattr(run, name))
        mfu = f", mfu = {run.mfu:.3f}" if run.mfu is not None else ""
        yield f"    {{{texts}, predicted_s = {run.predicted_s:.3f}, published_s = {run.published_s:.3f}{host}{flags}{mfu}}},\n"


def table(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of the tables: the correction of each chip and kind, and the error of each run that was left out."""
    yield "| estimates of | runs | factor | range | runs left out: within 10%, largest errors |\n"
    yield "|---|---|---|---|---|\n"
    missed = {run.name: left_out(tuple(runs), run.family, experts=run.experts)[run.name] for run in runs}
    for chip in CHIPS:
        for experts in (False, True):
            found = correction(chip, "bf16", experts=experts, runs=runs)
            errors = [missed[run.name] for run in runs if (run.chip, run.experts) == (chip.name, experts)]
            if errors or not experts:
                low, high = found.range
                checked = (
                    f"{sum(abs(error) <= 0.1 for error in errors)} of {len(errors)}, {min(errors):+.1%} to {max(errors):+.1%}"
                    if errors
                    else "none"
                )
                yield f"| {found.of} | {found.own} | {found.middle:.3f} | ±{found.error:.0%}: {low:.2f} to {high:.2f} | {checked} |\n"
    yield "\n| run | chip | published s | predicted without it s | error |\n|---|---|---|---|---|\n"
    for run in runs:
        error = missed[run.name]
        of = f"{'experts on ' if run.experts else ''}{run.chip}{'' if run.format == 'bf16' else f' in {run.format}'}"
        yield f"| {run.name} | {of} | {run.published_s:.3f} | {run.published_s / (1 + error):.3f} | {error:+.1%} |\n"


def between(text: str, marks: tuple[str, str], lines: Iterator[str]) -> str:
    """`text` with `lines` between the two marks."""
    (before, _, rest), end = text.partition(marks[0]), marks[1]
    return before + marks[0] + "".join(lines) + end + rest.partition(end)[2]


def main() -> int:
    """Write the rows and the table, and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = rows()
    for path, marks, lines in ((ROWS, ROWS_MARKS, toml(runs)), (PAGE, PAGE_MARKS, table(runs))):
        path.write_text(between(path.read_text(encoding="utf-8"), marks, lines), encoding="utf-8")
    sys.stdout.writelines(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
