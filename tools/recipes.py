"""Compile every recipe under configs/runs for its machine, and write time, memory and price of its step to docs/recipes.md.

    python tools/recipes.py [NAME ...]      compile those that changed since their figures, smallest first; Ctrl-C keeps what is done
    python tools/recipes.py --missing       compile only those without figures
    python tools/recipes.py --page          compile nothing: the page from docs/recipes.json

A recipe has changed if its config, the sources of maxlm and its kernels, jax or libtpu have. docs/recipes.json keeps the figures of each,
with their day.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

from maxlm.base.atomic import write_text  # noqa: E402
from maxlm.base.errors import UserError  # noqa: E402
from maxlm.config import load, rules  # noqa: E402 - jax reads the environment when it is imported
from maxlm.config.schema import Config  # noqa: E402
from maxlm.cost.verify import Compiler, Verdict  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.hardware.prices import LIST_PRICES  # noqa: E402
from maxlm.models import count_parameters  # noqa: E402
from maxlm.planning.plan import scale_of  # noqa: E402
from maxlm.planning.run_cost import Wanted, run_cost  # noqa: E402
from maxlm.run.consistency import code_digest  # noqa: E402
from maxlm.telemetry.formatting import count, duration, money  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
FIGURES, PAGE = REPOSITORY / "docs" / "recipes.json", REPOSITORY / "docs" / "recipes.md"
RECIPE = re.compile(r".+?-(?:\d+x-)?(?:v\d|tpu)\w*-\d+(?:-int8|-fp8)?")
TOKENS = 1e12  # that the last columns are of
HEAD = """# Recipes

Run one with `maxlm train runs/NAME`, or copy the file under configs/runs. Each training step was scheduled by XLA for its machine, without
machine code ([schedule.md](schedule.md)), on the day of the last column; rows of earlier days are of the code of then. Nothing was measured
on a chip.

    python tools/recipes.py          compiles again what has changed, and writes this page

