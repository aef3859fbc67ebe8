"""Which states of a run become checkpoints: a loop with real checkpoints around a scripted step, so nothing of size is compiled."""

import errno
import functools
import json
import math
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numbered_data import NumberedData
from orbax.checkpoint import v1 as ocp
from tiny import tiny_config, tiny_program

from maxlm.base.errors import ExitCode, UserError
from maxlm.checkpoint import Checkpoints, digest, manifest, recovery
from maxlm.checkpoint.errors import DamagedError
from maxlm.checkpoint.host_copies import Draft
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.data.prefetch import Batches
from maxlm.objectives import Sums, build_objective
from maxlm.run.open_run import begin_anew
from maxlm.run.run import EXIT_CODES
from maxlm.telemetry.compilations import Compilations
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import meter, saving
from maxlm.training.loop import evaluate, restore_or_init, train
from maxlm.training.saving import not_finite, prepare_saves
from maxlm.training.session import Outcome, Session
from maxlm.training.step import Metrics, TrainState, keep_if

EVERY, KEEP, TOTAL = 5, 2, 45
MESH = Mesh(np.array(jax.devices()[:1]), ("data",))


class Data(NumberedData):
    """Batches that are their own numbers."""

    ahead = 2

    def batch(self, number, sharding):
        return number


class Script:
    """A program whose update n has the loss `loss(n)` and sets the parameter to `parameter(n)`."""

    mesh, batch_sharding, metrics, probes = MESH, None, (), ()

    def __init__(self, loss=lambda n: 4.0, parameter=float, total=TOTAL):
        self.config = tiny_config(train={"steps": total}, checkpoint={"every_steps": EVERY, "keep": KEEP})
        self.objective = build_objective(self.config)
        self._loss, self._parameter = loss, parameter

    def init(self):
        return jax.device_put(TrainState(jnp.int32(0), jnp.int32(0), {"w": jnp.zeros(4)}, {"mu": jnp.zeros(4)}, {}), self._sharding)

    @property
    def _sharding(self):
        return NamedSharding(MESH, PartitionSpec())

    @functools.cached_property
    def abstract_state(self):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self.init())

    def adopt(self, state):
        return state

    readable = evaluated = adopt
    placement = property(lambda self: self)

    def step(self, state, n):
        return advanced(state, self._loss(n), self._parameter(n))


@functools.partial(jax.jit, out_shardings=NamedSharding(MESH, PartitionSpec()))
def advanced(state, loss, parameter):
    loss += 0 * jnp.sum(state.params["w"])  # an infinity in the parameters makes every later loss NaN
    good, proposed = jnp.isfinite(loss), replace(state, params={"w": jnp.full(4, parameter, jnp.float32)})
    state = replace(keep_if(good, proposed, state), step=state.step + 1, skipped=state.skipped + ~good)
    zero = jnp.float32(0)
    return state, Metrics({"loss": loss, "grad_norm": jnp.float32(1.0), "lr": zero, "tokens": zero, "skipped": state.skipped})


class Events(list):
    """An observer that keeps the events."""

    on_event = list.append

    def on_step(self, record): ...

    def of(self, kind):
        return [event for event in self if event.kind == kind]


@pytest.fixture(autouse=True)
def no_flops(monkeypatch):
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)


def train_with(folder, script, events, stop=lambda step: None, data=None, gives_up=lambda: False):
    """The outcome; `events` are told what happens; `events.saved`: the checkpoints as training ends."""
    checkpoints = Checkpoints(folder / "c", script.config.checkpoint, {})
    start = restore_or_init(script, checkpoints)
    try:
        return train(Session(script, data or Data(), None, checkpoints, events, Goodput(), stop, all_give_up=gives_up), start)
    finally:
        events.saved = saved_in(folder)
        checkpoints.close()


def run(folder, script, stop=lambda step: None, data=None):
    """(the outcome, the events)."""
    events = Events()
    return train_with(folder, script, events, stop, data), events


