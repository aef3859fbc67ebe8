"""Simulate the goodput of a job: failures arrive at random, checkpoints of several tiers bring it back, lost hosts are replaced.

    python tools/simulate_goodput.py --out docs/reliability.png
    python tools/simulate_goodput.py --chips 16384 --startup 10 --spares 0

Goodput is the share of wall time that went into steps which count, at the speed of the whole job. Failures are exponential, at one rate a
chip. Part of them lose the host, and with it what lies in its memory; the others lose the process only. A failure ends the step on all
chips: it is detected, a spare host or a smaller mesh takes over, the program starts, and the newest state that is left is restored.
Failures during recovery start it again. Every default below is an argument, with its source in docs/reliability.md.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

DAY = 86400.0
# Llama 3 (arXiv 2407.21783, section 3.3.4): 466 interruptions in 54 days on 16,384 GPUs; about 78% of the unexpected ones are of hardware.
LLAMA_INTERRUPTIONS, LLAMA_DAYS, LLAMA_CHIPS = 466, 54, 16_384
LLAMA_RATE = LLAMA_INTERRUPTIONS / (LLAMA_DAYS * DAY * LLAMA_CHIPS)  # a chip and second
SIZES = (1_000, 2_000, 5_000, 10_000, 16_384, 30_000, 50_000, 100_000)
PARTS = ("useful", "saving", "redone", "detection", "startup", "restore", "no hosts", "fewer hosts", "mesh changes")


@dataclass(frozen=True)
class Tier:
    """A kind of checkpoint, in seconds: training waits `block_s` for a save, which is complete `write_s` later."""

    name: str
    block_s: float
    write_s: float
    restore_s: float
    survives_host: bool  # whether the copy of a lost host is left
    interval_s: float | None = None  # None: the best for its failures

    def interval(self, mtbf_s: float, step_s: float) -> float:
        """Seconds of training between saves, in whole steps: Young's sqrt(2 block MTBF), not less than the time that a save takes."""
        wanted = self.interval_s if self.interval_s is not None else max(math.sqrt(2 * self.block_s * mtbf_s), self.block_s + self.write_s)
        return max(1, round(wanted / step_s)) * step_s


STORE = Tier("store", block_s=1.0, write_s=60.0, restore_s=60.0, survives_host=True)
MEMORY = Tier("memory", block_s=0.05, write_s=2.0, restore_s=2.0, survives_host=False)
PEER = Tier("peer", block_s=0.05, write_s=5.0, restore_s=5.0, survives_host=True)


@dataclass(frozen=True)
class Job:
    """A job and its machine."""

    chips: int = LLAMA_CHIPS
    tiers: tuple[Tier, ...] = (STORE, MEMORY, PEER)
    rate: float = LLAMA_RATE  # of interruptions, a chip and second
    host_share: float = 0.78  # of interruptions that lose the host
    domain_share: float = 0.02  # of these that lose the host's peer as well
    chips_per_host: int = 8
    step_s: float = 6.0
    detect_process_s: float = 2.0
    detect_host_s: float = 30.0
    startup_s: float = 60.0  # from the decision to restart to the first step, without the restore
    spares: int = 16  # hosts that are idle until they are needed
    repair_s: float = 6 * 3600.0  # until a lost host is a spare
    elastic_chips: int | None = None  # by which the mesh shrinks if no spare is left; None: the job waits
    change_s: float = 60.0  # to grow back

    @property
    def mtbf_s(self) -> float:
        """Mean time between interruptions of the job."""
        return 1 / (self.rate * self.chips)

    def intervals(self) -> dict[str, float]:
        """Seconds of training between saves, for the failures from which no quicker tier brings the job back. A peer gets every copy that
        is made in memory.
        """
        found: dict[str, float] = {}
        for tier in self.tiers:
            quicker = [other for other in self.tiers if other.write_s < tier.write_s]
            process = 0.0 if quicker else 1 - self.host_share
            host = self.host_share * self.domain_share if any(other.survives_host for other in quicker) else self.host_share
            found[tier.name] = tier.interval(self.mtbf_s / max(process + host * tier.survives_host, 1e-6), self.step_s)
        if PEER.name in found and MEMORY.name in found:
            found[MEMORY.name] = found[PEER.name] = min(found[PEER.name], found[MEMORY.name])
        return found


