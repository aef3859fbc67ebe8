"""Whatever happens to the bytes on the disk, the restored state is one that was saved: in this checkpoint or the one before."""

import errno
import gc
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_cases import bits, layout, make_state, open_store
from orbax.checkpoint import v1 as ocp

from maxlm.base.errors import ExitCode
from maxlm.checkpoint import CheckpointError, manifest

FLIPS = 20

# Orbax drops coroutines and closes its loop when a load fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """Checkpoints 1 to 3, free to be damaged."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def data_files(checkpoint: Path) -> list[Path]:
    """The files that hold the arrays, largest first."""
    return sorted((path for path in (checkpoint / "state").rglob("d/*") if path.is_file()), key=lambda path: -path.stat().st_size)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_flipped_bits_never_reach_the_run(saved, copy):
    """Bits all over the arrays of the newest checkpoint, one at a time. Most load without a complaint from the file format."""
    states, chance, caught = saved[1], random.Random(0), 0
    for _ in range(FLIPS):
        path = chance.choices(data_files(copy / "3"), [path.stat().st_size for path in data_files(copy / "3")])[0]
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)
        restored = open_store(copy).restore(states[3])
        assert bits(restored.state) == bits(states[restored.step])
        assert bool(restored.skipped) == (restored.step != 3)
        caught += restored.step == 2
        flip(path, bit)
    assert caught >= FLIPS // 4, "the flips did not hit the arrays: the test shows nothing"


def test_damage_is_reported_in_lines_not_pages(saved, copy, capfd):
    """Ten leaves that cannot be read are one finding."""
    for path in data_files(copy / "3"):
        path.write_bytes(b"")
    open_store(copy).restore(saved[1][3])
    gc.collect()
    assert len("".join(capfd.readouterr())) < 1000


def test_the_arrays_alone_are_guarded_when_only_parameters_are_read(saved, copy):
    path = data_files(copy / "3")[0]
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(byte ^ 0x10 for byte in content))
    restored = open_store(copy).restore_entries({"params": saved[1][3]["params"]})
    assert restored.step == 2
    assert bits(restored.state["params"]) == bits(saved[1][2]["params"])


WAYS = list(itertools.product(("arrays", "index", "metadata", "manifest"), ("truncated", "empty", "garbage", "missing", "pipe")))


@pytest.mark.parametrize(("part", "how"), [*WAYS, ("times", "pipe")])  # the state needs no times, but reads the file
def test_damaged_files_are_walked_back_from(saved, copy, part, how, caplog):
    newest = copy / "3"
    path = {
        "arrays": data_files(newest)[0],
        "index": newest / "state" / "manifest.ocdbt",
        "metadata": newest / "state" / "_METADATA",
        "manifest": newest / "manifest" / "manifest.json",
        "times": newest / "_CHECKPOINT_METADATA",
    }[part]
    content = path.read_bytes()
    if how in ("missing", "pipe"):
        path.unlink()
    if how == "pipe":  # reading it would wait for a writer
        os.mkfifo(path)
    elif how != "missing":
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "garbage": bytes(reversed(content))}[how])
    restored = open_store(copy).restore(saved[1][3])
    assert restored.step == 2
    assert bits(restored.state) == bits(saved[1][2])
    assert restored.data_position == {"step": 2, "epoch": 0}
    assert len(restored.skipped) == 1
    assert restored.skipped[0].startswith("checkpoint 3 is damaged: ")
    assert "skipped" in caplog.text


def test_a_changed_manifest_is_not_believed(saved, copy):
    """A data position off by one would train on the wrong samples without any error."""
    path = copy / "3" / "manifest" / "manifest.json"
    path.write_text(path.read_text().replace('"epoch": 0', '"epoch": 1'))
    restored = open_store(copy).restore(saved[1][3])
    assert restored.step == 2
    assert "does not match its checksum" in restored.skipped[0]


def test_if_none_is_good_each_is_named_and_none_is_touched(saved, copy):
    for step in (1, 2, 3):
        flip(copy / str(step) / "manifest" / "manifest.json", 100)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        open_store(copy).restore(saved[1][3])
    assert all(f"checkpoint {step} is damaged" in str(caught.value) for step in (1, 2, 3))
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(saved, copy):
    flip(copy / "3" / "manifest" / "manifest.json", 100)
    with pytest.raises(CheckpointError, match="checkpoint 3 is damaged"):
        open_store(copy).restore(saved[1][3], 3)


def test_training_on_keeps_the_damaged_one_aside(saved, copy):
    """Step 3 comes round again: it is saved, and what was damaged does not count as one of the kept."""
    flip(copy / "3" / "manifest" / "manifest.json", 100)
    store = open_store(copy, keep=2)
    assert store.restore(saved[1][3]).step == 2
    again = layout(4, 2)(make_state(33))
    assert store.save(3, again, {})
    store.close()
    assert store.steps() == [2, 3]
    assert bits(open_store(copy).restore(again).state) == bits(again)
    assert (copy / "aside" / "3" / "manifest" / "manifest.json").exists()


def test_what_may_pass_is_not_damage(saved, copy, monkeypatch):
    """A checkpoint that cannot be reached now is not skipped: that would throw away training without need."""

    def unreachable(*_args, **_kwargs):
        raise ValueError("UNAVAILABLE: the bucket does not answer")

    monkeypatch.setattr("orbax.checkpoint.v1.load", unreachable)
    monkeypatch.setattr("maxlm.base.transient.RETRY_DELAYS_S", ())
    with pytest.raises(CheckpointError, match=r"could not be read: .*UNAVAILABLE"):
        open_store(copy).restore(saved[1][3])


