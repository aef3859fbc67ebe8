"""One trial of chaos: an injected fault, what the run made of it, and whether that is what the undisturbed run made."""

import json
import re
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import Fault
from chaos_libc import build
from chaos_store import make_store
from chaos_world import SAVE_EVERY, STEPS, Shape, World
from small_run import exact


@dataclass
class Trial:
    """`culprit`: right, wrong, nobody, or - if there is nothing to name. `problems`: reasons that it does not count as recovered."""

    fault: str
    seed: str
    hosts: int
    devices: int
    victim: str = ""
    step: int = 0  # at which it was injected
    codes: dict[str, int | None] = field(default_factory=dict)
    restarts: int = 0
    lost_steps: int = 0
    recovery_s: float | None = None  # until the first new step
    culprit: str = "-"
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "recovered": self.recovered}


class Chaos:
    """Trials below `folder`, where store, undisturbed runs, and the trials that failed stay."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = (), *, keep: bool = False) -> None:
        """`settings`: of every run; `keep`: the trials that did not fail as well."""
        self.folder, self.settings, self._keep = folder.absolute(), settings, keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._library = build(self.folder)
        self._store = self.folder / "store"
        if not (self._store / "store.json").exists():
            shutil.rmtree(self._store, ignore_errors=True)
            make_store(self._store)

    def trial(self, fault: Fault, shape: Shape, seed: str) -> Trial:
        """Start a run, inject `fault`, and judge the end. Its folder stays if it failed."""
        folder, began = self.folder / f"{fault.name}-{seed}", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        found = Trial(fault.name, seed, shape.hosts, shape.devices)
        reference = self.undisturbed(shape)
        with self._world(folder, shape, f"{fault.name} {seed}", disks=fault.disks) as world:
            found.victim = world.victim
            at = fault.least_step + world.dice.randrange(2 * SAVE_EVERY)
            if world.until(lambda: world.progress.step >= at and _saved(world)):
                found.step, injected = world.progress.step, time.monotonic()
                fault.inject(world)
                world.until(lambda: False)
                found.lost_steps = world.progress.lost_after(injected)
                seconds = world.progress.seconds_to_new_step(injected)
                found.recovery_s = None if seconds is None else round(seconds, 2)
                found.restarts = len(world.progress.restores)
                found.culprit = culprit_of(fault, world)
            else:
                found.problems.append(f"step {at} and a checkpoint never came")
            found.codes = {name: process.poll() for name, process in world.run.processes.items()}
        found.problems += _problems(found, folder, fault, reference)
        found.seconds = round(time.monotonic() - began, 1)
        if found.recovered and not self._keep:
            shutil.rmtree(folder)
        return found

    def undisturbed(self, shape: Shape) -> dict[str, Any]:
        """Losses and digests of the run that nothing disturbs; computed once."""
        path = self.folder / f"undisturbed-{shape.hosts}x{shape.devices}.json"
        if not path.exists():
            folder = self.folder / f"undisturbed-{shape.hosts}x{shape.devices}"
            shutil.rmtree(folder, ignore_errors=True)
            with self._world(folder, shape, "undisturbed") as world:
                world.until(lambda: False)
            path.write_text(json.dumps(_result(folder / "runs")))
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def _world(self, folder: Path, shape: Shape, seed: str, *settings: str, disks: tuple[str, ...] = ()) -> World:
        return World(folder, shape, seed, self._library, self._store, *self.settings, *settings, disks=disks)


def culprit_of(fault: Fault, world: World) -> str:
    """Whether the right one was named. Hosts that were named as lost are counted: a host that is cut off blames the others."""
    if not fault.named:
        return "-"
    said = world.said()
    accused = Counter(re.findall(r"lost: (host\d+) \(process", said))
    most = {name for name, count in accused.items() if count == max(accused.values())}
    accepted = {world.victim} | (set(world.hosts.names) if fault.either_end and world.shape.hosts == 2 else set())
    if most and not most & accepted:
        return "wrong"
    return "right" if any(re.search(fault.named.format(victim=name), said) for name in accepted) else "nobody"


def _saved(world: World) -> bool:
    folder = world.checkpoints()
    return folder.is_dir() and any(one.name.isdigit() for one in folder.iterdir())


def _problems(found: Trial, folder: Path, fault: Fault, reference: dict[str, Any]) -> list[str]:
    problems = [f"{name} ended with {code}" for name, code in found.codes.items() if code != 0]
    runs = folder / ("runs-kept" if "runs" in fault.disks else "runs")
    try:
        result = _result(runs)
    except (OSError, ValueError, KeyError) as error:
        return [*problems, f"no result: {error}"]
    return problems + [f"{name} differ from those of the undisturbed run" for name, value in reference.items() if result[name] != value]


def _result(runs: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (runs / "small" / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((runs / "small" / "checkpoints" / str(STEPS) / "manifest" / "manifest.json").read_text())
    return {"losses": [list(row) for row in exact(records)], "parameters": manifest["leaves"]}
