"""Silent corruption: a flipped bit in any copy, and work that a device does wrongly, are found and the device is named; nothing else is."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bit_flips import Flip, with_flip
from jax.sharding import NamedSharding, PartitionSpec
from tiny import copy_of, first_state, tiny_batch, tiny_program

from maxlm.base.errors import ConfigError
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.sections.integrity import IntegrityConfig
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import cell_replay, findings
from maxlm.training.cell_replay import FURTHER, ROTATIONS, CellReplay, comparable, erratic, judge_cells, wrong_work
from maxlm.training.findings import Findings, Unsettled, device_names
from maxlm.training.integrity import Integrity, PossibleChecks
from maxlm.training.replicas import Element, Replicas, Verdict, judge_by, judge_copies
from maxlm.training.step import in_one_pass


@pytest.fixture(scope="module")
def copied():
    """A program whose matrices have four copies, its state after two updates, and the comparison of its copies."""
    program = tiny_program(8, mesh={"data": 4, "fsdp": 2}, integrity={"every_steps": 1})
    state = first_state(program)
    with jax.set_mesh(program.mesh):
        for n in range(2):
            state, _ = program.step(state, jax.device_put(tiny_batch(n), program.batch_sharding))
    return program, state, Replicas(program.mesh, program.abstract_state)


def differing(replicas, state):
    return [name for name, _ in replicas.unequal(replicas.sums(state))]


def test_copies_of_a_trained_state_agree(copied):
    _, state, replicas = copied
    assert differing(replicas, state) == []
    assert set(replicas.names) == set(named_leaves(state)), "with `data` every leaf has copies"


@pytest.mark.parametrize("seed", range(5))
def test_any_flipped_bit_is_found_and_its_device_named(copied, seed):
    """Ten random bits a seed, of any leaf, element and device: the leaf is found, the device alone is named, and the value is located."""
    program, state, replicas = copied
    rng = np.random.default_rng(seed)
    for _ in range(10):
        name = str(rng.choice(replicas.names))
        size = math.prod(named_leaves(state)[name].sharding.shard_shape(named_leaves(state)[name].shape))
        position = int(rng.integers(8))
        flip = Flip(0, name, program.mesh.devices.flat[position].id, int(rng.integers(size)), int(rng.integers(32)))
        bad = with_flip(state, flip)
        ((found, values),) = replicas.unequal(replicas.sums(bad))
        assert (found, judge_copies(values)) == (name, Verdict(odd=frozenset({position})))


# What is done after a disagreement: no further program but those that locate an element.


class Checks:
    """`Integrity` over the shared comparison, and the alarms that it raised."""

    def __init__(self, copied, folder=None, replay=None, every=1, start=0, **settings):
        program, _, replicas = copied
        self.alarms = []
        self.devices = device_names(program.mesh, ["host-a"])
        run = RunDirectory(folder or Path("nowhere"), primary=folder is not None)
        self.findings = Findings(findings.read(run), run)
        section = IntegrityConfig(every_steps=every, **settings)
        self.checks = Integrity(section, replicas, replay, self.devices, self.findings, start, self.alarms.append)

    def check(self, step, state, now=False):
        return self.checks.check(step, state, now=now)


def flip_of(copied, leaf="params.final_norm.scale_D", position=5, **changes):
    program, _, _ = copied
    return Flip(**{"step": 0, "leaf": leaf, "device": program.mesh.devices.flat[position].id, "element": 3, "bit": 20, **changes})


def test_a_comparison_is_read_two_steps_later_or_at_once_before_a_save(copied, tmp_path):
    _, state, _ = copied
    bad = with_flip(state, flip_of(copied))
    late = Checks(copied, every=2)
    assert [late.check(step, one) for step, one in enumerate([state, state, bad, bad])] == [None] * 4
    found = late.check(4, bad)
    assert found.roll_back and found.roll_back.before == 0 and found.roll_back.cause == "corrupted"
    at_once = Checks(copied, tmp_path, every=100, start=7)
    assert at_once.check(8, state) is None and at_once.check(9, state, now=True) is None
    found = at_once.check(12, bad, now=True)
    assert found.roll_back and found.roll_back.before == 9
    assert "params.final_norm.scale_D" in found.message and "device 5 (host host-a, process 0, its device 5)" in found.message
    (alarm,) = at_once.alarms
    assert (alarm.kind, alarm.data["cause"], alarm.data["devices"], alarm.data["certain"]) == ("alarm", "corrupted", [5], True)
    unhealthy = json.loads((tmp_path / "unhealthy_hosts.json").read_text())["hosts"]
    assert unhealthy["host-a"]["devices"] == [5] and unhealthy["host-a"]["strikes"] == 1


def test_a_device_named_twice_ends_the_run_also_after_a_restart(copied, tmp_path):
    _, state, _ = copied
    assert Checks(copied, tmp_path).check(1, with_flip(state, flip_of(copied)), now=True).roll_back
    other = Checks(copied, tmp_path).check(3, with_flip(state, flip_of(copied, position=2)), now=True)
    assert other.roll_back, "another device"
    again = Checks(copied, tmp_path).check(9, with_flip(state, flip_of(copied, leaf="step", bit=0, element=0)), now=True)
    assert again.roll_back.final and again.status == "corrupted" and "replace host host-a" in again.message


def test_training_that_has_gone_back_is_compared_from_there(copied):
    _, state, _ = copied
    checks = Checks(copied, every=5)
    assert checks.check(5, state) is None and checks.check(7, state) is None  # read: agreed at 5
    assert checks.check(10, state) is None  # running
    assert checks.check(2, state) is None, "what was running belongs to steps that are gone"
    found = checks.check(4, with_flip(state, flip_of(copied)), now=True)
    assert found.roll_back and found.roll_back.before == 2


def test_many_devices_are_no_broken_device(copied):
    """Seven of eight copies that differ, each in its own way: nobody gets a strike."""
    _, state, _ = copied
    for position in range(7):
        state = with_flip(state, flip_of(copied, position=position, element=position))
    checks = Checks(copied)
    found = checks.check(1, state, now=True)
    assert found.roll_back and not checks.findings.record.strikes


def test_of_two_copies_the_wrong_one_is_known_when_the_step_is_computed_again(copied, tmp_path):
    """With `data` 2 nobody is named at first. Once training has come there again, the copy furthest from the right value is."""
    mesh = tiny_program(4, mesh={"data": 2, "fsdp": 2}).mesh
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    state = {"step": jax.device_put(jnp.int32(6), NamedSharding(mesh, PartitionSpec())), "w": jax.device_put(jnp.arange(1.0, 65), rows)}
    two = SimpleNamespace(mesh=mesh), state, Replicas(mesh, state)
    right = Checks(two, tmp_path)
    found = right.check(6, with_flip(state, flip_of(two, position=3, leaf="w", element=17, bit=18)), now=True)
    assert found.roll_back and found.message.startswith("one of device 1 (") and ", device 3 (" in found.message
    assert not right.findings.record.strikes
    restarted = Checks(two, tmp_path, every=100, start=5)
    unsettled = restarted.findings.record.unsettled
    assert unsettled is not None and (unsettled.step, unsettled.element.place) == (6, 17)
    assert restarted.check(5, state) is None and restarted.check(6, state) is None
    assert restarted.findings.record.strikes == {"host-a:3": 1} and restarted.findings.record.unsettled is None
    assert "before training went back" in restarted.alarms[0].data["reason"]


def test_copies_are_judged_by_what_is_held_alone():
    assert judge_copies({0: "a", 1: "a", 2: "b"}) == Verdict(odd=frozenset({2}))
    assert judge_copies({0: "a", 1: "b"}) == Verdict(suspects=frozenset({0, 1}))
    # a wrong norm of device 5 changed what all at its place along `tensor` computed: theirs is held by several
    assert judge_copies({0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "c"}) == Verdict(odd=frozenset({5}))
    assert judge_copies({0: "a", 1: "b", 2: "a", 3: "c"}) == Verdict(suspects=frozenset({1, 3}))
    assert judge_copies({0: "a", 1: "a", 2: "b", 3: "b"}) == Verdict(suspects=frozenset({0, 1, 2, 3}))


@pytest.mark.parametrize(("right", "odd"), [(1.0, {1}), (1.0001, {1}), (1.6, ()), (2.0, {0}), (3e38, ())])
def test_of_two_values_the_one_far_away_is_wrong(right, odd):
    verdict = judge_by(right, {0: 1.0, 1: 2.0})
    assert verdict == (Verdict(odd=frozenset(odd)) if odd else Verdict(suspects=frozenset({0, 1})))
    assert judge_by(1.0, {0: 3.4e38, 1: 1.0}) == Verdict(odd=frozenset({0})), "a NaN is the largest number"


# An update computed twice.


def test_an_update_with_two_results_goes_back_to_before_it(copied):
    """A wrong sum that all devices apply is no difference between copies; computed twice, it is one."""
    program, state, replicas = copied
    batch = jax.device_put(tiny_batch(2), program.batch_sharding)
    wrong = iter([False, False, True, False])

    def advance(state, batch):
        state, metrics = program.step(state, batch)
        return (with_flip(state, flip_of(copied, all_copies=True)) if next(wrong) else state), metrics

    with jax.set_mesh(program.mesh):
        once, _ = program.step(copy_of(state), batch)
        checks = Checks(copied, every=100, repeat_every=2)
        assert checks.check(1, state) is None
        twice, metrics = checks.checks.update(advance, copy_of(state), batch)
        assert checks.check(2, twice) is None and np.isfinite(metrics.loss)
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get((once, twice)))
        checks.check(3, twice)
        after, _ = checks.checks.update(advance, twice, batch)
    assert differing(replicas, after) == []
    found = checks.check(4, after)
    assert found.roll_back and found.roll_back.before == 3 and "computed the update twice with two results, at step 4" in found.message
    assert checks.check(5, after) is None and not checks.findings.record.strikes


# Replay.


def votes(cells, wrong=lambda cell, rotation: 0):
    """Sums of a replay whose cell `cell` adds `wrong` to what it computes."""
    sums = np.zeros((4, cells, 3, 2), np.uint32)
    for rotation in range(4):
        for cell in range(cells):
            sums[rotation, cell] = 100 + (cell - rotation) % cells + wrong(cell, rotation)
    return sums


@pytest.mark.parametrize("cells", [2, 3, 4, 8, 64])
def test_cells_are_judged_by_those_that_repeat_their_work(cells):
    assert wrong_work(votes(cells)) == []
    once = votes(cells, lambda cell, rotation: int(cell == 1 and rotation == 1))
    assert wrong_work(once[:2]) == [0]
    assert judge_cells(once) == Verdict(odd=frozenset({1}))
    always = votes(cells, lambda cell, rotation: int(cell == 1))
    assert comparable(always[:2]) and not erratic(always) and not erratic(once)
    assert judge_cells(always) == (Verdict(suspects=frozenset({0, 1})) if cells == 2 else Verdict(odd=frozenset({1})))


def test_a_platform_that_is_not_deterministic_is_no_broken_device():
    rng = np.random.default_rng(0)
    assert not comparable(votes(8, lambda cell, rotation: int(rng.integers(1000)))[:2])


class Scripted:
    """A replay of these sums on cells of two devices each."""

    def __init__(self, sums):
        self.sums, self.ran = sums, []

    def run(self, number, state, batch, rotations=ROTATIONS):
        self.ran.append((number, rotations))
        return self.sums[list(rotations)]

    def devices(self, cell):
        return frozenset({2 * cell, 2 * cell + 1})


def test_a_wrong_replay_goes_back_to_the_last_that_agreed(copied):
    _, state, _ = copied
    good = Scripted(votes(4))
    checks = Checks(copied, replay=good, replay_every=3)
    assert [checks.checks.replay(step, state, None) for step in range(1, 7)] == [None] * 6
    assert good.ran == [(1, ROTATIONS), (2, ROTATIONS)], "two rotations are enough, and the layers change"
    good.sums = votes(4, lambda cell, rotation: int(cell == 1))
    found = checks.checks.replay(9, state, None)
    assert found.roll_back and found.roll_back.before == 6 and good.ran[-1] == (3, FURTHER)
    assert checks.alarms[0].data["devices"] == [2, 3]


@pytest.mark.parametrize(("cells", "runs"), [(8, 1), (2, 2)])
def test_a_platform_that_is_not_deterministic_ends_the_replay_with_an_alarm(copied, cells, runs):
    """Of two cells that disagree only the same rows on the same cell tell: both would have to be broken."""
    _, state, _ = copied
    rng = np.random.default_rng(0)
    replay = Scripted(votes(cells, lambda cell, rotation: int(rng.integers(1000))))
    checks = Checks(copied, replay=replay, replay_every=1)
    assert [checks.checks.replay(step, state, None) for step in (1, 2)] == [None, None]
    assert len(replay.ran) == runs
    assert [alarm.data["cause"] for alarm in checks.alarms] == ["replay_not_comparable"]


def one_wrong_bit(loss, *arguments):
    """`in_one_pass`, but cell 2 flips the lowest bit of one element of its gradient."""
    total, grads = in_one_pass(loss, *arguments)
    cell = jax.lax.axis_index(("data", "fsdp"))
    leaves, structure = jax.tree.flatten(grads)
    bits = jax.lax.bitcast_convert_type(leaves[-1].reshape(-1)[5], jnp.uint32) ^ jnp.uint32(1)
    wrong = leaves[-1].reshape(-1).at[5].set(jax.lax.bitcast_convert_type(bits, jnp.float32)).reshape(leaves[-1].shape)
    return total, jax.tree.unflatten(structure, [*leaves[:-1], jnp.where(cell == 2, wrong, leaves[-1])])


def test_one_bit_of_a_gradient_is_seen_by_the_replay(copied, monkeypatch):
    """What cells compute agrees to the bit on other devices, and one flipped bit on one cell does not. Copies of the state stay equal."""
    program, state, _ = copied
    batch = jax.device_put(tiny_batch(0), program.batch_sharding)
    monkeypatch.setattr(cell_replay, "in_one_pass", one_wrong_bit)
    replay = CellReplay(program)
    sums = np.concatenate([replay.run(0, state, batch), replay.run(0, state, batch, FURTHER)])
    assert wrong_work(sums[:2]) == [1, 2]
    assert judge_cells(sums) == Verdict(odd=frozenset({2}))
    for work in range(8):  # on every other cell the same
        assert len({sums[r, (work + r) % 8].tobytes() for r in range(4) if (work + r) % 8 != 2}) == 1
    assert len({sums[0, cell].tobytes() for cell in range(8)}) == 8, "each has rows of its own"
    assert not np.array_equal(sums[0], replay.run(1, state, batch)[0]), "other layers"


def test_cells_are_the_devices_at_one_place_along_the_axes_of_batches():
    replay = CellReplay(tiny_program(8, mesh={"data": 2, "fsdp": 2, "tensor": 2}))
    assert [replay.devices(cell) for cell in range(replay.cells)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


# Settings and injection.


@pytest.mark.parametrize(
    ("mesh", "section", "said"),
    [
        ({"fsdp": 8}, {}, "integrity = set: no device .* holds a copy .*; set integrity.replay_every"),
        ({"fsdp": 1}, {}, "set integrity.repeat_every"),
        ({"tensor": 4, "fsdp": 1}, {"replay_every": 5}, "integrity.replay_every = 5: needs several devices"),
        ({"fsdp": 8}, {"replay_every": 5}, None),
        ({"data": 8, "fsdp": 1}, {}, None),
    ],
)
def test_a_check_that_can_compare_nothing_is_refused(mesh, section, said):
    program = tiny_program(math.prod(mesh.values()), mesh=mesh, integrity=section)
    checks = PossibleChecks(program.config.integrity, None)
    if said is None:
        checks.check_mesh(program)
    else:
        with pytest.raises(ConfigError, match=said):
            checks.check_mesh(program)


def test_a_record_that_cannot_be_read_is_begun_anew(tmp_path):
    run = RunDirectory(tmp_path, primary=True)
    for text in ("", "[]", '{"unsettled": {"step": 3}}', '{"findings": 3}'):
        (tmp_path / "integrity.json").write_text(text)
        assert findings.read(run) == {}
    kept = Findings({}, run)
    kept.record.unsettled = Unsettled(6, Element("params.a", 17, {1: 0.5, 3: -0.25}))
    kept.write()
    assert Findings(findings.read(run), run).record == kept.record


# Every layout.

EXPERTS = {"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64, "n_shared": 1}}}
LAYOUTS = {
    "data x fsdp x tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "fsdp": ({"fsdp": 8}, {}),
    "stage": ({"data": 2, "stage": 2, "fsdp": 2}, {"train": {"microbatches": 4}}),
    "expert": ({"data": 2, "fsdp": 2, "expert": 2}, EXPERTS),
    "zero 1": ({"data": 2, "fsdp": 4, "zero": 1}, {"train": {"microbatches": 2}}),
    "zero 2": ({"data": 2, "fsdp": 4, "zero": 2}, {}),
    "workers": ({"data": 2, "fsdp": 4}, {"diloco": {"workers": 2, "every": 2}}),
    "average": ({"data": 4, "tensor": 2, "fsdp": 1}, {"ema": {"decay": 0.9}}),
    "context": ({"data": 2, "context": 2, "fsdp": 2}, {}),
    "bfloat16": ({"data": 2, "fsdp": 2, "tensor": 2}, {"precision": {"compute": "bfloat16"}}),
    "muon": ({"data": 2, "fsdp": 4}, {"optimizer": {"name": "muon"}}),
    "adapters": ({"data": 2, "fsdp": 2, "tensor": 2}, {"model": {"lora": {"rank": 4}}, "train": {"start_from": {"path": "unused"}}}),
}


def test_one_device_has_no_copies_to_compare():
    mesh = jax.make_mesh((1,), ("fsdp",))
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    replicas = Replicas(mesh, {"w": leaf})
    sums = replicas.sums({"w": jnp.ones(4)})
    assert replicas.names == () and sums.shape == (1, 0, 2) and replicas.unequal(sums) == []


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_raises_a_false_alarm(layout):
    """Every copy agrees after every step, and so does all work that is replayed; with workers, what differs by design is no copy."""
    mesh, sections = LAYOUTS[layout]
    program = tiny_program(8, mesh=mesh, **sections)
    replicas, replay, state = Replicas(program.mesh, program.abstract_state), CellReplay(program), program.init()
    assert len(replicas.names) < len(jax.tree.leaves(state)) if layout in ("fsdp", "workers") else replicas.names
    with jax.set_mesh(program.mesh):
        for n in range(4):
            batch = jax.device_put(tiny_batch(n), program.batch_sharding)
            assert wrong_work(replay.run(n, state, batch)) == []
            state, _ = program.step(state, batch)
            assert differing(replicas, state) == []
