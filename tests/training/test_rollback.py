"""Going back: a scripted step around the real loop, with real checkpoints. What is left out is part of the data order."""

import errno
import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numbered_data import NumberedData
from tiny import tiny_config

from maxlm.base.errors import ConfigError, UserError
from maxlm.checkpoint import Checkpoints, manifest
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.data.order import batch_number
from maxlm.objectives import build_objective
from maxlm.telemetry.goodput import Goodput
from maxlm.training import meter, saving
from maxlm.training.health import Health
from maxlm.training.loop import restore_or_init, train
from maxlm.training.rollback import Journal
from maxlm.training.session import BRANCH, RollBack, Session, Start
from maxlm.training.step import Metrics, TrainState, keep_if

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
WHOLE = NamedSharding(MESH, PartitionSpec())
EVERY, TOTAL = 10, 60


class Data(NumberedData):
    """Batches that are their own numbers."""

    ahead = 2

    def batch(self, number, sharding):
        return number

    def sample_ids(self, step):
        return np.array([batch_number(step, self.left_out)])

    def token_ranges(self, ids):
        return {"store": [(int(n), int(n) + 1) for n in ids]}


class Script:
    """A program whose parameter is a digest of all batches so far, in their order, and whose loss is bad from a poisoned batch on."""

    mesh, batch_sharding, metrics, probes = MESH, None, (), ()

    def __init__(self, poison=(), loss=9.0, total=TOTAL, keep=3, **health):
        checkpoint = {"every_steps": EVERY, "keep": keep}
        self.config = tiny_config(train={"steps": total}, checkpoint=checkpoint, health={"spike": "roll_back", **health})
        self.objective = build_objective(self.config)
        self.poison, self.loss, self.trained = poison, loss, []

    def init(self):
        return jax.device_put(TrainState(jnp.int32(0), jnp.int32(0), {"w": jnp.uint32(7), "bad": jnp.int32(0)}, {}), WHOLE)

    @functools.cached_property
    def abstract_state(self):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self.init())

    def adopt(self, state):
        return state

    readable = evaluated = adopt
    placement = property(lambda self: self)

    def step(self, state, n):
        self.trained.append(n)
        return advanced(state, n, n in self.poison, self.loss)


@functools.partial(jax.jit, out_shardings=WHOLE)
def advanced(state, n, poisoned, bad_loss):
    bad = state.params["bad"] | poisoned
    loss = jnp.where(bad, bad_loss, 3.0 + 0.01 * (n * 7919 % 13)).astype(jnp.float32)
    params = {"w": state.params["w"] * jnp.uint32(31) + n.astype(jnp.uint32), "bad": bad}
    good, kept = jnp.isfinite(loss), keep_if(jnp.isfinite(loss), replace(state, params=params), state)
    state = replace(kept, step=state.step + 1, skipped=state.skipped + ~good)
    return state, Metrics({"loss": loss, "grad_norm": jnp.float32(1.0), "lr": loss, "tokens": loss, "skipped": state.skipped})


class KilledError(Exception):
    pass


class Events(list):
    """An observer that keeps the events; at the event `dies_at` the process dies."""

    dies_at = ""

    def on_event(self, event):
        self.append(event)
        if event.kind == self.dies_at:
            raise KilledError

    def on_step(self, record): ...

    def of(self, kind):
        return [event for event in self if event.kind == kind]


@pytest.fixture(autouse=True)
def no_flops(monkeypatch):
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)


def run(folder, script, leave_out=(), events=None, stop=lambda step: None, init=None, copies=0):
    """(the outcome, the events) of an attempt in `folder`, with copies in memory every `copies` steps."""
    events = Events() if events is None else events
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "c", script.config.checkpoint, {})
    if copies:
        checkpoints.add_memory(MemoryCheckpointsConfig(every_steps=copies, folder=str(folder / "memory")))
    try:
        journal = Journal(folder / "roll_backs.json", leave_out=leave_out)
        start = restore_or_init(script, checkpoints, init, journal)
        session = Session(script, Data(), None, checkpoints, events, Goodput(), stop, journal=journal, folder=folder, init=init)
        return train(session, start), events
    finally:
        checkpoints.close()


def saved_in(folder):
    return sorted(int(entry.name) for entry in (folder / "c").glob("*") if entry.name.isdigit())


def position(folder, step):
    return json.loads((folder / "c" / str(step) / "manifest" / "manifest.json").read_text())["data_position"]