def saved_in(folder):
    """Steps of the committed checkpoints."""
    return sorted(int(entry.name) for entry in (folder / "c").glob("*") if entry.name.isdigit())


def bits(folder, step):
    return json.loads((folder / "c" / str(step) / "manifest" / "manifest.json").read_text())["leaves"]


@pytest.mark.parametrize("poison", ["parameter", "absurd", "batches", "loss"])
def test_three_restarts_of_an_unhealthy_run_leave_the_good_checkpoints(tmp_path, poison):
    """From step 22 on something is wrong for good; only two checkpoints are kept."""
    script = {
        "parameter": Script(parameter=lambda n: math.inf if n >= 22 else float(n)),
        "absurd": Script(parameter=lambda n: 1e30 if n >= 22 else float(n)),
        "batches": Script(loss=lambda n: math.nan if n >= 22 else 4.0),
        "loss": Script(loss=lambda n: 9.0 if n >= 22 else 4.0, parameter=lambda n: -1.0 if n >= 22 else float(n)),
    }[poison]
    run(tmp_path, Script(total=20))
    good = {step: bits(tmp_path, step) for step in (15, 20)}
    for _ in range(KEEP + 1):
        outcome, events = run(tmp_path, script)
        assert outcome.status == "unhealthy"
        assert saved_in(tmp_path) == [15, 20]
        assert {step: bits(tmp_path, step) for step in (15, 20)} == good
        assert [event.step for event in events.of("restore")] == [20]
        postponed = [event for event in events.of("alarm") if event.data["cause"] == "save_postponed"]
        assert [event.step for event in postponed] == [25], "said once"
        assert "the last state is not saved" in outcome.message
        assert "the newest checkpoint is of step 20" in outcome.message
    if poison == "parameter":
        assert "the state holds values that are not finite, in params.w" in outcome.message
    if poison == "absurd":
        assert "the state holds values that no training gives, in params.w (1e+30)" in outcome.message


@pytest.mark.parametrize("place", ["opt_state", "extra"])
def test_an_absurd_moment_or_average_is_not_saved(tmp_path, place):
    class Flipped(Script):
        def init(self):
            return replace(super().init(), extra={"w": jax.device_put(jnp.zeros(4), self._sharding)})

        def step(self, state, n):
            state, metrics = super().step(state, n)
            name = {"opt_state": "mu", "extra": "w"}[place]
            return replace(state, **{place: {name: jax.device_put(jnp.full(4, 1e30 if n >= 12 else 1e11), self._sharding)}}), metrics

    outcome, _ = run(tmp_path, Flipped(total=20))
    assert outcome.status == "unhealthy" and f"values that no training gives, in {place}." in outcome.message
    assert saved_in(tmp_path) == [5, 10]


def test_a_parameter_that_grew_far_between_two_saves_is_an_alarm(tmp_path):
    outcome, events = run(tmp_path, Script(parameter=lambda n: 200.0 if n >= 12 else 0.5, total=20))
    assert outcome.status == "done"
    alarms = [(alarm.step, alarm.data["cause"], alarm.data["reason"]) for alarm in events.of("alarm")]
    said = "the largest value of parameters grew since the save before: params.w from 0.5 to 200"
    assert alarms == [(15, "large_value", said)]


def test_a_store_that_fails_costs_no_update(tmp_path):
    class Damaged(Data):
        def batches(self, start, sharding, stop):
            def make(n, spans):
                if n == 8:
                    raise UserError("a chunk is damaged")
                return n

            return Batches(make, range(start, stop), 2)

    with pytest.raises(UserError, match="a chunk is damaged"):
        run(tmp_path, Script(), data=Damaged())
    assert saved_in(tmp_path) == [5, 8]


class HeldOut:
    """Held-out batches of which the second meets `then`."""

    n_batches = 10

    def __init__(self, then):
        self._then = then

    def device_batch(self, n, sharding):
        if n == 1:
            self._then()

    def take_problems(self):
        return [{"cause": "bad_chunk", "reason": "a held-out chunk was left out"}]


