"""A storage that fails for a moment costs no checkpoint: none is passed over, deleted or forgotten, and all processes learn of it."""

import errno
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_cases import IDENTITY, bits, open_store
from jax.errors import JaxRuntimeError
from test_processes import run

from maxlm.base import transient
from maxlm.base.errors import ExitCode, UnavailableError, UserError
from maxlm.checkpoint import Checkpoints, manifest, reader
from maxlm.checkpoint.errors import CheckpointError, DamagedError, UnreachableError, Verdict, verdict_of
from maxlm.checkpoint.folder import HEALTHY, NewestHealthy
from maxlm.checkpoint.memory import MemoryCopies
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.run.ownership import Ownership
from maxlm.training.fits import explain_out_of_memory
from maxlm.training.rollback import Journal


class HttpError(Exception):
    """As the client of a bucket raises it: no OSError."""

    __module__ = "gcsfs.retry"


BUCKET, DISK = HttpError("503"), OSError(errno.EIO, "Input/output error")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No pauses between tries."""
    monkeypatch.setattr("maxlm.base.transient.RETRY_DELAYS_S", ())


def failing(error, times=10**9, only=None, real=None):
    """A function that raises `error` at its first `times` calls, where the path holds `only`; then `real`."""
    left = [times]

    def fail(path, *args, **kwargs):
        if left[0] and (only is None or only in str(path)):
            left[0] -= 1
            raise error
        return real(path, *args, **kwargs)

    return fail


NO_ROOM = "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00G. That was not possible. There are 2.00G free."


def test_a_device_without_room_is_no_storage_that_may_come_back():
    """It would be read five times, and the run started again and again."""
    tried = []

    def read():
        tried.append(1)
        raise JaxRuntimeError(NO_ROOM)

    with pytest.raises(JaxRuntimeError):
        transient.retried(read, "reading")
    assert len(tried) == 1
    with pytest.raises(UserError, match=r"while restoring \(it asked for 8.00G more\)"), explain_out_of_memory("restoring"):
        raise JaxRuntimeError(NO_ROOM)
    with pytest.raises(CheckpointError, match=r"does not fit here .*: use more devices"):
        reader._agree(Path("3"), JaxRuntimeError(NO_ROOM))


@pytest.mark.parametrize(
    ("error", "on_disk", "in_bucket"),
    [
        (DamagedError("its manifest is missing"), Verdict.DAMAGED, Verdict.DAMAGED),
        (ValueError("DATA_LOSS: CRC-32C checksum verification failed"), Verdict.DAMAGED, Verdict.DAMAGED),
        (ValueError('NOT_FOUND: Error opening "zarr3" driver'), Verdict.DAMAGED, Verdict.DAMAGED),
        (ValueError("OUT_OF_RANGE: Requested byte range is not valid"), Verdict.DAMAGED, Verdict.DAMAGED),
        (FileNotFoundError("gs://bucket/run/3/state/_METADATA"), Verdict.DAMAGED, Verdict.DAMAGED),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), Verdict.DAMAGED, Verdict.DAMAGED),
        (KeyError("chunk_shape"), Verdict.DAMAGED, Verdict.DAMAGED),
        (json.JSONDecodeError("Expecting value", "", 0), Verdict.DAMAGED, Verdict.DAMAGED),
        (UnicodeDecodeError("utf-8", b"\xe4", 0, 1, "invalid"), Verdict.DAMAGED, Verdict.DAMAGED),
        (ValueError("Bad Request: https://storage\ninvalid argument"), Verdict.DAMAGED, Verdict.UNREACHABLE),
        (ValueError("UNKNOWN: no more is said"), Verdict.DAMAGED, Verdict.UNREACHABLE),
        (RuntimeError("the pool is shut down"), Verdict.DAMAGED, Verdict.UNREACHABLE),
        (ValueError('Error opening "zarr3" driver: Error decoding local file "d/3f"'), Verdict.DAMAGED, Verdict.DAMAGED),
        (OSError("Forbidden: https://storage\nThe billing account is disabled"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (ConnectionResetError("reset"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (RuntimeError("Event loop is closed"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (ValueError("UNKNOWN: CURL error[16] Error in the HTTP2 framing layer"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (ValueError("INTERNAL: CURLM error Out of memory [curlm_code='3']"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (BUCKET, Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (DISK, Verdict.UNREACHABLE, Verdict.UNREACHABLE),
        (UserError("another experiment"), Verdict.REFUSED, Verdict.REFUSED),
        (MemoryError(), Verdict.REFUSED, Verdict.REFUSED),
        (JaxRuntimeError(NO_ROOM), Verdict.REFUSED, Verdict.REFUSED),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."), Verdict.REFUSED, Verdict.REFUSED),
        (ValueError("RESOURCE_EXHAUSTED: too many requests; allocated quota exceeded"), Verdict.UNREACHABLE, Verdict.UNREACHABLE),
    ],
    ids=lambda value: str(value)[:40],
)
def test_in_a_bucket_only_what_damage_is_known_to_raise_is_damage(error, on_disk, in_bucket):
    assert (verdict_of(error, remote=False), verdict_of(error, remote=True)) == (on_disk, in_bucket)


class Saved:
    """A checkpoint as Orbax lists it."""

    def __init__(self, step: int) -> None:
        self.step = step


@pytest.mark.parametrize(
    ("marks", "kept"),
    [
        ({10: True, 20: False, 30: False}, [10]),
        ({10: True, 20: False, 30: None}, [10, 30]),  # 30 may be the newest healthy one, and 10 may be
        ({10: True, 20: True, 30: None}, [20, 30]),
        ({10: True, 20: None, 30: True}, [30]),
        ({10: False, 20: False}, []),
    ],
)
def test_the_newest_that_is_known_to_be_healthy_stays_whatever_cannot_be_read(marks, kept):
    decisions = NewestHealthy(marks.get).should_preserve([Saved(step) for step in marks], context=None)
    assert [step for step, stays in zip(marks, decisions, strict=True) if stays] == kept


@pytest.mark.parametrize("error", [BUCKET, DISK], ids=["bucket", "disk"])
def test_one_unfinished_save_that_cannot_be_removed_keeps_no_other_and_is_named(tmp_path, monkeypatch, caplog, error):
    """Folders alone go: a file or a link with such a name is none of ours."""
    left = [tmp_path / f"{step}.orbax-checkpoint-tmp" for step in (3, 4, 5)]
    for folder in (*left, tmp_path / "elsewhere"):
        (folder / "state").mkdir(parents=True)
    (file := tmp_path / "3.orbax-checkpoint-tmp.tar").write_text("kept to look at")
    (link := tmp_path / "2.orbax-checkpoint-tmp").symlink_to(tmp_path / "elsewhere")
    store = open_store(tmp_path)
    monkeypatch.setattr("maxlm.checkpoint.folder._REMOVAL_SECONDS", 0.0)
    monkeypatch.setattr(type(store.directory), "rmtree", failing(error, only="4.orbax", real=type(store.directory).rmtree))
    assert store.save(1, {"params": {"w": jnp.ones(4)}}, {})
    store.close()
    assert store.steps() == [1]
    assert [folder.exists() for folder in left] == [False, True, False]
    assert file.exists() and link.is_symlink() and (tmp_path / "elsewhere" / "state").exists()
    assert "still holds unfinished saves, which take room: 4.orbax-checkpoint-tmp: " in caplog.text


@pytest.mark.parametrize("error", [DISK, BUCKET], ids=["disk", "bucket"])
def test_a_mark_that_cannot_be_read_once_deletes_no_healthy_checkpoint(tmp_path, monkeypatch, error):
    """Another start of the run, which has to read the marks: one try of the newest fails while a checkpoint is saved."""
    state, first = {"params": {"w": jnp.ones(4)}}, open_store(tmp_path, keep=2)
    for step, healthy in ((10, True), (20, False), (30, False)):
        first.save(step, state, {HEALTHY: healthy})
    first.close()
    assert first.steps() == [10, 20, 30]
    store = open_store(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "read", failing(error, 1, "30", manifest.read))
        assert store.save(40, state, {HEALTHY: False})
        store.wait()
    assert 10 in store.steps()
    assert store.save(50, state, {HEALTHY: False})
    store.close()
    assert store.steps() == [10, 50], "what was not known once is read again"


@pytest.mark.parametrize("error", [DISK, BUCKET], ids=["disk", "bucket"])
def test_a_restore_that_succeeds_is_not_spoilt_by_older_checkpoints(saved, monkeypatch, error):
    monkeypatch.setattr(manifest, "read", failing(error, only="/2", real=manifest.read))
    restored = open_store(saved[0]).restore(saved[1][3])
    assert (restored.step, restored.skipped, bits(restored.state)) == (3, (), bits(saved[1][3]))


@pytest.mark.parametrize("error", [DISK, BUCKET], ids=["disk", "bucket"])
def test_positions_need_every_manifest_that_is_whole(saved, tmp_path, monkeypatch, error):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "1" / "manifest" / "manifest.json").write_text("")
    assert open_store(copy).positions() == {2: {"step": 2, "epoch": 0}, 3: {"step": 3, "epoch": 0}}
    monkeypatch.setattr(manifest, "read", failing(error, only="/2", real=manifest.read))
    with pytest.raises(UnavailableError, match=r"reading the manifests in .* failed: .*; try again"):
        open_store(copy).positions()


def test_a_bug_is_not_taken_for_the_storage(saved, monkeypatch):
    monkeypatch.setattr(manifest, "read", failing(ZeroDivisionError("a bug"), only="/2", real=manifest.read))
    with pytest.raises(ZeroDivisionError):
        open_store(saved[0]).positions()
    with pytest.raises(ZeroDivisionError):
        open_store(saved[0]).restore(saved[1][3])


@pytest.mark.parametrize("where", ["folder", "checkpoint"])
def test_a_folder_that_cannot_be_looked_at_is_not_an_empty_one(saved, monkeypatch, where):
    """`is_dir` is False while a mount is stale, and training would begin anew, or go on from an older checkpoint."""
    store, stale = open_store(saved[0]), OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(type(store.directory), "is_dir", lambda path: False)
    if where == "folder":
        monkeypatch.setattr(type(store.directory), "iterdir", failing(stale))
    else:
        monkeypatch.setattr(Path, "stat", failing(stale, only="/3", real=Path.stat))
    with pytest.raises(UnreachableError, match="cannot be listed: OSError"):
        store.latest()


def test_a_start_lists_the_folder_once(saved, monkeypatch):
    """In a bucket that takes a request a checkpoint. Afterwards others may have written."""
    store, listings = open_store(saved[0]), []
    real = type(store.directory).iterdir
    monkeypatch.setattr(type(store.directory), "iterdir", lambda path: listings.append(str(path)) or real(path))
    with store.folder.one_listing():
        assert (store.latest(), list(store.positions()), store.latest({3: ""})) == (3, [1, 2, 3], 2)
        assert store.restore(saved[1][3], unfit={3: "it was taken back"}).step == 2
        assert listings.count(str(saved[0])) == 1
    assert (store.latest(), store.steps()) == (3, [1, 2, 3])
    assert listings.count(str(saved[0])) == 3


def test_metadata_that_cannot_be_found_once_is_not_damaged(saved, monkeypatch):
    """Orbax's search says that a checkpoint is not there, whatever has failed."""
    kind, left = type(open_store(saved[0]).directory), [1]

    def exists(path, real=kind.exists):
        if str(path) == str(saved[0]) and left[0]:
            left[0] -= 1
            return False
        return real(path)

    monkeypatch.setattr(kind, "exists", exists)
    restored = open_store(saved[0]).restore(saved[1][3])
    assert (restored.step, restored.skipped, left) == (3, (), [0])


