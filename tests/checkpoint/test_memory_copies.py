"""Copies of the state in host memory: bit for bit on any layout, never a damaged or a foreign one, and never more than two."""

import errno
import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import IDENTITY, bits, layout, make_state

from maxlm.base.errors import ConfigError, ExitCode, UserError
from maxlm.checkpoint import Checkpoints, host_copies, memory, snapshot
from maxlm.checkpoint.memory import daly, steps_between
from maxlm.checkpoint.snapshot import failure_domains, peer_ring
from maxlm.checkpoint.tiles import Tiling, bounded, overlap
from maxlm.config.schema import CheckpointConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.training.rollback import Journal

PUT, PUT_ELSEWHERE = layout(4, 2), layout(2, 2)


def state_of(step: int, put=PUT):
    state = make_state(step)
    del state["key"]
    return put({**state, "step": jnp.int32(step)})


def opened(work: Path, identity: dict[str, str] | None = None, **config) -> Checkpoints:
    """The checkpoints of a run as a process that starts finds them; its copies are in `memory/`."""
    checkpoints = Checkpoints(work / "checkpoints", CheckpointConfig(), identity or IDENTITY)
    checkpoints.add_memory(MemoryCheckpointsConfig(**{"every_steps": 1, "folder": str(work / "memory"), **config}))
    return checkpoints


def entries(folder: Path) -> list[str]:
    """Names in the folder of the one run, without marks of processes."""
    return sorted(entry.name for entry in folder.glob("memory/*/*/*") if not entry.name.startswith(".lease"))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory) -> tuple[Path, dict[int, list[bytes]]]:
    """A run that died after copies of steps 4, 5 and 6 and a checkpoint of step 4, each of a state that the next step overwrote."""
    folder = tmp_path_factory.mktemp("crashed")
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    checkpoints, state, expected = opened(folder), state_of(4), {}
    for number in (4, 5, 6):
        expected[number] = bits(state)
        if number == 4:
            checkpoints.save(4, state, {"next_step": 4})
            checkpoints.wait()
        checkpoints.memory.save(number, state, {"next_step": number, "health": {"best": 1.25}})
        state = step(state)
    checkpoints.memory.close(remove=False)
    return folder, expected


@pytest.fixture
def work(crashed, tmp_path) -> Path:
    """A copy of that run's folders."""
    shutil.copytree(crashed[0], tmp_path / "work", copy_function=shutil.copy2)
    number = tmp_path / "work" / "checkpoints" / ".memory-run"
    lines = number.read_text().splitlines()[:1] + memory._directory_lines(number.parent)  # as if the run had been there
    number.write_text("\n".join(lines))
    return tmp_path / "work"


def stay(work: Path) -> str:
    """Let a run claim its folder, and die; return its number."""
    claimed = opened(work).memory
    number = claimed._claimed().run
    claimed.close(remove=False)
    return number


@pytest.mark.parametrize("put", [PUT, PUT_ELSEWHERE])
def test_the_newest_copy_is_restored_bit_for_bit_on_any_mesh_though_the_state_was_donated(crashed, put):
    folder, expected = crashed
    wanted = state_of(99, put)
    restored = opened(folder).restore(wanted)
    assert (restored.step, restored.source, restored.data_position) == (6, "memory", {"next_step": 6, "health": {"best": 1.25}})
    assert bits(restored.state) == expected[6]
    assert jax.tree.all(jax.tree.map(lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), restored.state, wanted))


def test_two_copies_are_kept_and_nobody_else_may_read_them(crashed):
    folder, _ = crashed
    assert entries(folder) == ["5-0", "6-0"], "4 went when 5 was complete in all processes"
    for path in (folder / "memory").rglob("*"):
        assert path.is_dir() <= (path.stat().st_mode & 0o077 == 0)


@pytest.mark.parametrize("budget", [2000, 300])
def test_where_device_memory_is_short_the_state_is_copied_in_parts(tmp_path, monkeypatch, budget):
    """In 2000 bytes of a device several groups fit; in 300 the largest leaf does not, and is fetched before the next step overwrites it."""
    monkeypatch.setattr(snapshot, "_agreed_budget", lambda: budget)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    checkpoints, state, expected = opened(tmp_path), state_of(0), []
    for number in range(3):
        expected = bits(state)
        checkpoints.memory.save(number, state, {"next_step": number})
        state = step(state)
    checkpoints.memory.close(remove=False)
    assert not checkpoints.memory.take_failure()
    restored = opened(tmp_path).restore(state_of(99))
    assert (restored.step, restored.source) == (2, "memory")
    assert bits(restored.state) == expected


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def of_another_step(path: Path) -> None:
    shutil.rmtree(path.parent)
    shutil.copytree(path.parent.with_name("5-0"), path.parent)