class Evaluated(Script):
    """A script whose held-out losses are zero."""

    def evaluate(self, params, model_state, batch):
        return Sums(jnp.float32(1), {"loss": jnp.float32(0)}, {})


def evaluated(folder, then, gives_up=lambda: False, events=None):
    """The outcome of 7 steps and an evaluation that meets `then`."""
    script = Evaluated(total=7)
    checkpoints = Checkpoints(folder / "c", script.config.checkpoint, {})
    session = Session(script, Data(), HeldOut(then), checkpoints, Events() if events is None else events, Goodput(), gives_up=gives_up)
    return train(session, restore_or_init(script, checkpoints))


def test_an_evaluation_that_fails_does_not_cost_the_last_state(tmp_path):
    def fail():
        raise UserError("a held-out chunk is damaged")

    with pytest.raises(UserError, match="a held-out chunk is damaged"):
        evaluated(tmp_path, fail)
    assert saved_in(tmp_path) == [5, 7]


def test_samples_left_out_of_an_evaluation_are_told(tmp_path):
    events = Events()
    assert evaluated(tmp_path, lambda: None, events=events).eval_loss == 0
    assert [(event.step, event.data["reason"]) for event in events.of("alarm")] == [(7, "a held-out chunk was left out")]


def test_a_signal_cuts_an_evaluation_short(tmp_path):
    asked = []
    outcome = evaluated(tmp_path, lambda: asked.append("SIGTERM"), lambda: bool(asked))
    assert (outcome.status, outcome.eval_loss) == ("preempted", None)
    assert saved_in(tmp_path) == [5, 7], "before the evaluation"


def test_a_save_is_postponed_until_training_is_healthy_again(tmp_path):
    outcome, events = run(tmp_path, Script(loss=lambda n: math.nan if 8 <= n < 12 else 4.0, total=25))
    assert outcome.status == "done"
    assert [event.step for event in events.of("save")] == [5, 13, 15, 20, 25]
    (alarm,) = events.of("alarm")
    assert (alarm.step, alarm.data["cause"]) == (10, "save_postponed")
    assert "the update of step 10 was skipped: loss nan" in alarm.data["reason"]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda n: math.nan, "not one of 7 updates was finite"),
        (lambda n: math.nan if n == 6 else 4.0, "the update of step 7 was skipped"),
        (lambda n: 89.0 if n > 0 else 4.0, "more than 1 nat above that of an untrained model"),
    ],
    ids=["all", "the last", "diverged"],
)
def test_a_short_run_that_ends_badly_is_not_done(tmp_path, loss, said):
    outcome, _ = run(tmp_path, Script(loss, total=7))
    assert outcome.status == "unhealthy"
    assert said in outcome.message
    assert 7 not in saved_in(tmp_path)


def test_a_preempted_run_saves_no_unhealthy_state_and_says_so(tmp_path):
    script = Script(loss=lambda n: math.nan if n >= 6 else 4.0)
    outcome, events = run(tmp_path, script, lambda step: "SIGTERM" if step == 8 else None)
    assert outcome.status == "preempted"
    assert saved_in(tmp_path) == [5]
    (event,) = events.of("preempt")
    assert event.data["reason"].startswith("stopped by SIGTERM; the last state is not saved (the update of step 8 was skipped")
    assert event.data["reason"].endswith("the newest checkpoint is of step 5")


def test_what_a_loss_has_come_down_to_is_known_after_a_restart_on_the_same_data(tmp_path):
    """The state of step 20 was damaged just before it was saved: the next attempt sees nothing but a bad loss."""
    run(tmp_path, Script(loss=lambda n: 2.0, total=20))
    lost = Script(loss=lambda n: math.log(128))
    outcome, _ = run(tmp_path, lost)
    assert outcome.status == "unhealthy"
    assert "is back at the loss of an untrained model" in outcome.message
    other = Data()
    other.fingerprint = "0" * 64
    outcome, _ = run(tmp_path, lost, data=other)
    assert outcome.status == "done", "on other data such a loss may be right"


