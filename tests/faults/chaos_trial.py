"""One trial of chaos: an injected fault, what the run made of it, and whether that is what the undisturbed run made."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_faults import LOST, POISONED_AT, Fault, settings_of_parts
from chaos_libc import build
from chaos_store import make_store
from chaos_world import LIMIT_SECONDS, SAVE_EVERY, Setup, Shape, World
from small_run import exact

RTOL = 1e-5  # of losses on two meshes


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
    restarts: int = 0  # attempts that continued from a saved state, and roll backs
    lost_steps: int = 0
    recovery_s: float | None = None  # until the first new step
    culprit: str = "-"
    accused: dict[str, int] = field(default_factory=dict)  # how often each was named as lost or hung
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "recovered": self.recovered}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Trial":
        return cls(**{name: value for name, value in record.items() if name != "recovered"})


class Chaos:
    """Trials below `folder`, where stores, undisturbed runs, and the trials that failed or named no or a wrong culprit stay."""

    def __init__(self, folder: Path, *, keep: bool = False, limit_s: float = LIMIT_SECONDS) -> None:
        """`keep`: the other trials as well; `limit_s`: for each wait of a trial."""
        self.folder, self._keep, self._limit_s = folder.absolute(), keep, limit_s
        self.folder.mkdir(parents=True, exist_ok=True)
        self._library = build(self.folder)

    def trial(self, fault: Fault, shape: Shape, seed: str) -> Trial:
        """Start a run, inject `fault`, and judge the end. Its folder stays if it failed, or named the wrong culprit or none."""
        folder, began = self.folder / f"{fault.name}-{shape}-{seed}", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        found = Trial(fault.name, seed, shape.hosts, shape.devices)
        world = World(folder, shape, f"{fault.name} {seed}", self._setup(fault, shape, folder))
        if fault.prepare is not None:
            world.setup = replace(world.setup, environment={**world.setup.environment, **fault.prepare(world)})
        with world:
            found.victim = world.victim
            at = fault.least_step + world.dice.randrange(2 * SAVE_EVERY)
            if world.until(lambda: world.progress.step >= at and _saved(world)):
                found.step, injected = world.progress.step, time.monotonic()
                try:
                    fault.inject(world)
                except (OSError, ValueError, subprocess.SubprocessError) as error:  # such as a run that ended before
                    found.problems.append(f"not injected: {error}")
                world.until(lambda: False)
                found.lost_steps = world.progress.lost_after(injected)
                seconds = world.progress.seconds_to_new_step(injected)
                found.recovery_s = None if seconds is None else round(seconds, 2)
                found.restarts = len(world.progress.restores)
                found.culprit, found.accused = culprit_of(fault, world), accused_in(world.said())
            else:
                found.problems.append(f"step {at} and a checkpoint never came")
            found.codes = {name: process.poll() for name, process in world.run.processes.items()}
        found.problems += self._problems(found, fault, shape, folder / ("runs-kept" if "runs" in fault.disks else "runs") / "small")
        found.seconds = round(time.monotonic() - began, 1)
        if found.recovered and found.culprit in ("right", "-") and not self._keep:
            shutil.rmtree(folder)
        return found

    def undisturbed(self, fault: Fault, shape: Shape, left_out: Sequence[int] = ()) -> dict[str, Any]:
        """Losses and digests of the run that only lacks the fault, and leaves out these batches; computed once."""
        setting = (f"health.leave_out={list(left_out)}",) if left_out else ()
        kind = f"{shape}-{fault.steps}-poison{fault.poisoned}{'-nan' * bool(fault.hook)}{'-left-out' * bool(left_out)}"
        kind += f"-{digest_of(fault.settings)}" if fault.settings else ""
        folder = self.folder / f"undisturbed-{kind}"
        path = folder / f"result-{digest_of(left_out)}.json"
        if not path.exists():
            shutil.rmtree(folder, ignore_errors=True)
            setup = self._setup(fault, shape, folder)
            with World(folder, shape, "undisturbed", replace(setup, settings=setup.settings + setting, disks=())) as world:
                if not world.until(lambda: False) and any(process.poll() != 0 for process in world.run.processes.values()):
                    raise SystemExit(f"The undisturbed run failed, see {folder}")
            path.write_text(json.dumps(_result(folder / "runs" / "small", fault.steps)))
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def clean(self, shape: Shape, steps: int, settings: Sequence[str], name: str) -> list[dict[str, Any]]:
        """Alarms, and attempts after the first, of a run of so many steps in which nothing is wrong."""
        folder = self.folder / f"clean-{shape}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        setup = self._setup(None, shape, folder)
        with World(folder, shape, name, replace(setup, settings=(*setup.settings, *settings), steps=steps)) as world:
            for machine in world.machines.values():
                machine.set(delay_ms=0)
            world.until(lambda: False, max(steps, self._limit_s))
            codes = {host: process.poll() for host, process in world.run.processes.items()}
        events = [json.loads(line) for line in (folder / "runs" / "small" / "events.jsonl").read_text().splitlines()]
        alarms = [event for event in events if event["kind"] in ("alarm", "rollback", "restore", "killed", "skip")]
        return alarms + [{"kind": "end", "codes": codes}] * any(codes.values())

    def _setup(self, fault: Fault | None, shape: Shape, folder: Path) -> Setup:
        poisoned, hook, environment = 0, "", {}
        if fault is not None:
            poisoned, hook = fault.poisoned, fault.hook
        store = self.folder / f"poison{poisoned}" / "store"
        if not (store / "store.json").exists():
            shutil.rmtree(store, ignore_errors=True)
            make_store(store, range(POISONED_AT, POISONED_AT + poisoned))
        if hook:
            place = self.folder / f"hook-{digest_of(hook)}"
            place.mkdir(exist_ok=True)
            (place / "sitecustomize.py").write_text(hook)
            environment["PYTHONPATH"] = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = settings_of_parts(shape, folder / "memory", fault.without if fault is not None else "")
        if fault is None:
            return Setup(store, self._library, settings)
        settings += fault.settings
        return Setup(store, self._library, settings, environment, fault.disks, fault.steps, self._limit_s)

    def _problems(self, found: Trial, fault: Fault, shape: Shape, run: Path) -> list[str]:
        left = {name: code for name, code in found.codes.items() if not (fault.gone and name == found.victim)}
        ends = {name: "does not end" if code is None else f"ended with {code}" for name, code in left.items() if code != 0}
        problems = [f"{name} {end}" for name, end in ends.items()]
        try:
            result = _result(run, fault.steps)
        except (OSError, ValueError, KeyError) as error:
            return [*problems, f"no result: {error}"]
        reference = self.undisturbed(fault, shape, _left_out(run))
        if fault.gone:
            return problems + _apart(result["losses"], reference["losses"])
        problems += ["parameters differ from those of the undisturbed run"] * (result["parameters"] != reference["parameters"])
        rows, wanted = ({row[0]: row for row in one["losses"]} for one in (result, reference))
        if any(wanted.get(step) != row for step, row in rows.items()):
            problems.append("losses differ from those of the undisturbed run")
        # A copy in memory is complete before the record of its step is written, which is read one step late.
        if len(missing := sorted(wanted.keys() - rows.keys())) > found.restarts:
            problems.append(f"no record of steps {missing}")
        return problems


def culprit_of(fault: Fault, world: World) -> str:
    """Verdict on who was named. Hosts that were named as lost or hung are counted: a host that is cut off blames the others."""
    if not fault.named or (fault.named == LOST and world.shape.hosts == 1):
        return "-"
    said = world.said()
    accused = accused_in(said)
    most = {name for name, count in accused.items() if count == max(accused.values())}
    accepted = {world.victim} | (set(world.hosts.names) if fault.either_end and world.shape.hosts == 2 else set())
    if most and not most & accepted:
        return "wrong"
    return "right" if any(re.search(fault.named.format(victim=name), said) for name in accepted) else "nobody"


def accused_in(said: str) -> dict[str, int]:
    """Counts of how often each host was named as lost or hung."""
    return dict(Counter(re.findall(r"(?:lost|hung): (host\d+) \(process", said)))


def _saved(world: World) -> bool:
    folder = world.checkpoints()
    return folder.is_dir() and any(one.name.isdigit() for one in folder.iterdir())


def _apart(rows: list[list[Any]], wanted: list[list[Any]]) -> list[str]:
    """Reasons that the records of a run on a smaller mesh are not those of the whole one: the same batches, losses within RTOL."""

    def agree(row: list[Any], other: list[Any]) -> bool:
        return row[0] == other[0] and row[-1] == other[-1] and abs(row[1] - other[1]) <= RTOL * abs(other[1])

    same = len(rows) == len(wanted) and all(map(agree, rows, wanted))
    return [] if same else ["batches or losses differ from those of the undisturbed run"]


def _left_out(run: Path) -> list[int]:
    """Batches that the run left out when it went back."""
    path = run / "roll_backs.json"
    records = json.loads(path.read_text())["roll_backs"] if path.exists() else []
    return sorted({batch for record in records for batch in record["batches"]})


def digest_of(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _result(run: Path, steps: int) -> dict[str, Any]:
    last = {record["step"]: record for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    manifest = json.loads((run / "checkpoints" / str(steps) / "manifest" / "manifest.json").read_text())
    return {"losses": [list(row) for row in exact(list(last.values()))], "parameters": manifest["leaves"]}