@pytest.mark.parametrize("error", [DISK, BUCKET], ids=["disk", "bucket"])
def test_copies_that_cannot_be_looked_for_stop_no_start(tmp_path, monkeypatch, error):
    """Without the number of the run there are no copies: training goes on from a checkpoint, and a new start may find them."""
    store = Checkpoints(tmp_path / "c", open_store(tmp_path)._config, IDENTITY)
    memory = MemoryCopies(MemoryCheckpointsConfig(folder=str(tmp_path / "memory")), store.directory, IDENTITY)
    monkeypatch.setattr(type(store.directory), "read_bytes", failing(error))
    assert memory.newest() is None
    with pytest.raises(UnreachableError, match="cannot be read or written") as caught:
        memory.prepare({"params": {"w": jnp.ones(4)}}, 1)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("error", [DISK, BUCKET], ids=["disk", "bucket"])
def test_an_owner_that_cannot_be_read_proves_nothing(tmp_path, monkeypatch, error):
    owner = Ownership(tmp_path)
    monkeypatch.setattr(type(tmp_path), "read_text", failing(error))
    owner.check()
    monkeypatch.setattr(type(tmp_path), "write_text", failing(error))
    with pytest.raises(UnavailableError, match=r"writing .*owner failed"):
        Ownership(tmp_path)