class SignalledHeldOut:
    """Held-out batches; a signal comes with number 3."""

    n_batches = 8

    def __init__(self):
        self.asked = []

    def device_batch(self, n, sharding):
        self.asked.append(n)
        return n

    def take_problems(self):
        return []


def signalled(folder, every, total, at=3, concluded=True, name="SIGTERM"):
    """(the outcome, the events, the held-out batches) of a run that a signal meets in its first evaluation, at held-out batch `at`."""
    script, events, held_out = Script(total=total), Events(), SignalledHeldOut()
    script.config = script.config.model_copy(update={"train": script.config.train.model_copy(update={"eval_every": every})})
    script.evaluate = lambda params, model_state, n: Sums(jnp.float32(2.0), {"loss": jnp.float32(6.0)}, {})
    checkpoints = Checkpoints(folder / "c", script.config.checkpoint, {})
    session = Session(
        script, Data(), held_out, checkpoints, events, Goodput(),
        lambda step: name if at in held_out.asked else None, lambda: at in held_out.asked, concluded=concluded, signal=lambda: name,
    )  # fmt: skip
    try:
        return train(session, restore_or_init(script, checkpoints)), events, held_out
    finally:
        checkpoints.close()


def test_a_signal_does_not_wait_for_an_evaluation(tmp_path):
    """One that takes longer than the grace time would cost the state."""
    outcome, events, held_out = signalled(tmp_path, every=7, total=20)
    assert (outcome.status, outcome.step) == ("preempted", 7)
    assert held_out.asked == [0, 1, 2, 3]
    assert saved_in(tmp_path) == [5, 7]
    assert [alarm.data["cause"] for alarm in events.of("alarm")] == ["not_evaluated"] and not events.of("eval")


@pytest.mark.parametrize("total", [20, 7], ids=["while it trains", "in the last evaluation"])
@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [("SIGTERM", "preempted", "preempt"), ("SIGINT", "interrupted", "interrupt"), ("SIGHUP", "interrupted", "interrupt")],
)
def test_ctrl_c_is_no_preemption(tmp_path, total, name, status, kind):
    outcome, events, _ = signalled(tmp_path, every=7, total=total, name=name)
    assert outcome.status == status
    assert [len(events.of(one)) for one in ("preempt", "interrupt")] == [int(kind == "preempt"), int(kind == "interrupt")]
    assert EXIT_CODES[outcome.status] == ExitCode.STOPPED


def test_the_evaluation_of_the_last_step_is_made_by_the_next_start_if_a_signal_cuts_it(tmp_path):
    outcome, events, _ = signalled(tmp_path, every=20, total=7)
    assert (outcome.status, outcome.step, outcome.eval_loss) == ("preempted", 7, None), "a supervisor must not take it for done"
    assert "a signal came before the evaluation" in outcome.message
    assert saved_in(tmp_path) == [5, 7] and [event.step for event in events.of("preempt")] == [7]
    outcome, events, held_out = signalled(tmp_path, every=20, total=7, at=None, concluded=False)
    assert (outcome.status, outcome.step, outcome.eval_loss) == ("done", 7, 3.0)
    assert held_out.asked == list(range(8)) and [event.step for event in events.of("eval")] == [7]
    assert saved_in(tmp_path) == [5, 7] and not events.of("save"), "no step was trained"
    outcome, events, held_out = signalled(tmp_path, every=20, total=7, at=None)
    assert (outcome.status, held_out.asked) == ("nothing_left", []), "its figures are on record"


def held_manifest(monkeypatch):
    """Saves do not end before the event that is returned is set."""
    free = threading.Event()
    text = manifest.Manifest.to_text

    def late(page):
        assert free.wait(60)
        return text(page)

    monkeypatch.setattr(manifest.Manifest, "to_text", late)
    return free


