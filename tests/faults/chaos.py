"""Break small runs in many ways, and check that each recovers by itself and ends as if nothing had happened.

    python tests/faults/chaos.py --list
    python tests/faults/chaos.py --runs 200 --seed 0 --hosts 4 --devices 2 --folder chaos
    python tests/faults/chaos.py --runs 5 --faults kill_trainer,cut_network --hosts 2 --devices 1
    python tests/faults/chaos.py --clean 10000

Hosts are network namespaces of this machine, started as srun would; so this needs root, iproute2 and a C compiler. Each trial starts a run
under `maxlm launch` on every host, injects one fault at a random step, and waits. It counts as recovered if every supervisor ended with 0,
and losses, batches and parameters are those of the undisturbed run, to the bit. Every trial is a line of FOLDER/trials.jsonl. Exit code 1
if a trial did not recover. Faults of parts that are not built are listed, and not run. With a folder that holds trials already, the same
command goes on where they stopped.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from chaos_faults import FAULTS, Fault
from chaos_trial import Chaos, Trial
from chaos_world import LIMIT_SECONDS, Shape
from hosts import can_make_hosts
from rich.console import Console
from rich.table import Table


def choose(names: str, shape: Shape) -> list[Fault]:
    """Faults that can be injected now, of those named or of all. Raises typer.BadParameter."""
    known = {fault.name: fault for fault in FAULTS}
    wanted = [name for name in names.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise typer.BadParameter(f"no such fault: {', '.join(unknown)}; --list shows all")
    faults = [known[name] for name in wanted]
    possible = [fault for fault in faults if not fault.missing() and fault.least_hosts <= shape.hosts]
    if not possible:
        raise typer.BadParameter(f"none of these faults can be injected on {shape.hosts} host(s): {', '.join(wanted)}")
    return possible


def plan(faults: Sequence[Fault], runs: int, seed: int) -> Iterator[tuple[Fault, str]]:
    """`runs` faults with the seed of each: every fault equally often, in random order."""
    dice = random.Random(seed)
    left: list[Fault] = []
    for number in range(runs):
        if not left:
            left = dice.sample(faults, len(faults))
        yield left.pop(), f"{seed}-{number}"


def done_before(folder: Path, faults: Sequence[Fault], runs: int, seed: int) -> list[Trial]:
    """Trials of a folder, the first of this plan. Raises typer.BadParameter if they are those of another plan."""
    path = folder / "trials.jsonl"
    trials = [Trial.from_dict(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    for number, (trial, (fault, name)) in enumerate(zip(trials, plan(faults, runs, seed), strict=False), start=1):
        if (trial.fault, trial.seed) != (fault.name, name):
            raise typer.BadParameter(
                f"{path}, line {number}: {trial.fault} with seed {trial.seed}, but this plan has {fault.name} with seed {name}; "
                "give the same faults, hosts and seed, or another folder"
            )
    return trials[:runs]


def table_of(trials: Sequence[Trial]) -> Table:
    table = Table("fault", "hosts", "trials", "recovered", "went back", "steps lost", "seconds to a new step", "culprit", title="Faults")
    for key in sorted({(trial.fault, trial.hosts, trial.devices) for trial in trials}):
        some = [trial for trial in trials if (trial.fault, trial.hosts, trial.devices) == key]
        named = [trial.culprit for trial in some if trial.culprit != "-"]
        table.add_row(
            key[0], f"{key[1]} x {key[2]}", str(len(some)), str(sum(trial.recovered for trial in some)),
            _range([trial.restarts for trial in some]), _range([trial.lost_steps for trial in some]),
            _range([trial.recovery_s for trial in some if trial.recovery_s is not None]),
            f"{named.count('right')} of {len(named)}" if named else "-",
        )  # fmt: skip
    return table


def _range(values: Sequence[float]) -> str:
    """Median, and the largest."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g}" + (f", at most {max(values):.3g}" if len(set(values)) > 1 else "")


