"""Whatever happens to the bytes on the disk, what is restored is what was saved: from this checkpoint or the one before."""

import gc
import random
import shutil
from pathlib import Path

import pytest
from checkpoint_cases import bits, layout, make_state, open_store

from maxlm.checkpoint import CheckpointError

FLIPS = 40

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
    restored = open_store(copy).restore_params(saved[1][3]["params"])
    assert restored.step == 2
    assert bits(restored.state) == bits(saved[1][2]["params"])


@pytest.mark.parametrize("part", ["arrays", "index", "metadata", "manifest"])
@pytest.mark.parametrize("how", ["truncated", "empty", "garbage", "missing"])
def test_damaged_files_are_walked_back_from(saved, copy, part, how, caplog):
    newest = copy / "3"
    path = {
        "arrays": data_files(newest)[0],
        "index": newest / "state" / "manifest.ocdbt",
        "metadata": newest / "state" / "_METADATA",
        "manifest": newest / "manifest" / "manifest.json",
    }[part]
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "garbage": bytes(reversed(content))}[how])
    restored = open_store(copy).restore(saved[1][3])
    assert restored.step == 2
    assert bits(restored.state) == bits(saved[1][2])
    assert restored.data_position == {"step": 2, "epoch": 0}
    assert len(restored.skipped) == 1
    assert restored.skipped[0].startswith("checkpoint 3 is damaged: ")
    assert "passed over" in caplog.text


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
    with pytest.raises(CheckpointError, match=r"could not be read: .*UNAVAILABLE"):
        open_store(copy).restore(saved[1][3])