class Simulation:
    """One history of a job."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._dice = job, random.Random(seed)
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._now = self._work = 0.0  # wall time; seconds of steps at full speed that count
        self._copied = dict.fromkeys((tier.name for tier in job.tiers), 0.0)  # work in the newest complete save
        self._intervals = job.intervals()
        self._block_share = sum(tier.block_s / self._intervals[tier.name] for tier in job.tiers)  # seconds of saving a second of steps
        self._repairs: list[float] = []  # times at which lost hosts are back

    def run(self, seconds: float) -> dict[str, float]:
        """Share of wall time by part, of `seconds` or a little more; they add up to 1."""
        while self._now < seconds:
            self._train(self._dice.expovariate(1 / self._job.mtbf_s))
            self._recover()
        wall = sum(self._seconds.values())
        return {part: value / wall for part, value in self._seconds.items()}

    def _train(self, until_failure: float) -> None:
        """Train for so long, in stretches between which the number of hosts changes."""
        first = self._work
        end = self._now + until_failure
        while self._now < end:
            missing = self._missing()
            stretch = min([end, *([min(self._repairs)] if missing and min(self._repairs) > self._now else [])]) - self._now
            steps = stretch / (1 + self._block_share)
            speed = 1 - self._share_lost(missing)
            self._spend("saving", stretch - steps)
            self._spend("useful", steps * speed)
            self._spend("fewer hosts", steps * (1 - speed))
            self._work += steps * speed
            self._repairs = [time for time in self._repairs if time > self._now]
            if missing and self._missing() < missing and self._now < end:
                self._spend("mesh changes", self._job.change_s)
                end += self._job.change_s
        for tier in self._job.tiers:
            interval, late = self._intervals[tier.name], tier.write_s / (1 + self._block_share)
            newest = (self._work - late) // interval * interval
            if newest > first:
                self._copied[tier.name] = newest

    def _recover(self) -> None:
        """From a failure to the first step; another failure meanwhile begins it anew."""
        job = self._job
        while True:
            host = self._dice.random() < job.host_share
            if host:
                self._repairs.append(self._now + job.repair_s)
                both = self._dice.random() < job.domain_share
                gone = [tier.name for tier in job.tiers if not tier.survives_host or (both and tier.name == PEER.name)]
                self._copied |= dict.fromkeys(gone, 0.0)  # until the next copy
            tier = max(job.tiers, key=lambda tier: (self._copied[tier.name], -tier.restore_s))
            parts = [
                ("detection", job.detect_host_s if host else job.detect_process_s),
                ("no hosts", self._wait_for_hosts()),
                ("startup", job.startup_s),
                ("restore", tier.restore_s),
            ]
            until_failure = self._dice.expovariate(1 / job.mtbf_s)
            for part, seconds in parts:
                spent = min(seconds, until_failure)
                self._spend(part, spent)
                until_failure -= spent
            if until_failure > 0:
                break
        lost = self._work - self._copied[tier.name]
        self._work -= lost
        self._seconds["useful"] -= lost
        self._seconds["redone"] += lost
        self._repairs = [time for time in self._repairs if time > self._now]

    def _missing(self) -> int:
        """Hosts that the job lacks."""
        return max(0, sum(time > self._now for time in self._repairs) - self._job.spares)

    def _share_lost(self, missing: int) -> float:
        """Share of the speed that is lost; at worst each missing host is in another part of the mesh."""
        job = self._job
        return 0.0 if job.elastic_chips is None else min(1.0, missing * max(job.elastic_chips, job.chips_per_host) / job.chips)

    def _wait_for_hosts(self) -> float:
        missing = self._missing()
        if not missing or self._job.elastic_chips is not None:
            return 0.0
        return sorted(time for time in self._repairs if time > self._now)[missing - 1] - self._now

    def _spend(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds
        self._now += seconds


def simulate(job: Job, *, interruptions: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Share of wall time by part, over about so many interruptions."""
    return Simulation(job, seed).run(interruptions * job.mtbf_s)


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
