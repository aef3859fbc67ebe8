"""Every second of a run's life is in one part of the ledger, whatever ends its attempts; a simulated run knows where it was."""

import json
import random
from dataclasses import dataclass, field

import pytest

from maxlm.telemetry.goodput import PARTS, Goodput
from maxlm.telemetry.ledger import ALIVE_S, TITLES, LastRecord, attempts_of, killed_event, ledger_of, read_ledger
from maxlm.telemetry.lifetime import BEAT_S, Beat, Heartbeat, Process, append_process, read_beat, read_processes
from maxlm.telemetry.observer import Event
from maxlm.telemetry.run_dir import RunDirectory

IMPORTS_S = 0.4  # of a process, before its own clock begins


class Killed(BaseException):
    """The process is gone: no `finally` of ours notices."""


@dataclass
class World:
    """A run's files, and the truth: `seconds` by part as they pass."""

    rnd: random.Random
    supervised: bool
    now: float = 1e9
    seconds: dict = field(default_factory=lambda: dict.fromkeys(TITLES, 0.0))
    events: list = field(default_factory=list)
    processes: list = field(default_factory=list)
    beat: Beat | None = None
    kept: list = field(default_factory=list)  # seconds of the steps that count so far
    saved: list = field(default_factory=lambda: [0])
    goodput: Goodput | None = None
    dies: float = float("inf")
    beats: float = float("inf")
    attempt: str = ""

    def wait(self, part, seconds):
        """Let time pass in `part`; beats are written meanwhile, and the process may be killed."""
        end = self.now + seconds
        while self.now < end:
            until = min(end, self.dies, self.beats)
            if part != "step":
                self.seconds[part] += until - self.now
            self.now = until
            if until == self.dies:
                raise Killed
            if until == self.beats:
                self.beat, self.beats = Beat(self.attempt, self.now, self.goodput.summary()), self.now + BEAT_S

    def step(self, seconds):
        began = self.now
        try:
            with self.goodput.measure("step"):
                self.wait("step", seconds)
        except Killed:
            self.seconds["lost"] += self.now - began
            raise
        self.kept.append(seconds)

    def go_back(self, step):
        self.seconds["lost"] += sum(self.kept[step:])
        del self.kept[step:]
        self.saved = [one for one in self.saved if one <= step]

    def say(self, kind, step, **data):
        self.events.append(Event(kind, step, self.now, data))


def attempt(world, number, total):
    """One process: from its start to a kill, a hang, a signal or the last step."""
    rnd, began = world.rnd, world.now
    world.attempt, code, hung = f"a{number}", 0, False
    world.dies = world.now + rnd.choice([0.2, 3, 30, 200, 400]) * rnd.uniform(0.5, 1.5) if rnd.random() < 0.7 else float("inf")
    said = False
    try:
        world.wait("init" if world.supervised else "down", IMPORTS_S)
        world.goodput = goodput = Goodput(lambda: world.now, began=world.now)
        own = world.now
        world.wait("init", rnd.uniform(1, 3))
        with goodput.measure("wait_hosts"):
            world.wait("wait_hosts", rnd.uniform(0, 20))
        first = world.saved[-1] if rnd.random() < 0.8 else rnd.choice(world.saved)  # a newer checkpoint may be damaged
        with goodput.measure("compile"):
            world.wait("compile", rnd.uniform(2, 9))
            with goodput.measure("restore"):
                world.wait("restore", rnd.uniform(0, 4))
        world.go_back(first)
        said = True
        world.say("start", first, startup_s=world.now - own, attempt=world.attempt)
        if first:
            world.say("restore", first)
        world.beats = world.now
        world.wait("init", 1e-3)
        with goodput.measure("step"):
            world.wait("compile", rnd.uniform(0.5, 2))
        goodput.started()
        world.kept.append(0.0)  # its time is that of loading the program
        hang_at = rnd.randrange(total) if rnd.random() < 0.3 else -1
        stop_at = rnd.randrange(total) if rnd.random() < 0.3 else -1
        while len(world.kept) < total:
            step = len(world.kept)
            if step == stop_at:
                world.say("stop", step, reason="preempted", goodput=goodput.summary())
                return False
            with goodput.measure("data_wait"):
                world.wait("data_wait", rnd.expovariate(10))
            if step == hang_at:
                hung, world.dies = True, world.now + rnd.uniform(20, 90)
                with goodput.measure("step"):
                    world.wait("hang", 100)
            world.step(rnd.uniform(0.9, 1.1))
            if step % 10 == 9:
                with goodput.measure("save"):
                    world.wait("save", rnd.uniform(0, 0.5))
                world.saved.append(step + 1)
                world.say("save", step + 1, blocked_s=0.2)
            if rnd.random() < 0.01:
                with goodput.measure("eval"):
                    world.wait("eval", rnd.uniform(1, 5))
            if rnd.random() < 0.01:
                origin, target = len(world.kept), rnd.choice(world.saved[-2:])
                world.say("rollback", target, from_step=origin)
                world.go_back(target)
                with goodput.measure("restore"):
                    world.wait("restore", rnd.uniform(0, 3))
        world.say("stop", total, reason="done", goodput=goodput.summary())
        return True
    except Killed:
        code = 5 if hung else -9
        if hung:
            world.say("alarm", len(world.kept), cause="hang")
        return False
    finally:
        world.dies = world.beats = float("inf")
        if world.supervised:
            line = Process(world.attempt if said else "", began, world.now, world.now - began, code, hung, False, "")
            world.processes.append(line)


