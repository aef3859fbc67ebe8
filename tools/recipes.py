"""Compile every recipe under configs/runs for its machine, and write time, memory and price of its step to docs/lab/recipes.md, and a
sentence on each to docs/lab/truth.md.

    python tools/recipes.py [NAME ...]      compile those that changed since their figures, smallest first; Ctrl-C keeps what is done
    python tools/recipes.py --missing       compile only those without figures
    python tools/recipes.py --page          compile nothing: both pages from docs/lab/recipes.json

A recipe has changed if its config, the sources of maxlm and its kernels, jax or libtpu have. docs/lab/recipes.json keeps the figures of
each, with their day.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

from published_runs import between  # noqa: E402

from maxlm.base.atomic import write_text  # noqa: E402
from maxlm.base.errors import UserError  # noqa: E402
from maxlm.config import load, rules  # noqa: E402 - jax reads the environment when it is imported
from maxlm.config.schema import Config  # noqa: E402
from maxlm.cost.expected import EVEN_LOADS  # noqa: E402
from maxlm.cost.verify import Compiler, Verdict  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.hardware.prices import LIST_PRICES  # noqa: E402
from maxlm.hardware.published_runs import RUNS, PublishedRun  # noqa: E402
from maxlm.models import count_parameters  # noqa: E402
from maxlm.planning.plan import Scale, scale_of  # noqa: E402
from maxlm.planning.run_cost import Wanted, run_cost  # noqa: E402
from maxlm.run.consistency import code_digest  # noqa: E402
from maxlm.telemetry.formatting import count, duration, money, percent  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
FIGURES, PAGE, TRUTH = (REPOSITORY / "docs" / "lab" / name for name in ("recipes.json", "recipes.md", "truth.md"))
MARKS = "<!-- tools/recipes.py writes from here -->\n", "<!-- to here -->\n"
BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?!\w)")  # of parameters, in the name of a row
RECIPE = re.compile(r"(?P<model>.+?)-(?:\d+x-)?(?:v\d|tpu)\w*-\d+(?:-int8|-fp8)?")
TOKENS = 1e12  # that the last columns are of
HEAD = f"""# Recipes

Run one with `maxlm train runs/NAME`, or copy the file under configs/runs. Each training step was scheduled by XLA for its machine, without
machine code ([how](../explanation/compiled-steps.md)), on the day of the last column; rows of earlier days are of the code of then. Nothing
was measured on a chip.

    python tools/recipes.py          compiles again what has changed, and writes this page

| column | |
|---|---|
| step, MFU | expected, with the range: the estimate corrected by published runs ([truth.md](truth.md#correction-by-published-runs)) |
| `+` | no run of that chip and kind is published: others correct the estimate |
| MFU | causal attention counted half, as a share of the peak of the matmuls' format |
| schedule, its MFU | estimate of the scheduled program alone; `maxlm compile` prints both |
| tokens/s a chip | by the expected step |
| exposed | share of the estimate in which chips wait for each other or for their hosts |
| HBM | memory of a device: what the compiler allocates, of what there is |
| days, cost | of 1 T tokens, by the expected step, with failures; list price on demand ([cost.md](../how-to/cost.md)), which tpu7x lacks |

Models with experts (`deepseek`, `mixtral`, `qwen3-30b-a3b`): {EVEN_LOADS[0].lower()}{EVEN_LOADS[1:]}
`llama3-70b-v5e-64` and `llama3-405b-v5p-256` have state or layers' inputs in host memory: [tiers](../explanation/memory-tiers.md).
In int8 or fp8: [low_precision_speed.md](low_precision_speed.md).

| run | chips | tokens an update | step | MFU | schedule | its MFU | tokens/s a chip | exposed | HBM, GiB | days | cost | compiled |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
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
    write_text(TRUTH, between(TRUTH.read_text(encoding="utf-8"), MARKS, bets(figures)))
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
    """The text of docs/lab/recipes.md."""
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
        return f"{start}| does not fit | – | – | – | – | – | {size} | – | – | {figures['day']} |"
    return f"{start}| {' | '.join(_times(config, step_s, figures['exposed_s'], size))} | {figures['day']} |"


def _times(config: Config, step_s: float, exposed_s: float | None, size: str) -> Iterator[str]:
    topology = rules.topology_of(config)
    scale = scale_of(config, topology, TOKENS)
    expected_s, wanted = scale.expected_s(step_s), Wanted(LIST_PRICES)
    cost = run_cost(topology, config.memory_checkpoints, scale.seconds(step_s), expected_s, wanted)
    low, middle, high = map(duration, scale.expected_times(step_s).values())
    of_peak = "" if scale.peak_name == "bf16" else f" of {scale.peak_name}"
    yield f"**{middle}** ({low} to {high}{'' if scale.correction.own else '; +'})"
    yield f"**{scale.mfu(expected_s):.1%}**{of_peak}"
    yield duration(step_s)
    yield f"{scale.mfu(step_s):.1%}{of_peak}"
    yield count(config.tokens_per_step / expected_s / topology.chips)
    yield "–" if exposed_s is None else f"{exposed_s / step_s:.1%}"
    yield size
    yield f"{cost.days:.3g}"
    yield "–" if cost.money is None else money(cost.money, "USD")


def bets(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each recipe that fits: its expected step and MFU, their range, and the nearest published run."""
    for name in recipes():
        step_s = figures[name]["step_s"] if name in figures else None
        if step_s is not None:
            config = load(f"runs/{name}").config
            scale = scale_of(config, rules.topology_of(config), TOKENS)
            yield f"- {bet(name, scale, count_parameters(config.model), step_s)}\n"


def bet(name: str, scale: Scale, parameters: int, step_s: float) -> str:
    """The sentence of one recipe."""
    low, middle, high = map(duration, scale.expected_times(step_s).values())
    of_peak = "" if scale.peak_name == "bf16" else f" of {scale.peak_name}'s peak"
    what = f"`{name}`, {count(parameters)} on {scale.chips:,} {scale.chip.name} chips"
    mfu = f"{scale.mfu(scale.expected_s(step_s)):.0%} MFU**{of_peak}"
    said = f"{what}: **{middle} a step, {mfu}; between {low} and {high}; "
    run = nearest(name, scale, parameters)
    if run is None:
        return f"{said}no run on {scale.chip.name} is published."
    kind = "" if run.experts == scale.experts else " (with experts)" if run.experts else " (dense)"
    reached = f"at {percent(run.mfu)} MFU" if run.mfu is not None else f"{run.ratio:.2f} times its estimate"
    return f"{said}nearest published: {run.name}{kind}, {reached}."


def nearest(name: str, scale: Scale, parameters: int) -> PublishedRun | None:
    """The published run on the chip that is most like a recipe: experts or none, then the format, then the model or its size."""
    model = RECIPE.fullmatch(name)

    def unlike(run: PublishedRun) -> tuple[bool, bool, float]:
        size = BILLIONS.search(run.name)
        apart = abs(math.log(float(size[1]) * 1e9 / parameters)) if size else math.inf
        same = model is not None and run.name.startswith(f"{model['model']}-")
        return run.experts != scale.experts, run.format != scale.peak_name, 0.0 if same else apart

    return min((run for run in RUNS if run.chip == scale.chip.name), key=unlike, default=None)


if __name__ == "__main__":
    sys.exit(main())
