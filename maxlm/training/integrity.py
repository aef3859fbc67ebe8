"""Checks for silent corruption: a device that holds or computes wrong bits, and says nothing.

Every `integrity.every_steps` updates, and before every save, the copies of the state are compared (replicas.py). Every
`integrity.replay_every` updates devices repeat the work of others (cell_replay.py), and every `integrity.repeat_every` one update is
computed twice. After a disagreement the wrong device is named, as far as it can be, and training goes back to where all agreed.
docs/explanation/integrity.md says what each check can see.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.base.errors import ConfigError
from maxlm.checkpoint.digest import digest
from maxlm.cluster import agree
from maxlm.config.sections.integrity import IntegrityConfig, on_mesh, on_platform
from maxlm.telemetry.observer import Event
from maxlm.training.cell_replay import FURTHER, CellReplay, comparable, erratic, judge_cells, wrong_work
from maxlm.training.findings import DeviceName, Findings, Unsettled, device_names
from maxlm.training.opening import Opening
from maxlm.training.program import Program
from maxlm.training.replicas import Element, Replicas, Verdict, judge_by, judge_copies
from maxlm.training.session import Outcome, RollBack
from maxlm.training.step import Metrics, TrainState

LATE = 2  # calls after which a comparison is read: the update behind it has been dispatched, so the devices do not wait
LOOKED_AT = 8  # leaves that differ, of which the one with the clearest difference is kept


Advance = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class Integrity:
    """The checks of one attempt; see `session.StateChecks` for the calls. `report` takes the alarms."""

    def __init__(
        self,
        settings: IntegrityConfig,
        replicas: Replicas,
        replay: CellReplay | None,
        devices: tuple[DeviceName, ...],
        findings: Findings,
        start: int,
        report: Callable[[Event], None],
    ) -> None:
        """`devices`: in the order of `mesh.devices.flat`; `start`: step of the first call, with a good state."""
        self._settings, self._replicas, self._replay = settings, replicas, replay
        self._devices, self._findings, self._report = devices, findings, report
        self._running: tuple[int, jax.Array] | None = None  # step and sums of the comparison that is to be read
        self._called = self._agreed = self._replayed = start
        self._unequal: int | None = None  # step of an update that gave two results

    def check(self, step: int, state: TrainState, *, now: bool) -> Outcome | None:
        """Read the comparison that was started `LATE` calls ago; start one if it is due, and read it `now` if the state will be saved."""
        if step < self._called:  # training has gone back
            self._running, self._agreed, self._replayed = None, min(self._agreed, step), min(self._replayed, step)
        self._called = step
        if self._unequal is not None:
            wrong, self._unequal, self._running = self._unequal, None, None
            return self._corrupted(wrong, "computed the update twice with two results", Verdict(), wrong - 1)
        unsettled = self._findings.record.unsettled
        now = now or (unsettled is not None and unsettled.step == step)
        if self._running is not None and (now or step >= self._running[0] + LATE) and (end := self._read(step, state)):
            return end
        if (now or step % self._settings.every_steps == 0) and step > self._agreed and self._running is None:
            self._running = step, self._replicas.sums(state)
            if now:
                return self._read(step, state) or self._settle(step, state)
        return None

    def replay(self, step: int, state: TrainState, batch: Any) -> Outcome | None:
        """Replay work of this batch if that is due. Waits for the devices: once in `replay_every` updates."""
        every = self._settings.replay_every
        if self._replay is None or every is None or step % every or step == self._replayed:
            return None
        number = step // every
        sums = self._replay.run(number, state, batch)
        if not wrong_work(sums):
            self._replayed = step
            return None
        few = comparable(sums)
        if few:
            sums = np.concatenate([sums, self._replay.run(number, state, batch, FURTHER)])
        if not few or erratic(sums):
            reason = "most devices compute other bits than their neighbours from the same numbers: this platform is not deterministic, or"
            reason += " many devices are broken; integrity.replay_every is off until the next start"
            self._replay = None
            self._alarm(step, "replay_not_comparable", reason)
            return None
        cells = judge_cells(sums)
        odd, suspects = (frozenset(d for cell in found for d in self._replay.devices(cell)) for found in cells)
        return self._corrupted(step, "computed other bits than others from the same numbers", Verdict(odd, suspects), self._replayed)

    def update(self, advance: Advance, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """`advance(state, batch)`; once in `repeat_every` updates from a copy of the state as well, so a wrong gradient is seen though all
        devices apply the same sum. Waits for the devices then; the next `check` says what was found.
        """
        every, done = self._settings.repeat_every, self._called + 1
        if every is None or done % every:
            return advance(state, batch)
        kept = jax.tree.map(jnp.copy, state)
        first, _ = advance(state, batch)
        sums = digest(first)
        jax.tree.map(lambda leaf: leaf.delete(), first)  # before the second needs its place
        state, metrics = advance(kept, batch)
        if agree.max_over_processes(int(digest(state) != sums)):  # each process reads the sums of its own devices
            self._unequal = done
        return state, metrics

    def _read(self, step: int, state: TrainState) -> Outcome | None:
        """Wait for the running comparison. `state`: after update `step`, at most `LATE` updates later."""
        assert self._running is not None, "there is one to read"
        (compared, sums), self._running = self._running, None
        unequal = self._replicas.unequal(sums)
        if not unequal:
            self._agreed = compared
            return None
        verdicts = [judge_copies(values) for _, values in unequal]
        odd = frozenset[int]().union(*(one.odd for one in verdicts))
        verdict = Verdict(odd, frozenset() if odd else frozenset[int]().union(*(one.suspects for one in verdicts)))
        if not odd:
            clearest = max((self._replicas.widest(state, name, values) for name, values in unequal[:LOOKED_AT]), key=Element.spread)
            self._findings.record.unsettled = Unsettled(step, clearest, tuple(device.key for device in self._devices))
        leaves = len({name for name, _ in unequal})
        more = f" and {leaves - 1} more" if leaves > 1 else ""
        return self._corrupted(compared, f"held other bits of {unequal[0][0]}{more} than its copies", verdict, self._agreed)

    def _settle(self, step: int, state: TrainState) -> Outcome | None:
        """Name the device that was wrong at this step the last time, now that the copies agree here."""
        unsettled = self._findings.record.unsettled
        if unsettled is None or unsettled.step != step:
            return None
        self._findings.record.unsettled = None
        right = min(self._replicas.values_at(state, unsettled.element).values())  # all are equal
        verdict = judge_by(right, unsettled.element.values)
        if not verdict.odd:
            self._findings.write()
            self._alarm(step, "corrupted", f"computing step {step:,} again did not tell which device was wrong")
            return None
        end = self._corrupted(step, f"held a wrong {unsettled.element.leaf} before training went back", verdict, step)
        return end if end.roll_back is not None and end.roll_back.final else None

    def _corrupted(self, step: int, did: str, verdict: Verdict, before: int) -> Outcome:
        """Report and record a finding. The end of the run if a device was named too often, else the way back."""
        named = [self._devices[position] for position in sorted(verdict.odd)]
        suspects = [self._devices[position] for position in sorted(verdict.suspects)]
        who = ", ".join(map(str, named)) or (f"one of {', '.join(map(str, suspects))}" if suspects else "some device")
        reason = f"{who} {did}, at step {step:,}"
        if 2 * len(named) > len(self._devices):
            reason, named = f"{len(named)} devices {did}, at step {step:,}: too many to be broken, so it is the program", []
        self._findings.add(step, reason, named, suspects)
        found = {"devices": [device.id for device in named or suspects], "hosts": sorted({device.host for device in named or suspects})}
        self._alarm(step, "corrupted", reason, **found, certain=bool(named))
        if out := self._findings.struck_out(named):
            hosts = ", ".join(sorted({device.host for device in out}))
            back = RollBack(reason, "corrupted", before, final=True)
            return Outcome("corrupted", step, f"{reason}; not for the first time: replace host {hosts}", roll_back=back)
        return Outcome("corrupted", step, reason, roll_back=RollBack(reason, "corrupted", before))

    def _alarm(self, step: int, cause: str, reason: str, **data: Any) -> None:
        self._report(Event("alarm", step, data={"cause": cause, "reason": reason, **data}))


def build_integrity(program: Program, hosts: Sequence[str], findings: Findings, start: int, report: Callable[[Event], None]) -> Integrity:
    """The checks that the config of `program` asks for, compiled. `hosts`: of each process."""
    settings = program.config.integrity
    assert settings is not None, "the config sets it"
    replicas, replay = Replicas(program.mesh, program.abstract_state), None
    if settings.replay_every is not None:
        replay = CellReplay(program)
        _ = replay.program
    _ = replicas.program
    devices = device_names(program.mesh, hosts)
    unsettled = findings.record.unsettled
    if unsettled is not None and unsettled.devices != tuple(device.key for device in devices):
        findings.record.unsettled = None  # its positions are of another mesh
        findings.write()
    return Integrity(settings, replicas, replay, devices, findings, start, report)


class PossibleChecks(Opening):
    """Refuse checks that cannot be done on these devices."""

    title = "checks for silent corruption"

    def __init__(self, settings: IntegrityConfig, diloco: object) -> None:
        self._settings, self._diloco = settings, diloco

    @classmethod
    def from_config(cls, integrity: IntegrityConfig, diloco: object) -> Self:
        return cls(integrity, diloco)

    def check_mesh(self, program: Program) -> None:
        """Raise ConfigError if a check could compare nothing on the mesh of `program`."""
        gpu = program.mesh.devices.flat[0].platform == "gpu"
        for problem in (*on_mesh(self._settings, program.mesh.shape, self._diloco), *on_platform(self._settings, gpu=gpu)):
            raise ConfigError(*problem)

    def check_compiled(self, program: Program, limit: int | None) -> None:
        """Raise ConfigError if `integrity.repeat_every` is set, and no second state fits into `limit` bytes of a device during a step."""
        every, memory = self._settings.repeat_every, program.step.memory_analysis()
        if every is None or limit is None or memory is None:
            return
        leaves = jax.tree.leaves(program.abstract_state)
        state = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        step = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        if state + step > limit:
            needed, most = (state + step) / 2**30, limit / 2**30
            rule = f"needs a copy of the state in addition to the step: {needed:.1f} GiB of a device that has {most:.1f}"
            raise ConfigError("integrity.repeat_every", every, rule, "leave it out, or split the state over more devices")
