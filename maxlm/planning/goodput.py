"""Simulation of a job's goodput: failures arrive at random, checkpoints of several tiers bring it back, lost hosts are replaced.

Goodput is the share of the hosts' time, idle spares included, that went into steps which count. Failures are exponential, at one rate a
chip. Part of them lose the host, and with it what lies in its memory; part of them hang, which the watchdog finds; the others lose the
process only. A failure ends the step on all chips: it is detected, a spare host or a smaller mesh takes over, the program starts, and the
newest state that is left is restored. Failures during recovery start it again. The defaults and their sources:
docs/lab/reliability.md.
"""

import functools
import math
import random
from dataclasses import dataclass

from maxlm.config.sections.elastic import ElasticConfig
from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision.limits import PHASES, Limits

DAY = 86400.0
# Llama 3 (arXiv 2407.21783, section 3.3.4): 466 interruptions in 54 days on 16,384 GPUs; about 78% of the unexpected ones are of hardware.
LLAMA_INTERRUPTIONS, LLAMA_DAYS, LLAMA_CHIPS = 466, 54, 16_384
LLAMA_RATE = LLAMA_INTERRUPTIONS / (LLAMA_DAYS * DAY * LLAMA_CHIPS)  # a chip and second
ENOUGH = 1000  # interruptions, for goodput to within about 0.1% at 16,384 chips
PARTS = ("useful", "saving", "redone", "detection", "startup", "restore", "no hosts", "fewer hosts", "mesh changes", "spares")
SLOWEST = 1.2  # 99th percentile of step times, in steps
TO_VERDICT_S = 11.0  # from a limit of the watchdog to the end of all: a look, a heartbeat, the stacks of all processes


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
    hang_share: float = 0.1  # of interruptions that hang, and lose no host
    chips_per_host: int = 8
    step_s: float = 6.0
    detect_process_s: float = 2.0
    detect_host_s: float = 30.0
    detect_hang_s: float | None = None  # None: the limit that the watchdog learns from the steps
    startup_s: float = 60.0  # from the decision to restart to the first step, without the restore
    spares: int | None = None  # hosts that are idle until they are needed; None: four deviations more than are in repair on average
    repair_s: float = 6 * 3600.0  # until a lost host is a spare
    elastic_chips: int | None = None  # by which the mesh shrinks if no spare is left; None: the job waits
    wait_s: float = ElasticConfig.model_fields["wait_s"].default  # that the others wait for a host before they go on without it
    meet_s: float = 20.0  # in which they look for the coordinator while hosts are absent that were absent before
    compile_s: float = 300.0  # for a smaller mesh that has no program yet
    compiled: bool = True  # whether a second loss of as many hosts finds the program of the first
    change_s: float = 60.0  # to grow back

    @property
    def mtbf_s(self) -> float:
        """Mean time between interruptions of the job."""
        return 1 / (self.rate * self.chips)

    @property
    def spare_hosts(self) -> int:
        """Hosts that are idle until they are needed."""
        in_repair = self.rate * self.chips * self.host_share * self.repair_s
        return math.ceil(in_repair + 4 * math.sqrt(in_repair)) if self.spares is None else self.spares

    @property
    def charged_share(self) -> float:
        """Share of all hosts that are part of the job, and no spares."""
        return self.chips / (self.chips + self.spare_hosts * self.chips_per_host)

    @property
    def hang_s(self) -> float:
        """Seconds from the beginning of a hang to the end of all processes."""
        return learned_limit_s(self.step_s) + TO_VERDICT_S if self.detect_hang_s is None else self.detect_hang_s

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


@functools.cache
def learned_limit_s(step_s: float) -> float:
    """Limit of a step that the watchdog has learned from steps of so many seconds."""
    limits = Limits(WatchdogConfig())
    for _ in range(PHASES["step"].enough):
        limits.observe({"step": SLOWEST * step_s})
    return limits.seconds("step")