def test_roll_backs_that_cannot_be_read_are_not_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "roll_backs.json"
    assert Journal(path).records == []
    assert Journal(path).add(9, 5, [7], "spike", "the loss") == ""
    text = path.read_bytes()
    path.write_bytes(text.replace(b"spike", b"sp\xffke"))
    with pytest.raises(UserError, match="does not list the roll backs"):
        Journal(path)
    path.write_bytes(text)
    assert [record.batches for record in Journal(path).records] == [(7,)]
    monkeypatch.setattr("maxlm.training.rollback.read_file", failing(DISK))
    with pytest.raises(UnavailableError, match=r"reading .*roll_backs\.json failed"):
        Journal(path)


PROGRAM = """
import json, pathlib, sys
import jax
from maxlm.checkpoint import Checkpoints, manifest
from maxlm.base import transient
from maxlm.base.errors import UserError
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.config.schema import CheckpointConfig
from maxlm.run.ownership import Ownership
from maxlm.training import rollback
from maxlm.training.rollback import Journal

address, rank, task, directory, _ = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
transient.RETRY_DELAYS_S = ()
folder = pathlib.Path(directory)

class HttpError(Exception):
    __module__ = "gcsfs.retry"

def fail(*_, **__):
    raise HttpError("503")

store = Checkpoints(folder, CheckpointConfig(), {})
store.add_memory(MemoryCheckpointsConfig(folder=str(folder / "memory")))
if rank == "0":
    kind = type(store.directory)
    manifest.read = kind.iterdir = kind.read_bytes = pathlib.Path.read_text = pathlib.Path.write_text = rollback.read_file = fail
tries = {
    "positions": store.positions,
    "latest": store.latest,
    "copies": store.memory.newest,
    "roll backs": lambda: Journal(folder / "roll_backs.json", primary=rank == "0"),
    "owner": lambda: Ownership(folder),
}
for name, attempt in tries.items():
    try:
        outcome = str(attempt())
    except UserError as error:
        outcome = int(error.exit_code)
    print(json.dumps({"name": name, "outcome": outcome}), flush=True)
"""


def test_what_fails_in_process_0_fails_alike_in_all(tmp_path):
    """The others wait for it in a collective: an error that it alone raises would leave them there."""
    reports = run("", tmp_path / "checkpoints", program=PROGRAM)
    expected = [("positions", 7), ("latest", 7), ("copies", "None"), ("roll backs", 7), ("owner", 7)]
    assert [(report["name"], report["outcome"]) for report in reports] == expected * 2