def live(seed, supervised):
    """A run to its last step, through at least one attempt."""
    world, number = World(random.Random(seed), supervised), 0
    while not attempt(world, number, 150):
        number += 1
        world.wait("down", world.rnd.choice([1, 5, 600]))
        if supervised and world.rnd.random() < 0.2:  # hosts that do not come
            began = world.now
            world.wait("wait_hosts", 120)
            world.processes.append(Process("", began, world.now, 120.0, 6, False, True, ""))
        # what FileObserver does as the next attempt begins
        killed = killed_event(world.events, None, world.beat)
        world.events += [killed] if killed else []
    world.seconds["step"] = sum(world.kept)
    return world


@pytest.mark.parametrize("supervised", [True, False], ids=["supervised", "alone"])
@pytest.mark.parametrize("seed", range(12))
def test_every_second_is_in_one_part(seed, supervised):
    """The parts are what the simulated run spent. Without a supervisor the time from the last heartbeat to a kill is not known: `down`."""
    world = live(seed, supervised)
    attempts = attempts_of(world.events, None, world.beat, world.processes)
    ledger = ledger_of(attempts, world.processes)
    assert list(ledger.seconds) == list(TITLES)
    assert min(ledger.seconds.values()) >= -1e-9
    starts = [event for event in world.events if event.kind == "start"]
    first = min([starts[0].time - starts[0].data["startup_s"], *(process.began for process in world.processes)])
    whole = world.now - first
    assert ledger.wall_s == pytest.approx(whole, rel=0.01)
    assert ledger.goodput == ledger.seconds["step"] / ledger.wall_s
    slack = 0.01 * whole + (0 if supervised else BEAT_S * len(starts))
    truth = dict(world.seconds)
    if not supervised:  # processes before the first `start`, and those that never came to it, are nobody's record
        unknown = {part: truth[part] - ledger.seconds[part] for part in ("init", "wait_hosts", "compile", "restore", "hang")}
        assert min(unknown.values()) > -slack
        return
    for part in TITLES:
        assert ledger.seconds[part] == pytest.approx(truth[part], abs=slack), part


def test_the_simulation_meets_everything():
    """Kills, hangs, rollbacks, signals and repeated steps occur in the seeds above."""
    worlds = [live(seed, True) for seed in range(12)]
    for part in set(TITLES) - {"elastic"}:
        assert sum(world.seconds[part] for world in worlds) > 10, part
    kinds = {event.kind for world in worlds for event in world.events}
    assert {"killed", "rollback", "stop", "alarm"} <= kinds


def start(time, attempt="a", step=0, startup_s=0.0):
    return Event("start", step, time, {"startup_s": startup_s, "attempt": attempt})


def goodput(part="step", part_s=0.0, **seconds):
    return {"wall_s": sum(seconds.values()), "seconds": seconds, "steps": 0, "part": part, "part_s": part_s}