def forged(path: Path) -> None:
    """Other numbers, with checksums that fit them, as from a program that writes garbage: the digest of the devices tells."""
    manifest = path.with_name("manifest.json")
    body = json.loads(manifest.read_text())
    del body["sha256"]
    flip(path)
    content = np.fromfile(path, np.uint8)
    for places in body["tiles"].values():
        for place in places:
            place[3] = host_copies.zlib.crc32(content[place[1] : place[1] + place[2]].data)
    manifest.write_text(json.dumps({**body, "sha256": host_copies.hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}))


DAMAGE = {
    "flipped bit": (flip, "6-0 is damaged: the bytes of"),
    "cut": (lambda path: os.truncate(path, 1000), "another length"),
    "no data": (lambda path: path.unlink(), "6-0 in .* is not used"),
    "flipped manifest": (lambda path: flip(path.with_name("manifest.json")), "6-0 in .* is not used: its manifest"),
    "empty manifest": (lambda path: path.with_name("manifest.json").write_text(""), "manifest is unreadable"),
    "renamed": (of_another_step, "its manifest is of step 5"),
    "not complete": (lambda path: path.parent.rename(path.parent.with_name(".draft-6")), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_named_and_the_one_before_is_restored(crashed, work, damage, caplog):
    harm, said = DAMAGE[damage]
    (data,) = work.glob("memory/*/*/6-0/data")
    harm(data)
    with caplog.at_level(logging.WARNING):
        restored = opened(work).restore(state_of(99))
    assert (restored.step, restored.source) == (5, "memory")
    assert bits(restored.state) == crashed[1][5]
    assert list(restored.skipped) == caplog.messages
    assert not said or any(host_copies.re.search(said, line) for line in restored.skipped), restored.skipped


def test_a_copy_of_the_wrong_numbers_is_never_used(crashed, work, caplog):
    for data in work.glob("memory/*/*/*/data"):
        forged(data)
    restored = opened(work).restore(state_of(99))
    assert (restored.step, restored.source) == (4, "checkpoint")
    assert bits(restored.state) == crashed[1][4]
    assert "the copy of step 6 in memory is not used: the bytes of" in caplog.text


def test_copies_of_another_run_or_of_other_settings_are_not_used(crashed, work, caplog):
    assert opened(work, identity={**IDENTITY, "model.d_model": "17"}).latest() == 4
    assert "it was written with other settings" in caplog.text
    (work / "checkpoints" / ".memory-run").unlink()  # begun anew in the same place
    shutil.rmtree(work / "checkpoints" / "4")
    assert opened(work).latest() is None


def test_a_run_directory_that_was_copied_leaves_the_first_run_its_copies(crashed, work, caplog):
    """And begins a number of its own."""
    stay(work)
    shutil.copytree(work / "checkpoints", work / "variant" / "checkpoints")
    (work / "variant" / "memory").symlink_to(work / "memory")
    first = opened(work)
    assert first.memory.newest().step == 6
    variant = opened(work / "variant")
    assert variant.restore(state_of(99)).source == "checkpoint"
    assert f"was made in {str(work / 'checkpoints')!r}, which this directory was copied from" in caplog.text
    variant.memory.save(5, state_of(5), {"next_step": 5})
    variant.close(remove_copies=True)
    restored = opened(work).restore(state_of(99))
    assert (restored.source, bits(restored.state)) == ("memory", crashed[1][6])
    first.memory.close(remove=False)


def test_a_run_directory_that_was_renamed_has_its_copies_and_one_at_its_old_path_has_not(work, caplog):
    """A disk that is shared may be mounted elsewhere, and containers see their own directories at the same path."""
    stay(work)
    work.rename(work.parent / "renamed")
    shutil.copytree(work.parent / "renamed", work)
    assert opened(work).latest() == 4
    assert "which this directory was copied from" in caplog.text
    assert opened(work.parent / "renamed").memory.newest().step == 6


def test_copies_that_a_process_has_found_are_its_own_before_it_writes_any(work):
    """Between these, a run that starts beside it must not take them for those of a run that is over."""
    (left,) = (work / "memory").glob("*/*")
    os.utime(left, (time.time() - 3600,) * 2)
    found = opened(work)
    assert found.memory.newest().step == 6
    host_copies.RunFolder(str(work / "memory"), "another").claim(0)
    assert found.restore(state_of(99)).source == "memory"
    found.memory.close(remove=False)


def test_runs_that_start_at_the_same_time_leave_each_other_their_folders(tmp_path, monkeypatch):
    """One starts while the other has made its folder and not marked it; and, an hour after that, takes it for one that nobody uses."""
    one, other = (host_copies.RunFolder(str(tmp_path), name) for name in ("one", "other"))
    new_lease, hours = one._new_lease, [0, 1, 0]

    def interrupted(owner):
        with monkeypatch.context() as later:
            now = time.time() + 3600 * hours.pop(0)
            later.setattr(host_copies.time, "time", lambda: now)
            other.claim(0)
        return new_lease(owner)

    monkeypatch.setattr(one, "_new_lease", interrupted)
    one.claim(0)
    assert hours == [1, 0]
    one.release(remove=False)
    one.claim(0)
    assert (hours, one.path.exists()) == ([], True)


def test_an_unhealthy_or_an_older_copy_is_passed_over(work, caplog):
    checkpoints = opened(work)
    checkpoints.memory.save(7, state_of(7), {"next_step": 7, "healthy": False})
    checkpoints.memory.close(remove=False)
    assert opened(work).latest() == 6
    assert "training was not healthy" in caplog.text
    checkpoints = opened(work)
    checkpoints.save(8, state_of(8), {"next_step": 8})
    checkpoints.wait()
    restored = opened(work).restore(state_of(99))
    assert (restored.step, restored.source) == (8, "checkpoint")


@pytest.mark.parametrize("newest, older", [(8, [4]), (8, []), (6, [4])])
def test_a_copy_takes_the_place_of_a_newer_checkpoint_that_is_damaged(crashed, work, newest, older):
    """Whether or not there are older checkpoints, and if the copy is of the same step."""
    checkpoints = opened(work)
    checkpoints.save(newest, state_of(newest), {"next_step": newest})
    checkpoints.wait()
    for data in (work / "checkpoints" / str(newest)).rglob("d/*"):
        data.write_bytes(bytes(data.stat().st_size))
    if not older:
        shutil.rmtree(work / "checkpoints" / "4")
    checkpoints = opened(work)
    restored = checkpoints.restore(state_of(99))
    assert (restored.step, restored.source) == (6, "memory")
    assert bits(restored.state) == crashed[1][6]
    assert [line.partition(":")[0] for line in restored.skipped] == [f"checkpoint {newest} is damaged"]
    assert checkpoints.save(9, state_of(9), {"next_step": 9}) and checkpoints.wait() is None
    assert checkpoints.steps() == [*older, 9], "the damaged one is aside"


def test_a_run_that_has_gone_back_forgets_newer_copies(work):
    checkpoints = opened(work)
    restored = checkpoints.restore(state_of(99), step=4)
    assert opened(work).latest() == 6, "reading removes nothing"
    checkpoints.memory.save(5, restored.state, {"next_step": 4})
    checkpoints.memory.close(remove=False)
    assert entries(work) == ["5-0"]
    checkpoints.memory.save(6, state_of(6), {"next_step": 6})
    checkpoints.restore(state_of(99), step=4)
    assert entries(work) == [], "a crash now must not bring back what the run left"


LINEAGES = {
    "the one before is fit": (5, None, (5, "memory")),
    "both are taken back": (4, None, (4, "checkpoint")),
    "a checkpoint of the same step is fit": (4, 1, (4, "checkpoint")),
    "a checkpoint of the same step is taken back": (4, 0, (6, "memory")),
}


@pytest.mark.parametrize(("before", "count", "expected"), LINEAGES.values(), ids=LINEAGES)
def test_a_copy_of_steps_that_were_taken_back_is_told_by_its_own_roll_backs(work, before, count, expected):
    """`count`: roll backs before a checkpoint of step 6, which is damaged; the copy of that step is of the other lineage."""
    journal = Journal(work / "roll_backs.json")
    assert journal.add(8, before, [7], "spike", "the loss jumped") == ""
    if count is not None:
        checkpoints = opened(work)
        checkpoints.save(6, state_of(6), {"next_step": 6, "roll_backs": count})
        checkpoints.wait()
    if count == 1:
        flip(max((work / "checkpoints" / "6").rglob("d/*"), key=lambda file: file.stat().st_size))
    if count == 0:
        checkpoints.memory.save(6, state_of(6), {"next_step": 6, "roll_backs": 1})
        checkpoints.memory.close(remove=False)
    checkpoints = opened(work)
    unfit = journal.unfit(checkpoints, healthy_only=True)
    restored = checkpoints.restore(state_of(99), unfit=unfit)
    assert (restored.step, restored.source) == expected
    assert list(unfit) == ([6] if count == 0 else [])
    taken_back = sum(f"training went back from step 8 to {before:,} or earlier" in line for line in restored.skipped)
    assert taken_back == {5: 1, 4: 2 if count != 0 else 1}[before]


def test_the_complete_copy_stays_until_the_next_one_is(work, monkeypatch):
    """Killed or failed at any point of a write, a copy is left; and there are two at most."""
    checkpoints, seen = opened(work), []
    add = host_copies.Draft.add

    def counted(self, tile, array, **how):
        seen.append([entry for entry in entries(work) if not entry.startswith(".")])
        add(self, tile, array, **how)

    monkeypatch.setattr(host_copies.Draft, "add", counted)
    for step in (7, 8, 9):
        checkpoints.memory.save(step, state_of(step), {"next_step": step})
    checkpoints.memory.close(remove=False)
    assert {tuple(names) for names in seen} == {("6-0",), ("7-0",), ("8-0",)}

    def full(self, tile, array, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_copies.Draft, "add", full)
    for step in (10, 11):
        checkpoints.memory.save(step, state_of(step), {"next_step": step})
    checkpoints.memory.close(remove=False)
    assert "copy of step 10 was not written" in checkpoints.memory.take_failure() and not checkpoints.memory.take_failure()
    assert entries(work) == ["9-0"]


def test_an_orderly_end_leaves_nothing_and_a_live_run_is_not_touched(work, tmp_path):
    alive = opened(work)
    alive.memory.save(7, state_of(7), {"next_step": 7})
    other = Checkpoints(tmp_path / "other", CheckpointConfig(), IDENTITY)
    other.add_memory(MemoryCheckpointsConfig(folder=str(work / "memory")))
    other.memory.save(1, state_of(1), {"next_step": 1})
    assert len(list((work / "memory").glob("*/*"))) == 2
    alive.close(remove_copies=True)
    other.memory.close(remove=False)  # died
    assert len(list((work / "memory").glob("*/*"))) == 1
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        started = host_copies.process_started(supervisor.pid)
        (lost,) = (work / "memory").glob("*/*")
        mark = {"owner": supervisor.pid, "started": started, "namespace": host_copies.process_namespace()}
        (lost / ".lease-1").write_text(json.dumps(mark))
        shutil.rmtree(work / "checkpoints")
        third = opened(work)
        third.memory.save(1, state_of(1), {"next_step": 1})
        assert lost.exists(), "its supervisor starts it again"
        third.memory.close()
        supervisor.communicate(b"\n")
    third.memory.save(2, state_of(2), {"next_step": 2})
    assert not lost.exists(), "nobody starts it again"
    third.close(remove_copies=True)
    assert list((work / "memory").glob("*/*")) == []


def test_containers_that_share_a_folder_do_not_know_each_others_processes(tmp_path, monkeypatch):
    """Two processes of one number neither block nor disturb each other, and one whose owner cannot be seen is left its copies for a day."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    folders = [host_copies.RunFolder(str(tmp_path), "run") for _ in range(2)]
    claims = [threading.Thread(target=folder.claim, args=(os.getppid(),), daemon=True) for folder in folders]
    for claim, folder in zip(claims, folders, strict=True):
        claim.start()
        claim.join(10)
        assert not claim.is_alive()
        folder.draft().add(("w", 0), np.zeros(4), received=False)
    host_copies.RunFolder(str(tmp_path), "run").claim(0)
    assert len(list(folders[0].path.glob(".draft-*/data"))) == 2, "both are alive"

    away = host_copies.RunFolder(str(tmp_path), "away")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(host_copies, "process_namespace", lambda: "of another container")
        away.claim(os.getppid())
        assert away._lease is not None
        away._lease.close()  # its trainer died, and is to be started again
    folders[0].claim(0)
    assert away.path.exists()
    os.utime(away.path, (time.time() - 90_000,) * 2)
    folders[0].claim(0)
    assert not away.path.exists()


def test_what_cannot_be_honoured_is_refused_before_training(tmp_path, monkeypatch):
    abstract = state_of(0)
    with pytest.raises(ConfigError, match=r"memory_checkpoints.domains = \[0, 1\]: .*there are 1"):
        opened(tmp_path, domains=(0, 1)).memory.prepare(abstract, 1)
    for total, code in ((30_000, ExitCode.WRONG_INPUT), (100_000, ExitCode.UNAVAILABLE)):  # it never fits; others have filled it
        monkeypatch.setattr(shutil, "disk_usage", lambda path, total=total: shutil._ntuple_diskusage(total, total - 10_000, 10_000))
        with pytest.raises(ConfigError, match=r"has 10.0 KB free, and 2 copies of 18.8 KB must fit") as refused:
            opened(tmp_path).memory.prepare(abstract, 1)
        assert refused.value.exit_code == code
    monkeypatch.undo()
    (user,) = (tmp_path / "memory").iterdir()
    user.chmod(0o755)
    with pytest.raises(ConfigError, match=r"not a folder of this user alone \(mode 0700\)"):
        opened(tmp_path).memory.prepare(abstract, 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"memory_checkpoints.folder = .*/file: cannot be used \(.*xists|Not a dir"):
        opened(tmp_path, folder=str(tmp_path / "file")).memory.prepare(abstract, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_memory_folder_that_is_full_at_a_restart_is_tried_again(tmp_path, monkeypatch, number):
    """Good checkpoints are there: the run must not end for good as if its input were wrong."""

    def fails(*arguments, **settings):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host_copies.RunFolder, "_new_lease", fails)
    with pytest.raises(UserError, match=r"memory_checkpoints.folder = .*cannot be used") as refused:
        opened(tmp_path).memory.prepare(state_of(0), 1)
    assert refused.value.exit_code == ExitCode.UNAVAILABLE


def test_tiles_cover_a_leaf_once_and_any_region_is_made_of_them():
    rng = random.Random(0)
    for _ in range(200):
        grid = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
        tile = [rng.randint(1, 3) for _ in grid]
        tiling = Tiling(tuple(a * b for a, b in zip(grid, tile, strict=True)), tuple(tile))
        counted = np.zeros(tiling.shape, int)
        for number in range(tiling.count):
            assert tiling.number(tiling.index(number)) == number
            counted[tiling.index(number)] += 1
        assert (counted == 1).all()
        ends = [sorted(rng.sample(range(size + 1), 2)) for size in tiling.shape]
        region = bounded(tuple(slice(*pair) for pair in ends), tiling.shape)
        whole, made = np.arange(math.prod(tiling.shape)).reshape(tiling.shape), np.full([b - a for a, b in ends], -1)
        for number in tiling.overlapping(region):
            inner, outer = overlap(tiling.index(number), region)
            made[outer] = whole[tiling.index(number)][inner]
        assert (made == whole[region]).all()


def test_a_peer_is_in_another_failure_domain_wherever_there_is_one():
    rng = random.Random(0)
    for _ in range(300):
        domains = [str(rng.randint(0, 5)) for _ in range(rng.randint(2, 40))]
        if max(map(domains.count, domains)) > len(domains) // 2:
            with pytest.raises(ValueError, match="has"):
                peer_ring(domains)
            continue
        to = peer_ring(domains)
        assert sorted(to) == list(range(len(domains))), "each holds the copy of exactly one"
        assert all(domains[process] != domains[peer] for process, peer in enumerate(to))
    assert peer_ring(["0", "1"]) == [1, 0]
    assert failure_domains([], ["a", "a", "b", "b"], None) == ["a", "a", "b", "b"]
    assert failure_domains([], ["a", "a"], None) == ["0", "1"], "one host has no other"


def test_without_a_given_interval_times_are_measured_first(tmp_path):
    """Steps of milliseconds and a failure in 237 days: after four copies, none for long."""
    checkpoints, state = opened(tmp_path, every_steps=None), state_of(0)
    dues = []
    for step in range(400):
        if checkpoints.memory.due(step):
            dues.append(step)
            checkpoints.memory.save(step, state, {"next_step": step})
    checkpoints.close()
    assert dues == [2, 10, 18, 26]


def test_the_interval_is_dalys():
    """By hand: 5 s a save, a failure every 10,000 s: Young says 316.2 s; Daly's is 316.2 (1 + 0.0158 / 3 + 0.00025 / 9) - 5."""
    assert math.isclose(daly(5, 10_000), 316.2278 * (1 + math.sqrt(0.00025) / 3 + 0.00025 / 9) - 5, rel_tol=1e-6)
    assert daly(30, 10) == 10
    overhead = [5 / tau + (tau + 5) / 2 / 10_000 for tau in (100, daly(5, 10_000), 1000)]
    assert overhead[1] == min(overhead)
    assert steps_between(5, 0, 2.0, 10_000) == 157
    assert steps_between(0.001, 90, 2.0, 10_000) == 45, "not before the copy before is written"
