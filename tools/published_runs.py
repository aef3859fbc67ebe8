"""Copy the rows of docs/truth.md and docs/truth_gpu.md to maxlm/hardware/published_runs.py, from which estimates state their correction.

python tools/published_runs.py          after tools/truth.py or tools/truth_gpu.py; also writes the table of corrections in docs/truth.md
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from maxlm.hardware import topologies
from maxlm.hardware.chips import CHIPS
from maxlm.hardware.published_runs import PublishedRun, correction

REPOSITORY = Path(__file__).resolve().parents[1]
MODULE, PAGE = REPOSITORY / "maxlm" / "hardware" / "published_runs.py", REPOSITORY / "docs" / "truth.md"
MODULE_MARKS = "RUNS: tuple[PublishedRun, ...] = (\n", "    # end of rows\n"
PAGE_MARKS = "<!-- tools/published_runs.py writes from here -->\n", "<!-- to here -->\n"
FORMATS = {"fp8_full": "fp8", "int8": "int8"}  # MaxText's names
ROW = re.compile(r"\| (?P<name>[\w.-]+) \|(?: \w[\w-]*:[\dx]+ \|)? (?P<published>\d+\.\d+)[^|]*\| (?P<predicted>\d+\.\d+) \| [+-]")


def rows() -> list[PublishedRun]:
    """The rows of the two pages."""
    machines, found = _machines(), []
    for page in ("truth.md", "truth_gpu.md"):
        for line in (REPOSITORY / "docs" / page).read_text(encoding="utf-8").splitlines():
            if row := ROW.match(line):
                found.append(PublishedRun(row["name"], *machines[row["name"]], float(row["predicted"]), float(row["published"])))
    return found


def _machines() -> dict[str, tuple[str, str]]:
    """(chip, format) of each row, by its name."""
    yaml = YAML(typ="safe", pure=True)
    tpu, gpu = (yaml.load(Path(__file__).with_name(name)) for name in ("truth_rows.yml", "truth_gpu_rows.yml"))
    found = {name: (topologies.parse(entry["topology"]).chip.name, "bf16") for name, entry in gpu["rows"].items()}
    for entry in tpu["rows"]:
        settings = " ".join(tpu["settings"].get(one, one) for one in entry["settings"])
        quantization = re.search(r"(?<!\w)quantization=(\w+)", settings)
        format = FORMATS[quantization[1]] if quantization else "bf16"
        found[entry["name"]] = topologies.parse(entry["topology"]).chip.name, format
    return found


def python(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of the module."""
    for run in runs:
        yield f'    PublishedRun("{run.name}", "{run.chip}", "{run.format}", {run.predicted_s:.3f}, {run.published_s:.3f}),\n'


def table(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Lines of the table: the correction of each chip, and of the formats that have rows."""
    yield "| chip | by the rows of | rows | median | range | others |\n"
    yield "|---|---|---|---|---|---|\n"
    for chip in CHIPS:
        for format in ("bf16", "int8", "e4m3"):
            found = correction(chip, format, runs)
            if format == "bf16" or found.own:
                low, high = found.range
                name = chip.name if format == "bf16" else f"{chip.name} in {found.format}"
                figures = (
                    f"{len(found.ratios)} | {found.middle:.2f} | {low:.2f} to {high:.2f} | {', '.join(f'{one:.2f}' for one in found.apart)}"
                )
                yield f"| {name} | {found.basis or 'its own'} | {figures} |\n"


def between(text: str, marks: tuple[str, str], lines: Iterator[str]) -> str:
    """`text` with `lines` between the two marks."""
    (before, _, rest), end = text.partition(marks[0]), marks[1]
    return before + marks[0] + "".join(lines) + end + rest.partition(end)[2]


def main() -> int:
    """Write the module and the table, and print the table."""
    runs = rows()
    for path, marks, lines in ((MODULE, MODULE_MARKS, python(runs)), (PAGE, PAGE_MARKS, table(runs))):
        path.write_text(between(path.read_text(encoding="utf-8"), marks, lines), encoding="utf-8")
    sys.stdout.writelines(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
