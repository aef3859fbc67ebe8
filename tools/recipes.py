"""Compile every recipe under configs/runs for its machine, and write step time and memory to docs/recipes.md.

    python tools/recipes.py

Programs that `maxlm compile` or the soak test compiled before are read from the cache; the others take a minute or more each.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

from maxlm.config import load, rules  # noqa: E402 - jax reads the environment when it is imported
from maxlm.cost.verify import verify  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.planning.plan import scale_of  # noqa: E402
from maxlm.telemetry.formatting import count, duration  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = re.compile(r"(.+?)-(?:(\d+)x-)?((?:v\d|tpu)\w*-\d+)")
FAMILIES = ("v5e", "v5p", "v6e", "tpu7x")
HEAD = """# Recipes

Run one with `maxlm train runs/NAME`, or copy the file under configs/runs. {date}, jax {jax}: each training step was compiled ahead of
time for its machine. Step time and MFU (causal attention counted half) are the estimate that `maxlm compile` prints. Nothing was measured
on a chip; on v5p such estimates came out up to 8% below published runs ([truth.md](truth.md)). HBM is the compiler's figure for the
memory that a device needs.{missing}

| run | chips | tokens per update | step | MFU | HBM per device | complete run |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    import jax

    runs = sorted(path.stem for path in (REPOSITORY / "configs" / "runs").glob("*.yml") if RECIPE.fullmatch(path.stem))
    page = REPOSITORY / "docs" / "recipes.md"
    head = HEAD.format(date=datetime.date.today(), jax=jax.__version__, missing="".join(f"\nMissing: {run}." for run in _missing(runs)))
    page.write_text(head + "\n".join(map(_row, runs)) + "\n", encoding="utf-8")
    print(page.read_text(encoding="utf-8"))


def _missing(runs: Sequence[str]) -> Iterator[str]:
    """Shipped models without a recipe for one of the families that all should have."""
    shipped = {(match[1], match[3].split("-")[0]) for match in map(RECIPE.fullmatch, runs) if match}
    models = sorted(path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yml"))
    return (f"{model} on {family}" for model in models for family in FAMILIES if (model, family) not in shipped)


def _row(name: str) -> str:
    config = load(f"runs/{name}").config
    topology = rules.topology_of(config)
    verdict, scale = verify(config, topology), scale_of(config, topology, None)
    size = f"{verdict.needed / GIB:.1f} of {verdict.available / GIB:.1f} GiB"
    time = "does not fit | - " if not verdict.fits else f"{verdict.step_s:.2f} s | {scale.mfu(verdict.step_s):.1%}"
    whole = f"{duration(scale.seconds(verdict.step_s))} for {count(scale.tokens)} tokens" if verdict.fits else "-"
    return f"| `{name}` | {topology.chips:,} {topology.chip.name} | {config.tokens_per_step:,} | {time} | {size} | {whole} |"


if __name__ == "__main__":
    main()