def test_a_save_is_told_when_it_is_committed_not_when_it_begins(tmp_path, monkeypatch):
    free, seen, events = held_manifest(monkeypatch), {}, Events()

    def stop(step):
        seen[step] = [*saved_in(tmp_path), *events]
        if step == 8:
            free.set()

    train_with(tmp_path, Script(total=10), events, stop)
    assert seen[8] == [], "it is still being written"
    assert [event.step for event in events.of("save")] == [5, 10]


def test_an_exception_waits_for_the_save_in_flight(tmp_path, monkeypatch):
    free = held_manifest(monkeypatch)

    def loss(n):
        if n == 6:
            threading.Timer(0.5, free.set).start()
            raise RuntimeError("a bug")
        return 4.0

    events = Events()
    with pytest.raises(RuntimeError, match="a bug"):
        train_with(tmp_path, Script(loss), events)
    assert [event.step for event in events] == events.saved == [5]


def test_a_save_that_fails_is_an_alarm_before_the_next_save_begins(tmp_path, monkeypatch):
    text, failed, seen = manifest.Manifest.to_text, threading.Event(), {}

    def full(page):
        if page.step == 5:
            failed.set()
            raise OSError(28, "No space left on device")
        return text(page)

    def stop(step):
        if step == 7:
            assert failed.wait(60)
            time.sleep(1)  # for the writer to end
        seen[step] = [event.kind for event in events]

    monkeypatch.setattr(manifest.Manifest, "to_text", full)
    script, events = Script(total=10), Events()
    outcome = train_with(tmp_path, script, events, stop)
    assert outcome.status == "done"
    assert seen[9] == ["alarm"]
    assert [(event.kind, event.step) for event in events] == [("alarm", 5), ("save", 10)]
    assert events[0].data["cause"] == "save_failed"
    assert "no space left" in events[0].data["reason"]


def test_an_evaluation_is_the_mean_over_all_tokens(tmp_path):
    script, read = Script(total=5), []
    script.evaluate = lambda params, model_state, batch: Sums(jnp.float32(2.0), {"loss": jnp.float32(8.0 * batch)}, {})
    assert evaluate(script, script.init(), SixBatches(read)) == {"loss": pytest.approx(8.0 * sum(range(6)) / (2 * 6))}
    assert read == list(range(6))


class SixBatches:
    """Six batches that are their own numbers."""

    n_batches = 6

    def __init__(self, read):
        self._read = read

    def device_batch(self, number, sharding):
        self._read.append(number)
        return number


def test_a_save_comes_before_tasks_that_fail(tmp_path):
    """Else the run would fail at that step again however often it is resumed."""

    class Tasks:
        every, asked = EVERY, {}

        def run(self, state, step, gives_up):
            assert gives_up()
            raise RuntimeError("tasks failed")

    script = Script()
    checkpoints = Checkpoints(tmp_path / "c", script.config.checkpoint, {})
    session = Session(script, Data(), None, checkpoints, Events(), Goodput(), tasks=Tasks(), all_give_up=lambda: True)
    with pytest.raises(RuntimeError, match="tasks failed"):
        train(session, restore_or_init(script, checkpoints))
    checkpoints.close()
    assert saved_in(tmp_path) == [EVERY]


def copied(folder, script, events, data=None):
    """Train with copies in memory every 5 steps, as checkpoints; the process dies as training ends or fails."""
    checkpoints = Checkpoints(folder / "c", script.config.checkpoint, {})
    checkpoints.add_memory(MemoryCheckpointsConfig(every_steps=EVERY, folder=str(folder / "memory")))
    start = restore_or_init(script, checkpoints)
    try:
        train(Session(script, data or Data(), None, checkpoints, events, Goodput()), start)
    finally:
        checkpoints.memory.close(remove=False)
    return start


class Broken(Data):
    """Batches until the program that makes them crashes."""

    def batches(self, start, sharding, stop):
        def read(n, spans):
            if n == 23:
                raise RuntimeError("crash")
            return n

        return Batches(read, range(start, stop), 1)


