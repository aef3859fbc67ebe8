"""Goodput of a job by simulation (maxlm/planning/goodput.py), with and without each tier of checkpoints.

    python tools/simulate_goodput.py --out docs/reliability.png
    python tools/simulate_goodput.py --chips 16384 --startup 10 --spares 0

Every default is an argument, with its source in docs/reliability.md.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maxlm.planning.goodput import LLAMA_CHIPS, MEMORY, PARTS, PEER, STORE, Job, Tier, simulate

SIZES = (1_000, 2_000, 5_000, 10_000, 16_384, 30_000, 50_000, 100_000)


def variants(job: Job, elastic_chips: int) -> dict[str, Job]:
    """The same job with one tier after another."""
    store, memory, peer = STORE.name, MEMORY.name, PEER.name
    tiers = {tier.name: tier for tier in job.tiers}

    def having(*names: str) -> tuple[Tier, ...]:
        return tuple(tiers[name] for name in names)

    return {
        "store alone": replace(job, tiers=having(store)),
        "+ memory": replace(job, tiers=having(store, memory)),
        "+ peer": replace(job, tiers=having(store, memory, peer)),
        "+ elastic": replace(job, tiers=having(store, memory, peer), elastic_chips=elastic_chips),
    }


def table_of(found: dict[str, dict[str, float]], title: str) -> Table:
    table = Table("tiers", "goodput", *PARTS[1:], title=title)
    for name, shares in found.items():
        table.add_row(name, f"{shares['useful']:.2%}", *(f"{shares[part]:.2%}" for part in PARTS[1:]))
    return table


def plot(curves: dict[str, list[float]], sizes: Sequence[int], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, goodputs in curves.items():
        axes.plot(sizes, [100 * value for value in goodputs], marker="o", markersize=3, label=name)
    axes.axvline(LLAMA_CHIPS, color="gray", linewidth=0.8, linestyle=":")
    axes.axhline(98, color="gray", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="chips", ylabel="goodput, %", title="Simulated goodput at Llama 3's failure rate")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    chips: Annotated[int, typer.Option(min=8, help="Chips of the job in the table.")] = LLAMA_CHIPS,
    startup: Annotated[float, typer.Option(min=0, help="Seconds from a restart to its first step, without the restore.")] = Job.startup_s,
    detect: Annotated[float, typer.Option(min=0, help="Seconds until a lost host is noticed.")] = Job.detect_host_s,
    step: Annotated[float, typer.Option(min=0.01, help="Seconds of a step.")] = Job.step_s,
    host_share: Annotated[float, typer.Option(min=0, max=1, help="Share of interruptions that lose the host.")] = Job.host_share,
    spares: Annotated[int, typer.Option(min=0, help="Idle hosts.")] = Job.spares,
    repair_hours: Annotated[float, typer.Option(min=0, help="Hours until a lost host is back.")] = Job.repair_s / 3600,
    store_block: Annotated[float, typer.Option(min=0, help="Seconds that training waits for a save to the store.")] = STORE.block_s,
    store_restore: Annotated[float, typer.Option(min=0, help="Seconds of a restore from the store.")] = STORE.restore_s,
    memory_block: Annotated[float, typer.Option(min=0, help="Seconds that it waits for a copy to memory, and to a peer.")] = MEMORY.block_s,
    elastic_chips: Annotated[int, typer.Option(min=1, help="Chips by which the mesh shrinks for a missing host.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Write curves over the number of chips, as a PNG.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate, and print goodput with and without each tier."""
    tiers = (
        replace(STORE, block_s=store_block, restore_s=store_restore),
        replace(MEMORY, block_s=memory_block),
        replace(PEER, block_s=memory_block),
    )
    job = Job(chips, tiers, host_share=host_share, step_s=step, detect_host_s=detect, startup_s=startup, spares=spares)
    job = replace(job, repair_s=3600 * repair_hours)
    found = {name: simulate(one) for name, one in variants(job, elastic_chips).items()}
    sizes = SIZES if out is not None or json_ else ()
    curves = {
        name: [simulate(replace(one, chips=size), interruptions=5000)["useful"] for size in sizes]
        for name, one in variants(job, elastic_chips).items()
    }
    if json_:
        print(json.dumps({"job": found, "chips": sizes, "curves": curves}))
        return
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table_of(found, f"{chips:,} chips, an interruption every {job.mtbf_s / 3600:.2f} h"))
    saves = {name: {tier: f"{seconds:g} s" for tier, seconds in one.intervals().items()} for name, one in variants(job, 128).items()}
    console.print(f"Between saves: {saves['+ peer']}; with the store alone {saves['store alone']}", highlight=False)
    if out is not None:
        plot(curves, sizes, out)
        sized = Table("chips", *curves, title="Goodput")
        for number, size in enumerate(sizes):
            sized.add_row(f"{size:,}", *(f"{curve[number]:.2%}" for curve in curves.values()))
        console.print(sized)


if __name__ == "__main__":
    typer.run(main)