| column | |
|---|---|
| step | estimate of the scheduled program, as `maxlm compile` prints it |
| as published runs | step by the ratios of published runs ([truth.md](truth.md#what-estimates-say-of-it)); in parentheses: of others |
| MFU | of the estimate, causal attention counted half, as a share of the peak of the matmuls' format |
| exposed | share of the step in which chips wait for each other or for their hosts |
| HBM | memory of a device: what the compiler allocates, of what there is |
| days, cost | of 1 T tokens, by the median of published runs, with failures; list price on demand ([cost.md](cost.md)), which tpu7x lacks |

`llama3-70b-v5e-64` and `llama3-405b-v5p-256` have state or layers' inputs in host memory: [memory_tiers.md](memory_tiers.md).
In int8 or fp8: [low_precision_speed.md](low_precision_speed.md).

| run | chips | tokens per update | step | as published runs | tokens/s a chip | MFU | exposed | HBM, GiB | days | cost | compiled |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    runs = recipes()
    if unknown := sorted(set(given.names) - set(runs)):
        parser.error(f"{unknown[0]} is no recipe under configs/runs with a cluster in its name")
    figures = read()
    failed = 0
    chosen = [name for name in given.names or sorted(runs, key=_size) if _stale(name, figures.get(name), given.missing)]
    for number, name in enumerate([] if given.page else chosen, 1):
        sys.stderr.write(f"{name} ({number} of {len(chosen)}) ...\n")
        try:
            figures[name] = compiled(name)
        except UserError as error:
            failed += 1
            sys.stderr.write(f"{name}: {error}\n")
            continue
        except KeyboardInterrupt:
            break
        figures = {**read(), name: figures[name]}  # another one may have written meanwhile
        write_text(FIGURES, json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
        write_text(PAGE, page(figures))
    write_text(PAGE, page(figures))
    return 1 if failed else 0


def recipes() -> list[str]:
    """Names of the runs that name a model and a machine."""
    return sorted(path.stem for path in (REPOSITORY / "configs" / "runs").glob("*.yml") if RECIPE.fullmatch(path.stem))


def read() -> dict[str, dict[str, Any]]:
    """The figures of recipes that still exist."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    return {name: kept[name] for name in recipes() if name in kept}


def _size(name: str) -> tuple[int, int]:
    config = load(f"runs/{name}").config
    return count_parameters(config.model), rules.topology_of(config).chips


def _stale(name: str, figures: Mapping[str, Any] | None, missing: bool) -> bool:
    return figures is None or (not missing and figures["digest"] != digest(load(f"runs/{name}").config))


def digest(config: Config) -> str:
    """Fingerprint of what a compiled program depends on."""
    return hashlib.sha256(f"{_sources()} {config.model_dump_json()}".encode()).hexdigest()[:12]


@cache
def _sources() -> str:
    return f"{code_digest()} {_versions()}"


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def compiled(name: str) -> dict[str, Any]:
    """Compile a recipe in a process of its own. Raises UserError as the compiler does, and for a program with loops of unknown length."""
    config = load(f"runs/{name}").config
    with Compiler(machine_code=False) as compiler:
        return figures_of(config, compiler(config, rules.topology_of(config)).whole())


def figures_of(config: Config, verdict: Verdict) -> dict[str, Any]:
    """Seconds of a step and those exposed, None if it does not fit; bytes of a device; the day, versions and digest."""
    fits = verdict.parts is not None
    return {
        "day": str(datetime.datetime.now(datetime.UTC).date()),
        "versions": _versions(),
        "digest": digest(config),
        "step_s": verdict.step_s if fits else None,
        "exposed_s": sum(verdict.parts[3:]) if verdict.parts else None,
        "needed": verdict.needed,
        "available": verdict.available,
    }


def page(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of docs/recipes.md."""
    rows = [row(name, figures[name]) for name in recipes() if name in figures]
    missing = [name for name in recipes() if name not in figures]
    versions = sorted({one["versions"] for one in figures.values()})
    tail = [f"Compiled with {'; '.join(versions)}.", *(f"Not compiled yet: `{name}`." for name in missing)]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(tail) + "\n"


def row(name: str, figures: Mapping[str, Any]) -> str:
    """The line of a recipe."""
    config = load(f"runs/{name}").config
    topology = rules.topology_of(config)
    start = f"| `{name}` | {topology.chips:,} {topology.chip.name} | {config.tokens_per_step:,} "
    needed, available, step_s = (figures[key] for key in ("needed", "available", "step_s"))
    size = "–" if needed is None else f"{needed / GIB:.1f} of {available / GIB:.1f}"
    if step_s is None:
        return f"{start}| does not fit | – | – | – | – | {size} | – | – | {figures['day']} |"
    return f"{start}| {' | '.join(_times(config, step_s, figures['exposed_s'], size))} | {figures['day']} |"


def _times(config: Config, step_s: float, exposed_s: float | None, size: str) -> Iterator[str]:
    topology = rules.topology_of(config)
    scale = scale_of(config, topology, TOKENS)
    low, high = scale.correction.range
    basis = "" if scale.correction.own else f" (no run of {scale.correction.of})"
    wanted = Wanted(LIST_PRICES)
    cost = run_cost(topology, config.memory_checkpoints, scale.seconds(step_s), scale.expected_s(step_s), wanted)
    yield f"{duration(step_s)}"
    yield f"{duration(low * step_s)} to {duration(high * step_s)}{basis}"
    yield count(config.tokens_per_step / step_s / topology.chips)
    yield f"{scale.mfu(step_s):.1%}" + ("" if scale.peak_name == "bf16" else f" of {scale.peak_name}")
    yield "–" if exposed_s is None else f"{exposed_s / step_s:.1%}"
    yield size
    yield f"{cost.days:.3g}"
    yield "–" if cost.money is None else money(cost.money, "USD")


if __name__ == "__main__":
    sys.exit(main())