def test_a_copy_in_memory_holds_what_the_checkpoint_of_its_step_holds(tmp_path):
    script = Script(loss=lambda n: 4.0 - n / 100)
    with pytest.raises(RuntimeError, match="crash"):
        copied(tmp_path, script, Events(), Broken())
    saved = manifest.parse((tmp_path / "c" / "20" / "manifest" / "manifest.json").read_text())
    checkpoints = Checkpoints(tmp_path / "c", script.config.checkpoint, {})
    checkpoints.add_memory(MemoryCheckpointsConfig(folder=str(tmp_path / "memory")))
    assert checkpoints.memory.newest().layout.described == saved
    start = restore_or_init(script, checkpoints)
    assert (start.step, start.position, start.restored["source"]) == (20, saved.data_position, "checkpoint"), (
        "of two equals the one whose lineage needs no proof"
    )


@pytest.mark.parametrize("kept", [False, True], ids=["gone", "kept"])
def test_where_checkpoints_are_gone_a_copy_that_cannot_be_used_begins_nothing_anew(tmp_path, monkeypatch, kept):
    """The copy hides that they are gone until its bytes are read: weeks would be trained again without a word."""
    script, directory = Script(loss=lambda n: 4.0 - n / 100), RunDirectory.create(tmp_path, "r")
    with pytest.raises(RuntimeError, match="crash"):
        copied(tmp_path, script, Events(), Broken())
    directory.events.write_text(json.dumps({"kind": "save", "step": 20, "time": 1.0}) + "\n")
    for step in saved_in(tmp_path)[: None if not kept else -1]:
        shutil.rmtree(tmp_path / "c" / str(step))
    monkeypatch.setattr(recovery, "load", lambda *_: (_ for _ in ()).throw(DamagedError("its bytes have changed")))
    checkpoints = Checkpoints(tmp_path / "c", script.config.checkpoint, {})
    checkpoints.add_memory(MemoryCheckpointsConfig(folder=str(tmp_path / "memory")))
    assert checkpoints.latest() == 20
    begin = functools.partial(begin_anew, script.init, checkpoints, directory)
    if kept:
        assert restore_or_init(script, checkpoints, begin).step == 20
        return
    with pytest.raises(UserError, match="this run has saved step 20"):
        restore_or_init(script, checkpoints, begin)
    directory.events.unlink()
    assert restore_or_init(script, checkpoints, begin).step == 0, "it was killed before its first save"


def test_no_copy_is_made_of_an_unhealthy_state_and_a_failure_is_an_alarm(tmp_path, monkeypatch):
    events, script = Events(), Script(loss=lambda n: math.nan if n == 9 else 4.0, total=17)
    copied(tmp_path, script, events)
    (run,) = (tmp_path / "memory").glob("*/*")
    assert sorted(entry.name for entry in run.iterdir()) == ["15-0", "5-0"], "that of step 10 was not healthy"
    assert not [event for event in events.of("alarm") if event.data["cause"] == "memory_save_failed"]

    def full(self, tile, array, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Draft, "add", full)
    copied(tmp_path / "full", Script(), events)
    (alarm,) = [event for event in events.of("alarm") if event.data["cause"] == "memory_save_failed"]
    assert "copy of step 5 was not written" in alarm.data["reason"] and "No space left" in alarm.data["reason"]


@pytest.fixture
def read_only(monkeypatch):
    """Steps whose saves fail, as they do on a read-only disk: those of `at_once` as they begin, those of `later` in the background."""
    failing = SimpleNamespace(at_once=set(), later=set())
    begin, describe = ocp.training.Checkpointer.save_checkpointables_async, manifest.Manifest.to_text

    def save(self, step, *arguments, **named):
        if step in failing.at_once:
            raise OSError(errno.EROFS, "Read-only file system")
        return begin(self, step, *arguments, **named)

    def text(self):
        if self.step in failing.later:
            raise OSError(errno.EROFS, "Read-only file system")
        return describe(self)

    monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", save)
    monkeypatch.setattr(manifest.Manifest, "to_text", text)
    return failing