def state_of(folder, step=TOTAL):
    return json.loads((folder / "c" / str(step) / "manifest" / "manifest.json").read_text())["leaves"]


def test_batch_numbers_are_those_not_left_out():
    assert [batch_number(n, ()) for n in range(4)] == [0, 1, 2, 3]
    assert [batch_number(n, (0, 1, 4)) for n in range(5)] == [2, 3, 5, 6, 7]
    left_out = (3, 4, 7, 20)
    assert [batch_number(n, left_out) for n in range(30)] == [n for n in range(34) if n not in left_out]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """(folder, outcome, events, script) of a run with poison in batch 43: the spike is seen at update 48."""
    patch = pytest.MonkeyPatch()
    patch.setattr(meter, "token_flops", lambda *_: 1.0)
    folder, script = tmp_path_factory.mktemp("rolled"), Script(poison=(43,))
    (folder / "config-until-45.yml").write_text("the settings until then")
    outcome, events = run(folder, script)
    patch.undo()
    return folder, outcome, events, script


def test_training_goes_back_before_the_spike_and_leaves_its_batches_out(rolled_back):
    folder, outcome, events, script = rolled_back
    assert (outcome.status, outcome.step) == ("done", TOTAL)
    (event,) = events.of("rollback")
    assert (event.step, event.data["cause"], event.data["batches"]) == (40, "spike", [42, 43, 44, 45, 46, 47])
    assert position(folder, TOTAL)["left_out"] == event.data["batches"] and position(folder, TOTAL)["roll_backs"] == 1
    assert [path.name for path in folder.glob("config-until-*")] == ["config-until-40.yml"]
    assert script.trained[-20:] == [40, 41, *range(48, 66)], "from step 40 to the end"


def test_all_is_as_in_a_run_that_was_given_the_list(rolled_back, tmp_path):
    folder, _, events, _ = rolled_back
    outcome, given = run(tmp_path, Script(poison=(43,)), leave_out=events.of("rollback")[0].data["batches"])
    assert (outcome.status, given.of("rollback")) == ("done", [])
    assert state_of(tmp_path) == state_of(folder)


@pytest.mark.parametrize("spare", [5, 6], ids=["short", "enough"])
def test_data_that_a_roll_back_makes_too_short_are_an_alarm_at_once(tmp_path, monkeypatch, spare):
    """Six batches are left out; a run that begins with so few is refused, and one that trains has time to be given more."""

    def check_length(data, steps):
        if batch_number(steps - 1, data.left_out) >= TOTAL + spare:
            raise ConfigError("data.mixture", ["store"], "ends at token 65 of 66", "raise `epochs`")

    monkeypatch.setattr(Data, "check_length", check_length)
    outcome, events = run(tmp_path, Script(poison=(43,)))
    assert (outcome.status, [event.step for event in events.of("rollback")]) == ("done", [40])
    told = [event for event in events.of("alarm") if event.data["cause"] == "short_data"]
    assert [event.step for event in told] == ([40] if spare == 5 else [])
    assert all("raise `epochs`" in event.data["reason"] and event not in events[: events.index(events.of("rollback")[0])] for event in told)


def test_a_page_of_evidence_shows_figures_batches_and_samples(rolled_back):
    folder, _, events, _ = rolled_back
    (page,) = folder.glob("evidence-*.md")
    text = page.read_text()
    assert page.name == f"evidence-{events.of('rollback')[0].data['from_step']}.md"
    assert "the loss jumped from 3.0" in text
    assert "| 44 | 43 | 9 | 1 |" in text and "- batch 43, windows [43]:\n  - store: tokens 43-44" in text


@pytest.mark.parametrize("dies_at", ["rollback", "alarm"])
def test_a_kill_loses_no_roll_back(rolled_back, tmp_path, dies_at):
    """At the event `rollback` it has gone back and saved nothing; at the alarm before it has not recorded anything yet."""
    events = Events()
    events.dies_at = dies_at
    with pytest.raises(KilledError):
        run(tmp_path, Script(poison=(43,)), events=events)
    assert max(saved_in(tmp_path)) == 40
    script = Script(poison=(43,))
    outcome, after = run(tmp_path, script)
    assert outcome.status == "done"
    assert len(after.of("rollback")) == (dies_at == "alarm")
    assert state_of(tmp_path) == state_of(rolled_back[0])
    assert (43 in script.trained) == (dies_at == "alarm")