def ledger(events, beat=None, processes=(), until=None):
    return ledger_of(attempts_of(events, None, beat, processes), processes, until)


def test_a_run_that_runs_counts_on_in_the_part_it_is_in_and_one_that_is_gone_is_down():
    events, beat = [start(1000.0)], Beat("a", 1010.0, goodput("data_wait", 3.0, step=7.0, data_wait=3.0))
    now = ledger(events, beat, until=1020.0)
    assert now.seconds == {**dict.fromkeys(TITLES, 0.0), "step": 7.0, "data_wait": 13.0}
    later = ledger(events, beat, until=1010.0 + ALIVE_S + 1)
    assert later.seconds["down"] == ALIVE_S + 1
    assert later.seconds["data_wait"] == 3.0


def test_time_after_a_finished_run_is_not_its_own():
    events = [start(1000.0), Event("stop", 10, 1010.0, {"reason": "done", "goodput": goodput(step=10.0)})]
    assert ledger(events, until=5000.0).wall_s == 10.0
    events += [start(9000.0, "b", 10), Event("stop", 20, 9010.0, {"reason": "done", "goodput": goodput(step=10.0)})]
    assert ledger(events).seconds == {**dict.fromkeys(TITLES, 0.0), "step": 20.0}


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_while_a_run_runs_changes_no_second(jump):
    events = [start(1000.0), Event("stop", 10, 1100.0 + jump, {"reason": "preempted", "goodput": goodput(step=100.0)})]
    events += [start(1105.0 + jump, "b", 10), Event("stop", 20, 1205.0 + jump, {"reason": "done", "goodput": goodput(step=100.0)})]
    assert ledger(events).seconds == {**dict.fromkeys(TITLES, 0.0), "step": 200.0, "down": 5.0}