def list_faults(console: Console) -> None:
    table = Table("fault", "hosts", "state", "what happens")
    for fault in FAULTS:
        table.add_row(
            fault.name, f"{fault.least_hosts}+", fault.missing() or "ready", ((fault.prepare or fault.inject).__doc__ or "").strip()
        )
    console.print(table)


CLEAN = {  # runs in which nothing is wrong
    "plain": (),
    "another seed, another schedule": ("train.seed=1", "optimizer.schedule=constant", "optimizer.peak_lr=3e-3"),
    "Muon": ("optimizer.name=muon", "train.seed=2"),
}


def run_clean(chaos: Chaos, shape: Shape, steps: int, console: Console) -> int:
    """Number of alarms and restarts in three runs of `steps` steps that nothing disturbs."""
    total = 0
    for number, (name, settings) in enumerate(CLEAN.items()):
        found = chaos.clean(shape, steps, (*settings, "checkpoint.every_steps=500"), str(number))
        console.print(f"{name}: {steps:,} steps on {shape}, {len(found)} false alarms", highlight=False)
        for event in found:
            console.print(f"  {event}", markup=False, highlight=False, soft_wrap=True)
        total += len(found)
    return total


def main(
    runs: Annotated[int, typer.Option(min=1, help="Trials.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of faults, hosts and moments.")] = 0,
    faults: Annotated[str, typer.Option(help="Faults, separated by commas; all that can be injected if not given.")] = "",
    hosts: Annotated[int, typer.Option(min=1, max=9, help="Hosts of the run.")] = 4,
    devices: Annotated[int, typer.Option(min=1, max=8, help="Devices of each host.")] = 2,
    minutes: Annotated[float, typer.Option(help="Begin no trial after this time.")] = float("inf"),
    clean: Annotated[int, typer.Option(help="Instead: count false alarms in three runs of so many steps.")] = 0,
    limit: Annotated[float, typer.Option(min=60, help="Seconds for a run to come to its fault, and then to its end.")] = LIMIT_SECONDS,
    folder: Annotated[Path | None, typer.Option(help="Working folder, which may exist; a temporary one if not given.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of all trials, also where all was right.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the faults and run nothing.")] = False,
) -> None:
    """Run the trials, print a table, and exit with 1 if one did not recover."""
    console = Console(width=None if Console().is_terminal else 160)
    if list_:
        list_faults(console)
        return
    if not can_make_hosts():
        raise typer.BadParameter("needs root, network namespaces and iproute2")
    shape = Shape(hosts, devices)
    chosen = [] if clean else choose(faults, shape)
    chaos = Chaos(folder or Path(tempfile.mkdtemp(prefix="maxlm-chaos-")), keep=keep, limit_s=limit)
    if clean:
        raise typer.Exit(1 if run_clean(chaos, shape, clean, console) else 0)
    until, trials = time.monotonic() + 60 * minutes, done_before(chaos.folder, chosen, runs, seed)
    for fault, name in islice(plan(chosen, runs, seed), len(trials), None):
        if time.monotonic() > until:
            break
        trials.append(trial := chaos.trial(fault, shape, name))
        with (chaos.folder / "trials.jsonl").open("a") as file:
            file.write(json.dumps(trial.to_dict()) + "\n")
        told = f"{len(trials):4} {fault.name} of {trial.victim} at step {trial.step}: {'; '.join(trial.problems) or 'recovered'}"
        detail = f"went back {trial.restarts} times, {trial.lost_steps} steps lost, {trial.recovery_s} s, culprit {trial.culprit}"
        console.print(f"{told}; {detail}; {trial.seconds:.0f} s in all", markup=False, highlight=False, soft_wrap=True)
    console.print(table_of(trials))
    failed = [trial for trial in trials if not trial.recovered]
    console.print(f"{len(trials)} trials, {len(failed)} not recovered; see {chaos.folder}", highlight=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