def test_training_goes_on_while_saves_fail(tmp_path, read_only):
    """Each that fails is told by one alarm, those after them are good, and no step is trained twice."""
    read_only.at_once, read_only.later = {10, 20}, {15, 30}
    events, steps = Events(), []
    assert train_with(tmp_path, Script(total=36), events, steps.append).status == "done"
    alarms = [event for event in events.of("alarm") if event.data["cause"] == "save_failed"]
    assert [event.step for event in alarms] == [10, 15, 20, 30], [event.data["reason"] for event in alarms]
    assert all("Read-only file system" in event.data["reason"] for event in alarms)
    assert [event.step for event in events.of("save")] == [5, 25, 35, 36]
    assert steps == list(range(36)) and events.saved == [35, 36]


def test_too_many_failed_saves_end_the_run_so_that_another_start_may_save(tmp_path, read_only, monkeypatch):
    monkeypatch.setattr(saving, "FAILED_SAVES", 3)
    monkeypatch.setattr(saving, "FAILING_SECONDS", 0.0)
    read_only.at_once = set(range(10, 60))
    events = Events()
    with pytest.raises(UserError) as error:
        train_with(tmp_path, Script(), events)
    ended = error.value
    assert "3 saves in a row have failed; the last one: checkpoint 20" in str(ended) and "Read-only" in str(ended)
    assert ended.exit_code == ExitCode.UNAVAILABLE
    assert [event.step for event in events.of("alarm")] == [10, 15, 20]


@pytest.mark.parametrize("in_time", [True, False])
def test_the_last_save_is_tried_again_for_a_while(tmp_path, read_only, monkeypatch, in_time):
    """A disk that is full for seconds must not cost a finished run its last state."""
    read_only.later, pauses, really = {12}, [], time.sleep

    def sleep(seconds):
        if seconds < 1:
            really(seconds)
            return
        pauses.append(seconds)
        if in_time and sum(pauses) == 2:
            read_only.later.clear()

    monkeypatch.setattr(saving.time, "sleep", sleep)
    events = Events()
    if in_time:
        assert train_with(tmp_path, Script(total=12), events).status == "done"
        assert [event.step for event in events.of("save")] == [5, 10, 12]
    else:
        with pytest.raises(UserError, match=r"checkpoint 12 was not saved .*Read-only"):
            train_with(tmp_path, Script(total=12), events)
    assert sum(pauses) == (1 + 3 if in_time else 1 + 3 + 8 + 18)
    assert [event.step for event in events.of("alarm")] == [12] * (2 if in_time else 5)


def test_the_last_save_is_not_tried_again_once_a_signal_asks_to_stop(tmp_path, read_only, monkeypatch):
    read_only.later, really = {8}, time.sleep
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: pytest.fail("it waits") if seconds >= 1 else really(seconds))
    with pytest.raises(UserError, match="checkpoint 8 was not saved"):
        train_with(tmp_path, Script(total=12), Events(), lambda step: "SIGTERM" if step == 8 else None, gives_up=lambda: True)


def test_a_signal_cuts_the_pauses_of_the_last_save_short(tmp_path, read_only, monkeypatch):
    read_only.later, pauses, really = {12}, [], time.sleep
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: pauses.append(seconds) if seconds >= 1 else really(seconds))
    with pytest.raises(UserError, match="checkpoint 12 was not saved"):
        train_with(tmp_path, Script(total=12), Events(), gives_up=lambda: len(pauses) == 6)
    assert len(pauses) == 6, "of the 12 s before the third try"