def test_a_heartbeat_of_another_attempt_says_nothing():
    events, beat = [start(1000.0, "b"), Event("save", 5, 1004.0)], Beat("a", 900.0, goodput(step=500.0))
    assert ledger(events, beat).wall_s == pytest.approx(4.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_first_host_that_returns_counts_no_second_twice(seed):
    """host0 dies; the others go on under host1, killed now and then; host0 waits in several processes, the last of which joins them."""
    rnd = random.Random(seed)
    now, events, processes = 1e9, [start(1e9 + 5, "first")], []
    now += 5 + rnd.uniform(50, 100)
    processes.append(Process("first", 1e9, now, now - 1e9, -9, False, False, ""))
    waits = now + rnd.uniform(0, 9)  # where host0 is
    for number in range(rnd.randint(1, 3)):
        began = now + rnd.uniform(1, 9)
        ready, now = began + 30, began + 30 + rnd.uniform(50, 200)
        events += [start(ready, f"other{number}", startup_s=30.0)]
        events += [Event("stop", 0, now, {"reason": "preempted", "goodput": goodput(init=5.0, elastic=25.0, step=now - ready)})]
        while waits < now and rnd.random() < 0.8:
            end = waits + rnd.uniform(5, 60)
            processes.append(Process("", waits, end, end - waits, 6, False, rnd.random() < 0.7, ""))
            waits = end + rnd.uniform(0, 2)
        processes.append(Process(f"other{number}", began, now, now - began, 3, False, False, ""))
    ended = max(now, waits) + 100  # host0 joins at once, trains for 90 s, and writes the records again
    joined = max(now, waits) + 10
    parts = goodput(init=5.0, elastic=joined - waits - 5.0, step=90.0)
    events += [start(joined, "back", startup_s=joined - waits)]
    events += [Event("stop", 0, ended, {"reason": "done", "goodput": parts})]
    processes.append(Process("back", waits, ended, ended - waits, 0, False, False, ""))
    assert ledger(events, processes=processes).wall_s == pytest.approx(ended - 1e9, rel=0.01)


def test_the_hang_is_told_by_the_supervisor_too():
    """As for a stopped process, which raises no alarm."""
    events, beat = [start(1000.0)], Beat("a", 1030.0, goodput("step", 10.0, step=30.0))
    (process,) = [Process("a", 999.0, 1100.0, 101.0, 5, True, False, "")]
    seconds = ledger(events, beat, [process]).seconds
    assert (seconds["init"], seconds["step"], seconds["hang"]) == (1.0, 20.0, 80.0)


def test_the_files_survive_a_kill_and_garbage(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    assert read_beat(run.heartbeat) is None
    assert read_processes(run.supervisor) == []
    clock = iter(range(100))
    with Heartbeat(run.heartbeat, "a", lambda: goodput(step=float(next(clock))), every_s=0.01):
        pass
    beat = read_beat(run.heartbeat)
    assert (beat.attempt, set(beat.goodput)) == ("a", {"wall_s", "seconds", "steps", "part", "part_s"})
    line = Process("a", 1.0, 2.0, 1.0, -9, False, True, "lost b")
    append_process(run.supervisor, line)
    with run.supervisor.open("a") as file:
        file.write('{"attempt": "torn')
    append_process(run.supervisor, line)
    assert read_processes(run.supervisor) == [line, line]
    for garbage in ("", "[]", "{", '{"attempt": 1}', '{"attempt": "a", "time": "x", "goodput": {}}', "\x00\xff", "[" * 100_000):
        run.heartbeat.write_text(garbage, encoding="latin-1")
        assert read_beat(run.heartbeat) is None
        run.supervisor.write_text(garbage, encoding="latin-1")
        assert read_processes(run.supervisor) == []


@pytest.mark.parametrize(
    "goodput", [{}, {"seconds": {"step": -5, "new": 1e300, "init": "x"}}, {"seconds": 3, "part": [], "part_s": 1e18, "steps": 1e9}]
)
def test_any_heartbeat_makes_a_ledger(tmp_path, goodput):
    run = RunDirectory.create(tmp_path, "r")
    run.events.write_text(start(1000.0).to_json() + "\n" + Event("save", 5, 1004.0).to_json() + "\n")
    run.heartbeat.write_text(json.dumps({"attempt": "a", "time": 1010.0, "goodput": goodput}))
    found = read_ledger(run)
    assert found.wall_s == pytest.approx(10.0, abs=6.0)
    assert min(found.seconds.values()) >= 0
    assert str(found).startswith("goodput ")


def test_what_a_new_attempt_throws_away_is_known_before_it_is_on_record(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    stop = {"reason": "preempted", "goodput": {**goodput(step=99.0), "steps": 100}}
    run.events.write_text("".join(event.to_json() + "\n" for event in (start(1000.0), Event("stop", 100, 1099.0, stop))))
    seconds = read_ledger(run, begins=start(1109.0, "b", 60)).seconds
    assert (seconds["step"], seconds["lost"], seconds["down"]) == (pytest.approx(59.0), pytest.approx(40.0), 10.0)
    assert set(PARTS) < set(TITLES)


def test_steps_that_no_record_holds_are_thrown_away_too():
    """Killed after 101 steps with a checkpoint of 51 and no record since: the heartbeat has counted them."""
    events = [start(1000.0), Event("save", 51, 1051.0), Event("killed", 51, 1101.0, {"goodput": {**goodput(step=100.0), "steps": 101}})]
    events += [start(1101.0, "b", 51), Event("stop", 61, 1110.0, {"reason": "done", "goodput": {**goodput(step=9.0), "steps": 10}})]
    seconds = ledger(events).seconds
    assert (seconds["step"], seconds["lost"]) == (pytest.approx(50.0 + 9.0), pytest.approx(50.0))


def test_steps_after_a_heartbeat_before_the_first_step_are_steps():
    """A record shows that they were done; the later start throws away the steps that were not saved."""
    beat = Beat("a", 1010.0, goodput("compile", 8.0, init=2.0, compile=8.0))
    killed = killed_event([start(1000.0)], LastRecord(4, 1025.0), beat)
    processes = [Process("a", 1000.0, 1030.0, 30.0, -9, False, False, "")]
    seconds = ledger([start(1000.0), killed, start(1040.0, "b", step=2)], processes=processes).seconds
    assert (seconds["init"], seconds["compile"], seconds["down"]) == (2.0, 8.0, 10.0)
    assert (seconds["step"], seconds["lost"]) == (pytest.approx(5.0), pytest.approx(10.0 + 5.0)), "two of three after the first, and 5 s"
