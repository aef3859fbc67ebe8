"""Final loss of a small model in every number format, against bfloat16: each format with several seeds, equal batches for equal seeds.

    python tools/lab/precision_quality.py FOLDER [--formats bf16 moments-int8] [--add NAME key=value ...] [--seeds 3] [--steps 2000]

A format is a list of settings. A cell is one format with one seed: it writes FOLDER/FORMAT-SEED.json when it is done, and is not run
again, so the study can be stopped at any time and continued. Every call writes FOLDER/table.md and FOLDER/table.json of the cells that are
there; `--table` runs nothing. The model is `runs/quickstart` with the changes below; its text is prepared in the current folder by the
first call.

XLA is told to keep every rounding that the program asks for (`xla_allow_excess_precision`): on a CPU it would compute bfloat16 in float32.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FLAGS = "--xla_allow_excess_precision=false --xla_cpu_multi_thread_eigen=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax  # noqa: E402 - it reads the environment when it is imported

from maxlm.config import UserError, load  # noqa: E402
from maxlm.config.schema import Config  # noqa: E402
from maxlm.data.prepare import prepare  # noqa: E402
from maxlm.parallel import build_mesh  # noqa: E402
from maxlm.run.open_data import open_data  # noqa: E402
from maxlm.training.loop import evaluate  # noqa: E402
from maxlm.training.program import build_program  # noqa: E402

RUN = "runs/quickstart"
MODEL = (
    *(
        "model.d_model=64",
        "model.d_ff=192",
        "data.seq_len=128",
        "train.global_batch=4",
        "train.eval_batches=64",
        "precision.compute=bfloat16",
    ),
    *("optimizer.name=adamw", "optimizer.peak_lr=3e-3", "mesh.fsdp=1"),
)
BASE = "bf16"
FORMATS: dict[str, list[str]] = {
    BASE: [],
    "int8": ["precision.matmul={format: int8}"],
    "fp8": ["precision.matmul={format: fp8}"],
    "mxfp8": ["precision.matmul={format: mxfp8}"],
    "moments-bf16": ["optimizer.state={moments: bfloat16}"],
    "moments-bf16-nearest": ["optimizer.state={moments: bfloat16, rounding: nearest}"],
    "moments-int8": ["optimizer.state={moments: int8}"],
    "moments-int8-stochastic": ["optimizer.state={moments: int8, rounding: stochastic}"],
    "factored": ["optimizer.state={second_moment: factored}"],
    "masters-split": ["optimizer.state={masters: split}"],
    "masters-split24": ["optimizer.state={masters: split24}"],
    "smallest": ["optimizer.state={moments: int8, second_moment: factored, masters: split24}"],
    "adafactor": ["optimizer.name=adafactor", "optimizer.adafactor={relative: false}"],
}
LAST = 0.05  # share of the steps whose mean loss is the training loss at the end
KEPT = 50  # points of the loss curve in a cell's file
BOUND = 0.0025  # of bfloat16's loss


def config_of(overrides: Sequence[str], seed: int, steps: int) -> Config:
    own = [f"train.steps={steps}", f"optimizer.warmup_steps={min(100, steps // 10)}", f"train.seed={seed}"]
    return load(RUN, [*MODEL, *own, *overrides]).config


def run_cell(config: Config) -> dict[str, Any]:
    """Train, and evaluate at the end: mean losses of every part of the run, of its last steps, and on held-out text."""
    program = build_program(config, build_mesh(config, jax.devices()[:1]))
    opened, steps = open_data(config), config.total_steps
    assert opened.held_out is not None, "the quickstart holds documents out"
    state, losses, began = program.init(), [], time.process_time()
    batches = opened.train.batches(0, program.batch_sharding, steps)
    try:
        with jax.set_mesh(program.mesh):
            for _ in range(steps):
                state, metrics = program.step(state, batches.get())
                losses.append(metrics.loss)
    finally:
        batches.close()
    values, part = [float(loss) for loss in losses], max(steps // KEPT, 1)
    held_out = evaluate(program, state, opened.held_out)
    return {
        "held_out": held_out,
        "train": statistics.fmean(values[-max(int(steps * LAST), 1) :]),
        "skipped": int(state.skipped),
        "curve": [round(statistics.fmean(values[start : start + part]), 5) for start in range(0, steps, part)],
        "cpu_s": round(time.process_time() - began, 1),
    }


def table(cells: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row a format: mean held-out loss over seeds, distance to bfloat16's with the same seeds, and whether that is within bounds."""
    base = {seed: cell["held_out"] for seed, cell in cells.get(BASE, {}).items()}
    noise = statistics.stdev(base.values()) if len(base) > 1 else None
    rows = []
    for name, found in cells.items():
        losses = {seed: cell["held_out"] for seed, cell in sorted(found.items())}
        good = [loss for loss in losses.values() if loss is not None and math.isfinite(loss)]
        row: dict[str, Any] = {"format": name, "settings": next(iter(found.values()))["settings"], "losses": losses, "diverged": None}
        row["diverged"] = len(losses) - len(good)
        row["mean"] = statistics.fmean(good) if good else None
        pairs = [loss - base[seed] for seed, loss in losses.items() if seed in base and loss in good]
        if pairs and not row["diverged"]:
            share = statistics.fmean(pairs) / statistics.fmean(base[seed] for seed in losses if seed in base)
            row |= {"difference": share, "spread": statistics.stdev(pairs) if len(pairs) > 1 else None}
            row |= {"within_bound": abs(share) <= BOUND, "within_noise": None if noise is None else abs(statistics.fmean(pairs)) <= noise}
        rows.append(row)
    return rows