class Simulation:
    """One history of a job."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._dice = job, random.Random(seed)  # noqa: S311 -- no secret
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._now = self._work = 0.0  # wall time; seconds of steps at full speed that count
        self._copied = dict.fromkeys((tier.name for tier in job.tiers), 0.0)  # work in the newest complete save
        self._intervals = job.intervals()
        self._block_share = sum(tier.block_s / self._intervals[tier.name] for tier in job.tiers)  # seconds of saving a second of steps
        self._repairs: list[float] = []  # times at which lost hosts are back
        self._absent = 0  # hosts that the newest start was without
        self._programs = {0}  # counts of absent hosts that have a compiled program
        self._spares, self._hang_s, self._mtbf_s = job.spare_hosts, job.hang_s, job.mtbf_s

    def run(self, seconds: float) -> dict[str, float]:
        """Share of the hosts' time by part, of `seconds` or a little more; they add up to 1."""
        while self._now < seconds:
            self._train(self._dice.expovariate(1 / self._mtbf_s))
            self._recover()
        paid = sum(self._seconds.values()) / self._job.charged_share
        return {part: value / paid for part, value in self._seconds.items()} | {"spares": 1 - self._job.charged_share}

    def _train(self, until_failure: float) -> None:
        """Train for so long, in stretches between which the number of hosts changes."""
        first = self._work
        end = self._now + until_failure
        while self._now < end:
            missing = self._missing()
            stretch = min([end, *([min(self._repairs)] if missing and min(self._repairs) > self._now else [])]) - self._now
            steps = stretch / (1 + self._block_share)
            job = self._job  # at worst each missing host is in another part of the mesh
            speed = 1 - (0.0 if job.elastic_chips is None else min(1.0, missing * max(job.elastic_chips, job.chips_per_host) / job.chips))
            self._spend("saving", stretch - steps)
            self._spend("useful", steps * speed)
            self._spend("fewer hosts", steps * (1 - speed))
            self._work += steps * speed
            self._repairs = [time for time in self._repairs if time > self._now]
            if missing and self._missing() < missing and self._now < end:
                change_s = self._job.change_s + self._compilation()
                self._spend("mesh changes", change_s)
                end += change_s
        for tier in self._job.tiers:
            interval, late = self._intervals[tier.name], tier.write_s / (1 + self._block_share)
            newest = (self._work - late) // interval * interval
            if newest > first:
                self._copied[tier.name] = newest

    def _recover(self) -> None:
        """From a failure to the first step; another failure meanwhile begins it anew."""
        job = self._job
        while True:
            kind = self._dice.random()
            host, hangs = kind < job.host_share, job.host_share <= kind < job.host_share + job.hang_share
            if host:
                self._repairs.append(self._now + job.repair_s)
                both = self._dice.random() < job.domain_share
                gone = [tier.name for tier in job.tiers if not tier.survives_host or (both and tier.name == PEER.name)]
                self._copied |= dict.fromkeys(gone, 0.0)  # until the next copy
            tier = max(job.tiers, key=lambda tier: (self._copied[tier.name], -tier.restore_s))
            parts = [
                ("detection", job.detect_host_s if host else self._hang_s if hangs else job.detect_process_s),
                ("no hosts", self._wait_for_hosts()),
                ("mesh changes", self._compilation()),
                ("startup", job.startup_s),
                ("restore", tier.restore_s),
            ]
            until_failure = self._dice.expovariate(1 / self._mtbf_s)
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
        return max(0, sum(time > self._now for time in self._repairs) - self._spares)

    def _wait_for_hosts(self) -> float:
        """Seconds until hosts are back, or until the others go on without them: those absent before are not waited for again."""
        missing = self._missing()
        if self._job.elastic_chips is not None:
            return self._job.wait_s if missing > self._absent else self._job.meet_s if missing else 0.0
        if not missing:
            return 0.0
        return sorted(time for time in self._repairs if time > self._now)[missing - 1] - self._now

    def _compilation(self) -> float:
        """Seconds to compile the program of the mesh that the job goes on with."""
        missing, self._absent = (self._missing() if self._job.elastic_chips is not None else 0), self._missing()
        if missing in self._programs:
            return 0.0
        if self._job.compiled:
            self._programs.add(missing)
        return self._job.compile_s

    def _spend(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds
        self._now += seconds


def simulate(job: Job, *, interruptions: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Share of the hosts' time by part, over about so many interruptions."""
    return Simulation(job, seed).run(interruptions * job.mtbf_s)


@functools.cache
def expected_goodput(chips: int, chips_per_host: int, step_s: float, *, memory: bool, peer: bool) -> float:
    """Goodput of a job by wall time, without spares. Checkpoints in the store, and copies in `memory` and with a `peer` if any, are
    saved at Young's intervals.
    """
    tiers = (STORE, *((MEMORY,) if memory else ()), *((PEER,) if memory and peer else ()))
    job = Job(chips, tiers, chips_per_host=chips_per_host, step_s=step_s)
    return simulate(job, interruptions=ENOUGH)["useful"] / job.charged_share
