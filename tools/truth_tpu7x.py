"""Compare the analytic model's step times on tpu7x with those of MaxText's public runs, and write them to docs/lab/low_precision_speed.md.

    python tools/truth_tpu7x.py          reads tools/truth_tpu7x_rows.yml

Nothing is compiled and nothing is fitted to these estimates. The corrected seconds are the estimated ones times the factor that
`maxlm plan` states for the chip, format and kind of model; it rests on the same runs, but on their compiled programs (docs/lab/truth.md).
"""

import argparse
import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from truth_gpu import AIM, REPOSITORY, Row, rows

from maxlm.hardware.chips import chip_named
from maxlm.hardware.published_runs import correction

ROWS, PAGE = Path(__file__).with_name("truth_tpu7x_rows.yml"), REPOSITORY / "docs" / "lab" / "low_precision_speed.md"
BEGIN, END = "<!-- tools/truth_tpu7x.py writes from here -->", "<!-- to here -->"


def table(found: Sequence[Row]) -> Iterator[str]:
    """Lines of the page: each run with its estimate, then the ratios of both formats."""
    factors = {name: _factor(entry) for name, entry in _entries().items()}
    raw = sum(abs(row.error) <= AIM for row in found)
    corrected = sum(abs(factors[row.name] * (1 + row.error) - 1) <= AIM for row in found)
    yield (
        f"{datetime.datetime.now(datetime.UTC).date()}, `python tools/truth_tpu7x.py`. **{raw} of {len(found)} within 15%, corrected "
        f"{corrected}.**"
    )
    yield ""
    yield "| run, chips | published s | estimated s | error | corrected s | error | matmul | attention | memory | exposed |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in found:
        parts = row.estimate.parts
        seconds, exposed = sum(parts), sum(parts[3:])
        factor = factors[row.name]
        figures = f"{row.published_s:.2f} | {seconds:.2f} | {row.error:+.1%} | {factor * seconds:.2f} | {factor * (1 + row.error) - 1:+.1%}"
        yield f"| {row.name} | {figures} | {' | '.join(f'{part:.2f}' for part in (*parts[:3], exposed))} |"
    yield ""
    yield "| run, chips | published, fp8 over bf16 | estimated | error |"
    yield "|---|---|---|---|"
    for name, published, estimated in ratios(found):
        yield f"| {name} | {published:.2f} | {estimated:.2f} | {estimated / published - 1:+.1%} |"


def ratios(found: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """(run, published and estimated seconds in fp8 over those in bf16) of each pair."""
    by_name = {row.name: row for row in found}
    for name, entry in _entries().items():
        if other := entry.get("fp8_of"):
            fp8, bf16 = by_name[name], by_name[other]
            yield other, fp8.published_s / bf16.published_s, sum(fp8.estimate.parts) / sum(bf16.estimate.parts)


def _entries() -> dict[str, dict[str, Any]]:
    return YAML(typ="safe", pure=True).load(ROWS)["rows"]


def _factor(entry: Mapping[str, Any]) -> float:
    """The factor by which an estimate of the run is corrected."""
    return correction(chip_named("tpu7x"), "e4m3" if "fp8_of" in entry else "bf16", experts=entry.get("experts", False)).middle


def main() -> int:
    """Write the tables, and print them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = "\n".join(table(list(rows(ROWS))))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    sys.exit(main())