def test_a_kill_after_a_save_within_the_spike_restores_the_healthy_one(tmp_path, rolled_back):
    """The spike begins with batch 48 and is seen at update 53; the state of step 50 is saved within it, and is the newest."""
    script = Script(poison=(48,), loss=4.5, total=60)

    def stop(step):
        if step == 52:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, script, stop=stop)
    assert position(tmp_path, 50)["healthy"] is False and position(tmp_path, 40)["healthy"] is True
    again, events = Script(poison=(48,), loss=4.5, total=60), Events()
    assert run(tmp_path, again, events=events)[0].status == "done"
    assert again.trained[0] == 40
    assert "training was in trouble when it was saved" in str(events.of("restore")[0].data["passed_over"])
    assert [event.step for event in events.of("rollback")] == [40]
    assert saved_in(tmp_path)[-1] == 60


def test_the_last_healthy_checkpoint_is_never_deleted(tmp_path):
    """A spike that the policy waits long to answer: unhealthy states are saved meanwhile, and only two are kept."""
    script = Script(poison=(22,), loss=4.5, keep=1, spike_steps=30, total=60)
    kept = {}

    def stop(step):
        kept.setdefault(step, saved_in(tmp_path))  # steps come again after the roll back

    outcome, events = run(tmp_path, script, stop=stop)
    assert all(20 in kept[step] for step in range(31, 52)), "the others were saved within the spike"
    assert 30 not in kept[51]
    assert [event.step for event in events.of("rollback")] == [20]
    assert outcome.status == "done"


def test_a_spike_before_the_first_checkpoint_begins_anew(tmp_path):
    script = Script(poison=(25,), total=40, keep=3)
    script.config = script.config.model_copy(update={"checkpoint": script.config.checkpoint.model_copy(update={"every_steps": 35})})
    outcome, events = run(tmp_path, script)
    assert outcome.status == "done"
    assert [event.step for event in events.of("rollback")] == [0]
    assert saved_in(tmp_path) == [35, 40]


@pytest.mark.parametrize("dies_at", [4, 12])
def test_a_kill_after_a_return_to_the_beginning_costs_no_more_than_the_steps_since_the_newest_copy(tmp_path, dies_at):
    """Copies of the steps that were taken back are newer: they must not stay in the place of those that are made now."""
    checkpoint = {"every_steps": 35, "keep": 3}
    whole, again = Script(poison=(25,), total=40), Script(poison=(25,), total=40)
    for script in (whole, again):
        script.config = script.config.model_copy(update={"checkpoint": script.config.checkpoint.model_copy(update=checkpoint)})
    events = Events()

    def stop(step):
        if events.of("rollback") and step == dies_at:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path / "killed", whole, events=events, stop=stop, copies=5)
    assert [event.step for event in events.of("rollback")] == [0]
    outcome, after = run(tmp_path / "killed", again, copies=5)
    assert (outcome.status, after.of("rollback"), again.trained[0]) == ("done", [], dies_at // 5 * 5)
    whole.config = again.config
    assert run(tmp_path / "whole", whole)[0].status == "done"
    assert state_of(tmp_path / "killed", 40) == state_of(tmp_path / "whole", 40)


@pytest.fixture
def failing(monkeypatch):
    """Steps whose saves fail."""
    steps, describe = set(), manifest.Manifest.to_text

    def text(self):
        if self.step in steps:
            raise OSError(errno.EROFS, "Read-only file system")
        return describe(self)

    monkeypatch.setattr(manifest.Manifest, "to_text", text)
    return steps


@pytest.mark.parametrize(("poison", "status"), [(4, "done"), (43, "unhealthy")])
def test_a_run_without_a_checkpoint_does_not_go_back_over_all_it_has_trained(tmp_path, failing, poison, status):
    """Only the first interval may be lost by that, as it may if saves succeed."""
    failing |= {10, 20, 30, 40}
    outcome, events = run(tmp_path, Script(poison=(poison,), total=60))
    assert outcome.status == status, outcome.message
    assert [event.step for event in events.of("rollback")] == ([0] if status == "done" else [])
    assert status == "done" or "no checkpoint has been saved" in outcome.message


@pytest.mark.parametrize("stopped", [True, False])
def test_a_save_that_failed_before_a_roll_back_is_told_once_and_not_held_against_the_end(tmp_path, failing, monkeypatch, stopped):
    failing |= {40}
    backs, events = [], Events()
    sleep = saving.time.sleep
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: pytest.fail("a save is tried again") if seconds >= 1 else sleep(seconds))

    def stop(step):
        if events.of("rollback") and not backs:
            backs.append(step)
            failing.clear()
            return "SIGTERM" if stopped else None
        return None

    outcome, events = run(tmp_path, Script(poison=(43,)), events=events, stop=stop)
    assert (outcome.status, outcome.step, backs) == (("preempted", 30, [30]) if stopped else ("done", TOTAL, [30]))
    assert [event.step for event in events.of("alarm") if event.data["cause"] == "save_failed"] == [40]