def as_markdown(rows: Sequence[Mapping[str, Any]], noise: float | None, steps: int) -> str:
    lines = [f"Held-out loss after {steps:,} steps. A seed's noise (standard deviation of {BASE} between seeds): {_number(noise, 4)}."]
    lines += ["", f"| format | seeds | mean loss | against {BASE} | within {BOUND:.2%} | within noise |", "|---|---|---|---|---|---|"]
    for row in rows:
        difference = "diverged" if row["diverged"] else "" if row.get("difference") is None else f"{row['difference']:+.3%}"
        answers = (_answer(row.get(key)) for key in ("within_bound", "within_noise"))
        lines.append(f"| {row['format']} | {len(row['losses'])} | {_number(row['mean'], 4)} | {difference} | {' | '.join(answers)} |")
    return "\n".join([*lines, ""])


def _number(value: float | None, digits: int) -> str:
    return "not known" if value is None else f"{value:.{digits}f}"


def _answer(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def write_table(folder: Path, steps: int, order: Sequence[str]) -> str:
    """Write both tables of the cells of so many steps. Returns the text."""
    cells: dict[str, dict[int, Any]] = {}
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-[0-9]*.json"))]
    for cell in sorted((cell for cell in found if cell["steps"] == steps), key=lambda cell: [*order, cell["format"]].index(cell["format"])):
        cells.setdefault(cell["format"], {})[cell["seed"]] = cell
    base = [cell["held_out"] for cell in cells.get(BASE, {}).values()]
    noise, rows = statistics.stdev(base) if len(base) > 1 else None, table(cells)
    (folder / "table.json").write_text(json.dumps({"steps": steps, "noise": noise, "rows": rows}, indent=1), encoding="utf-8")
    text = as_markdown(rows, noise, steps)
    (folder / "table.md").write_text(text, encoding="utf-8")
    return text


def run(folder: Path, formats: Mapping[str, list[str]], seeds: int, steps: int) -> None:
    """Run the cells that are not there yet, seed by seed. A format that this maxlm refuses is left out, with a line."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare(config_of([], 0, steps).data)
    for seed in range(seeds):
        for name, overrides in formats.items():
            path = folder / f"{name}-{seed}.json"
            try:
                config = config_of(overrides, seed, steps)
            except UserError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            asked = {"format": name, "settings": overrides, "seed": seed, "steps": steps}
            if path.exists():
                done = json.loads(path.read_text(encoding="utf-8"))
                if {key: done[key] for key in asked} != asked:
                    sys.exit(f"{path} holds a cell of {done['steps']} steps with {done['settings']}: choose another folder, or remove it.")
                continue
            cell = asked | run_cell(config)
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(cell), encoding="utf-8")
            partial.rename(path)
            print(
                f"{name}, seed {seed}: held-out loss {cell['held_out']:.4f}, training {cell['train']:.4f}, {cell['cpu_s']:.0f} CPU seconds",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", nargs="+", metavar="NAME", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--add", nargs="+", action="append", default=[], metavar="NAME key=value", help="a format of your own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--table", action="store_true", help="only write the tables")
    given = parser.parse_args()
    known = FORMATS | {name: overrides for name, *overrides in given.add}
    names = given.formats or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no format {unknown[0]}: choose from {', '.join(known)}, or describe it with --add")
    if not given.table:
        run(
            given.folder,
            {name: known[name] for name in dict.fromkeys([*names, *(name for name, *_ in given.add)])},
            given.seeds,
            given.steps,
        )
    print(write_table(given.folder, given.steps, list(known)))


if __name__ == "__main__":
    main()
