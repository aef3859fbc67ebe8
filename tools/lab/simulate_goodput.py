"""Goodput of a job by simulation (maxlm/planning/goodput.py): with and without each tier of checkpoints, and what each assumption costs.

    python tools/lab/simulate_goodput.py --out docs/lab/reliability.png      # all tables and the curves of docs/lab/reliability.md
    python tools/lab/simulate_goodput.py --startup 10 --spares 0

Every default is an argument, with its source in docs/lab/reliability.md. Idle spares are paid for.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maxlm.planning.goodput import LLAMA_CHIPS, MEMORY, PARTS, PEER, STORE, TO_VERDICT_S, Job, Tier, simulate
from maxlm.supervision.limits import PHASES

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
        "no spares": replace(job, tiers=having(store, memory, peer), elastic_chips=elastic_chips, spares=0),
    }


def assumptions(job: Job, elastic_chips: int) -> dict[str, tuple[Job, bool]]:
    """The job with one assumption after another made true, and whether its spares are charged: with spares, and on smaller meshes."""
    old = replace(job, spares=16, hang_share=0.0)
    fixed = replace(old, hang_share=job.hang_share, detect_hang_s=PHASES["step"].first_s + TO_VERDICT_S)
    learned = replace(fixed, detect_hang_s=None)
    alone = replace(old, spares=0, elastic_chips=elastic_chips, wait_s=0.0, meet_s=0.0, compile_s=0.0)
    waiting = replace(alone, hang_share=job.hang_share, wait_s=job.wait_s, meet_s=job.meet_s)
    return {
        "16 spares for nothing, no hangs": (old, False),
        f"+ {job.hang_share:.0%} of failures hang, found after the fixed {PHASES['step'].first_s:g} s": (fixed, False),
        f"+ found by the learned limit of {learned.hang_s - TO_VERDICT_S:.0f} s": (learned, False),
        "+ the 16 spares are charged": (learned, True),
        f"+ {job.spare_hosts} spares": (replace(learned, spares=job.spares), True),
        "smaller mesh, no spares; nothing is waited for or compiled, no hangs": (alone, True),
        f"+ {job.hang_share:.0%} hang": (replace(alone, hang_share=job.hang_share), True),
        f"+ lost hosts are waited for, {job.wait_s:g} s": (waiting, True),
        f"+ each smaller mesh compiles for {job.compile_s:g} s": (replace(waiting, compile_s=job.compile_s, compiled=False), True),
        "+ only the first of each size compiles": (replace(waiting, compile_s=job.compile_s), True),
        "+ lost hosts are waited for 60 s": (replace(waiting, compile_s=job.compile_s, wait_s=60.0), True),
    }


def changes(job: Job) -> dict[str, Job]:
    """Other values of what the figures rest on."""
    store, memory, peer = (replace(tier) for tier in (STORE, MEMORY, PEER))
    slow = replace(store, block_s=10.0, write_s=300.0, restore_s=300.0)
    copies = [replace(tier, block_s=10 * tier.block_s, write_s=10 * tier.write_s) for tier in (memory, peer)]
    return {
        "nothing": job,
        **{f"start-up {seconds:g} s": replace(job, startup_s=seconds) for seconds in (7.5, 30, 120, 300)},
        "detection of a lost host and start-up 10 s each": replace(job, detect_host_s=10.0, startup_s=10.0),
        "detection of a lost host 60 s": replace(job, detect_host_s=60.0),
        **{f"{share:.0%} of failures hang": replace(job, hang_share=share) for share in (0.0, 0.2)},
        **{f"hangs are found after {seconds} s": replace(job, detect_hang_s=float(seconds)) for seconds in (311, 911, 3611)},
        **{f"{count} spares": replace(job, spares=count) for count in (16, 8, 4, 2, 0)},
        "copies in memory take ten times as long": replace(job, tiers=(store, *copies)),
        "saves to the store wait 10 s, complete after 300 s, as long as a restore": replace(job, tiers=(slow, memory, peer)),
        "a tenth of lost hosts take the peer along": replace(job, domain_share=0.1),
        "419 failures: without planned interruptions": replace(job, rate=job.rate * 419 / 466),
        "steps of 30 s": replace(job, step_s=30.0),
        "smaller meshes compile each time": replace(job, compiled=False),
        "lost hosts are waited for 60 s": replace(job, wait_s=60.0),
        "repairs take 24 h": replace(job, repair_s=24 * 3600.0),
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
    spares: Annotated[int | None, typer.Option(min=0, help="Idle hosts, which are paid for; by default as many as repairs need.")] = None,
    hang_share: Annotated[float, typer.Option(min=0, max=1, help="Share of interruptions that hang.")] = Job.hang_share,
    detect_hang: Annotated[float | None, typer.Option(min=0, help="Seconds until a hang has ended; by default the learned limit.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that a lost host is waited for (elastic.wait_s).")] = Job.wait_s,
    compilation: Annotated[float, typer.Option(min=0, help="Seconds to compile the step for a smaller mesh.")] = Job.compile_s,
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
    job = replace(job, repair_s=3600 * repair_hours, hang_share=hang_share, detect_hang_s=detect_hang, wait_s=wait, compile_s=compilation)
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
    if out is None:
        return
    plot(curves, sizes, out)
    sized = Table("chips", *curves, title="Goodput")
    for number, size in enumerate(sizes):
        sized.add_row(f"{size:,}", *(f"{curve[number]:.2%}" for curve in curves.values()))
    console.print(sized)
    truer = Table("assumption", "goodput", title="One assumption after another made true")
    for name, (one, charged) in assumptions(job, elastic_chips).items():
        truer.add_row(name, f"{simulate(one, interruptions=5000)['useful'] / (1 if charged else one.charged_share):.2%}")
    console.print(truer)
    other = Table("changed", "goodput", "with smaller meshes", "these without spares", title="Sensitivity")
    for name, one in changes(job).items():
        meshes = [one, replace(one, elastic_chips=elastic_chips), replace(one, elastic_chips=elastic_chips, spares=0)]
        other.add_row(name, *(f"{simulate(mesh, interruptions=5000)['useful']:.2%}" for mesh in meshes))
    console.print(other)


if __name__ == "__main__":
    typer.run(main)