@pytest.mark.parametrize(("poison", "status"), [(42, "done"), (40, "unhealthy")])
def test_a_branch_goes_back_to_where_it_began_and_no_further(tmp_path, poison, status):
    """The batch before the spike is left out, too: of a spike in the first update, one that the other run was trained on."""
    run(tmp_path / "source", Script(total=40))
    train = Script().config.train.model_copy(update={"branch_from": BranchFromConfig(path="source", step=40)})
    script = Script(poison=(poison,))
    script.config = script.config.model_copy(update={"train": train})

    def init():
        source = Checkpoints(tmp_path / "source" / "c", script.config.checkpoint, {})
        restored = source.restore(script.abstract_state, 40)
        return Start(restored.state, 40, {"source": BRANCH}, restored.data_position)

    outcome, events = run(tmp_path / "branch", script, init=init)
    assert outcome.status == status, outcome.message
    assert [event.step for event in events.of("rollback")] == ([40] if status == "done" else [])
    assert status == "done" or "this run begins at step 40, where it branches off" in outcome.message


def test_limits_end_the_run_with_evidence(tmp_path):
    """Poison everywhere from batch 33 on: going back does not help."""
    outcome, events = run(tmp_path, Script(poison=range(33, 999), recent_roll_backs=2))
    assert outcome.status == "unhealthy"
    assert len(events.of("rollback")) == 2
    assert "rolled back 2 times in 1,000 steps, and health.recent_roll_backs = 2" in outcome.message
    assert "the newest checkpoint is of step 30" in outcome.message
    pages = [page.read_text() for page in tmp_path.glob("evidence-*.md")]
    assert any("training was stopped" in page and page.count("- from step") == 2 for page in pages)
    again, _ = run(tmp_path, Script(poison=range(33, 999), recent_roll_backs=2))
    assert again.status == "unhealthy", "limits hold over restarts"
    assert len(json.loads((tmp_path / "roll_backs.json").read_text())["roll_backs"]) == 2


def test_updates_that_are_not_finite_go_back(tmp_path):
    outcome, events = run(tmp_path, Script(poison=range(33, 45), loss=float("nan"), spike="warn", not_finite="roll_back"))
    assert outcome.status == "done"
    assert [event.data["cause"] for event in events.of("rollback")] == ["not_finite", "not_finite"][: len(events.of("rollback"))]
    assert set(events.of("rollback")[0].data["batches"]) >= set(range(33, 43))


def test_a_request_without_batches_trains_on_the_same_again(tmp_path, monkeypatch):
    """As of a check of the state that finds damage: the data are not to blame."""
    update, asked = Health.update, []

    def found(health, step, *figures, **more):
        if step == 33 and not asked:
            asked.append(health.request(RollBack("a flipped bit", "corrupted", before=25)))
        return update(health, step, *figures, **more)

    monkeypatch.setattr(Health, "update", found)
    script = Script(total=40)
    outcome, events = run(tmp_path, script)
    assert (outcome.status, script.trained[-20:]) == ("done", list(range(20, 40)))
    assert [(event.step, event.data["batches"]) for event in events.of("rollback")] == [(20, [])]


def test_batches_to_leave_out_must_lie_ahead(tmp_path):
    run(tmp_path, Script(total=20))
    with pytest.raises(ConfigError, match=r"health.leave_out = \[5\]: batch 5 is among those that the checkpoint of step 20"):
        run(tmp_path, Script(), leave_out=(5,))
    script = Script()
    run(tmp_path, script, leave_out=(25,))
    assert script.trained == [n for n in range(20, 61) if n != 25]
    again = Script(total=65)
    run(tmp_path, again)
    assert again.trained == [61, 62, 63, 64, 65], "the list is in the checkpoint"


def test_a_damaged_journal_is_refused(tmp_path):
    (tmp_path / "roll_backs.json").write_text('{"roll_backs": [{}]}')
    with pytest.raises(UserError, match=r"roll_backs.json does not list the roll backs"):
        run(tmp_path, Script())
