"""Copy the rows of docs/truth.md and docs/truth_gpu.md to maxlm/hardware/published_runs.py, from which estimates state their correction.

    python tools/published_runs.py          after tools/truth.py or tools/truth_gpu.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from maxlm.hardware import topologies

REPOSITORY = Path(__file__).resolve().parents[1]
MODULE = REPOSITORY / "maxlm" / "hardware" / "published_runs.py"
BEGIN, END = "RUNS: tuple[PublishedRun, ...] = (\n", "    # end of rows\n"
FORMATS = {"fp8_full": "fp8", "int8": "int8"}  # MaxText's names
ROW = re.compile(r"\| (?P<name>[\w.-]+) \|(?: \w[\w-]*:[\dx]+ \|)? (?P<published>\d+\.\d+)[^|]*\| (?P<predicted>\d+\.\d+) \| [+-]")


def rows() -> Iterator[str]:
    """A line of Python for each row of the two pages."""
    machines = _machines()
    for page in ("truth.md", "truth_gpu.md"):
        for line in (REPOSITORY / "docs" / page).read_text(encoding="utf-8").splitlines():
            if row := ROW.match(line):
                chip, format = machines[row["name"]]
                yield f'    PublishedRun("{row["name"]}", "{chip}", "{format}", {row["predicted"]}, {row["published"]}),\n'


def _machines() -> dict[str, tuple[str, str]]:
    """(chip, format) of each row, by its name."""
    yaml = YAML(typ="safe", pure=True)
    tpu, gpu = (yaml.load(Path(__file__).with_name(name)) for name in ("truth_rows.yml", "truth_gpu_rows.yml"))
    entries = [(entry["name"], entry["topology"], " ".join(tpu["settings"].get(one, one) for one in entry["settings"])) for entry in tpu["rows"]]
    entries += [(name, entry["topology"], "") for name, entry in gpu["rows"].items()]
    quantization = {name: re.search(r"(?<!\w)quantization=(\w+)", settings) for name, _, settings in entries}
    formats = {name: "bf16" if found is None else FORMATS[found[1]] for name, found in quantization.items()}
    return {name: (topologies.parse(topology).chip.name, formats[name]) for name, topology, _ in entries}


def module(text: str) -> str:
    """`text` of the module, with the rows of today's pages."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "".join(rows()) + END + rest.partition(END)[2]


def main() -> int:
    """Write the module, and print its rows."""
    MODULE.write_text(module(MODULE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write("".join(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