@pytest.mark.parametrize("moment", ["at_once", "later"])
def test_a_save_that_failed_before_leaves_the_end_as_it_is(tmp_path, read_only, moment):
    """A run that is unhealthy would be started again for nothing, and one that is told to stop would not end as stopped."""
    setattr(read_only, moment, {5, 8, 10})
    unhealthy = Script(loss=lambda n: math.nan if n >= 6 else 4.0)
    events = Events()
    outcome = train_with(tmp_path / "stopped", unhealthy, events, lambda step: "SIGTERM" if step == 8 else None)
    assert outcome.status == "preempted" and "there is no checkpoint" in outcome.message
    assert [event.step for event in events.of("alarm") if event.data["cause"] == "save_failed"] == [5]
    assert run(tmp_path / "unhealthy", unhealthy)[0].status == "unhealthy"

    class Flipped:
        """Finds corruption in the update of step 10, after its save has begun."""

        def check(self, step, state, *, now):
            return None

        def replay(self, step, state, batch):
            return Outcome("corrupted", step, "a device computes wrongly", state=state) if step == 10 else None

        def update(self, advance, state, batch):
            return advance(state, batch)

    script = Script()
    checkpoints = Checkpoints(tmp_path / "c", script.config.checkpoint, {})
    session = Session(script, Data(), None, checkpoints, Events(), Goodput(), integrity=Flipped())
    assert train(session, restore_or_init(script, checkpoints)).status == "corrupted"
    checkpoints.close()
    assert saved_in(tmp_path) == [], "nor is the state of step 10 saved now"


@pytest.mark.parametrize("moment", ["at_once", "later"])
@pytest.mark.parametrize("back", [True, False])
def test_the_save_after_too_many_that_failed_decides(tmp_path, read_only, monkeypatch, moment, back):
    """Training has waited long for the storage: it must not end when that is back."""
    monkeypatch.setattr(saving, "FAILED_SAVES", 3)
    monkeypatch.setattr(saving, "FAILING_SECONDS", 0.0)
    setattr(read_only, moment, {10, 15, 20} if back else set(range(10, 60)))
    if moment == "at_once" and back:
        read_only.at_once, read_only.later = {10, 15}, {20}
    events = Events()
    if back:
        assert train_with(tmp_path, Script(total=30), events).status == "done"
        assert [event.step for event in events.of("save")] == [5, 25, 30]
    else:
        with pytest.raises(UserError, match="saves in a row have failed; the last one") as error:
            train_with(tmp_path, Script(), events)
        assert error.value.exit_code == ExitCode.UNAVAILABLE
    failed = [10, 15, 20] if back or moment == "at_once" else [10, 15, 20, 25]
    assert [event.step for event in events.of("alarm")] == failed, "each once"


def test_the_time_of_failing_is_that_of_any_process(tmp_path, monkeypatch):
    """Or some processes would end while others go on."""
    monkeypatch.setattr(saving, "FAILED_SAVES", 3)

    def trains(step):
        """From now on another process cannot save, and its clock says that it is time to end; the clock of this one does not."""
        monkeypatch.setattr(saving.agree, "max_over_processes", lambda code: max(code, 1))

    with pytest.raises(UserError, match=r"3 saves in a row have failed; the last one: .* another process"):
        train_with(tmp_path, Script(), Events(), trains)


def test_the_first_save_compiles_nothing(tmp_path):
    """Its programs were compiled while the step was: training would wait for them, and for one of each part of a replicated leaf."""
    program = tiny_program(8, mesh={"data": 2, "fsdp": 4})
    saving._compiled.cache_clear()
    digest._compiled.cache_clear()
    prepare_saves(program.abstract_state, program.mesh)
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), program.abstract_state)
    for prepared in (saving._compiled, digest._compiled):
        (pending,) = prepared(NamedSharding(program.mesh, PartitionSpec()))._compiled.values()
        pending.result()
    checkpoints = Checkpoints(tmp_path, program.config.checkpoint, {})
    with Compilations() as compiled, jax.set_mesh(program.mesh):
        assert not_finite(state, program.mesh) == []
        checkpoints.save(1, state, {})
        checkpoints.close()
    assert [one.name for one in compiled._programs] == []
    assert checkpoints.steps() == [1]