def with_steps(directory: Path) -> dict:
    """Checkpoints 1 to 3 as a run writes them: the data position and the state count batches. Returns their states."""
    states = {step: {"params": {"w": jnp.arange(64.0) * step}, "step": jnp.int32(step)} for step in (1, 2, 3)}
    store = open_store(directory)
    for step, state in states.items():
        store.save(step, state, {"next_step": step})
    store.close()
    return states


def rewrite(checkpoint: Path, **changes) -> None:
    """The manifest with other values and a checksum that fits them."""
    path = checkpoint / "manifest" / "manifest.json"
    body = {**json.loads(path.read_text()), **changes}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": manifest._checksum(body)}))


@pytest.mark.parametrize(
    ("break_it", "step", "said"),
    [
        (
            lambda folder: (folder / "3").rename(folder / "30"),
            2,
            "checkpoint 30 is damaged: the folder is named 30, its manifest is of step 3",
        ),
        (lambda folder: rewrite(folder / "3", step=2), 2, "the folder is named 3, its manifest is of step 2"),
        (lambda folder: rewrite(folder / "3", data_position={"next_step": 4}), 2, "its data position is 4"),
        (
            lambda folder: shutil.copytree(folder / "2" / "manifest", folder / "3" / "manifest", dirs_exist_ok=True),
            2,
            "its manifest is of step 2",
        ),
        (lambda folder: (folder / "3" / "_CHECKPOINT_METADATA").write_text("[]"), 2, "its metadata is damaged"),
        (lambda folder: (folder / "4").mkdir(), 3, "checkpoint 4 is damaged: its manifest is missing"),
        (lambda folder: (folder / "3").rename(folder / "3.bak"), 2, "3.bak is not the name of a checkpoint"),
        (lambda folder: (folder / "4").write_text(""), 3, "4 is not a committed checkpoint: it is not a folder"),
    ],
)
def test_a_checkpoint_that_is_not_the_step_it_says_is_passed_over_and_said(tmp_path, break_it, step, said):
    """Folder, manifest, data position and state must agree; and the run goes on saving beside what was passed over."""
    states = with_steps(tmp_path)
    break_it(tmp_path)
    store = open_store(tmp_path)
    restored = store.restore(states[1])
    assert (restored.step, bits(restored.state)) == (step, bits(states[step]))
    assert len(restored.skipped) == 1 and said in restored.skipped[0]
    assert store.save(50, {**states[1], "step": jnp.int32(50)}, {"next_step": 50})
    store.close()
    assert open_store(tmp_path).restore(states[1]).step == 50


def test_a_state_of_another_step_is_not_saved_as_this_one(tmp_path):
    store = open_store(tmp_path)
    store.save(3, {"params": {"w": jnp.ones(4)}, "step": jnp.int32(2)}, {"next_step": 3})
    with pytest.raises(CheckpointError, match="its state holds 2 updates"):
        store.close()


def test_a_flipped_bit_of_the_state_metadata_is_damage_or_harmless(tmp_path):
    """Orbax believes its own metadata: a flipped bit can make an array a number, or nothing at all."""
    states = with_steps(tmp_path)
    path = tmp_path / "3" / "state" / "_METADATA"
    outcomes = set()
    for bit in range(1, 350 * 8, 94):
        flip(path, bit)
        restored = open_store(tmp_path).restore(states[1])
        assert bits(restored.state) == bits(states[restored.step])
        outcomes.add(restored.step)
        flip(path, bit)
    assert outcomes == {2, 3}


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (TimeoutError("no answer"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (ValueError("UNKNOWN: Error reading local file: Stale file handle [os_error_code='116']"), True),
        (ValueError("UNAUTHENTICATED: the token has expired"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("NOT_FOUND: no such file [os_error_code='2']"), False),
        (ValueError("DATA_LOSS: CRC32C checksum mismatch"), False),
        (TypeError("'NoneType' object is not iterable"), False),
        (KeyError("tree_metadata"), False),
    ],
)
def test_the_medium_is_told_from_the_content(saved, monkeypatch, error, transient):
    """A transient failure is retried and then ends with the exit code that is restarted; any other is damage."""
    tries = []

    def load(*_args, **_kwargs):
        tries.append(1)
        raise error

    monkeypatch.setattr(ocp, "load", load)
    monkeypatch.setattr("maxlm.base.transient.RETRY_DELAYS_S", (0.0, 0.0))
    with pytest.raises(CheckpointError) as caught:
        open_store(saved[0]).restore(saved[1][3])
    assert "\n" not in str(caught.value) and "Nothing was changed." in str(caught.value)
    assert caught.value.exit_code == (ExitCode.UNAVAILABLE if transient else ExitCode.WRONG_INPUT)
    assert len(tries) == 3  # three tries of one checkpoint, or one of each


def test_a_storage_that_fails_for_a_moment_costs_nothing(saved, monkeypatch, caplog):
    real, tries = ocp.load, []

    def load(*args, **kwargs):
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args, **kwargs)

    monkeypatch.setattr(ocp, "load", load)
    monkeypatch.setattr("maxlm.base.transient.RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    restored = open_store(saved[0]).restore(saved[1][3])
    assert (restored.step, restored.skipped) == (3, ())
    assert caplog.text.count("is tried again") == 1
