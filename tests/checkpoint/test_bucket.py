"""Checkpoints in a bucket, which has objects and no folders: one is there as long as an object is in it, and is moved object by object."""

import threading
from types import SimpleNamespace

import pytest
from checkpoint_cases import open_store
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from orbax.checkpoint._src.path import gcs_utils

from maxlm.checkpoint import Checkpoints

RUN = "gs://bucket/run"


class KilledError(BaseException):
    pass


class Bucket(MemoryFileSystem):
    """Objects in memory. `left`: how many may still be removed before the process dies. `removers`: the threads that removed any."""

    cachable = False
    pseudo_dirs = property(lambda bucket: [""])
    left = 10**9

    def __init__(self):
        super().__init__()
        self.store = {}
        self.removers = set()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("gs:/"))

    def mkdir(self, path, create_parents=True, **kwargs): ...

    def makedirs(self, path, exist_ok=False): ...

    def rm_file(self, path):
        if not self.left:
            raise KilledError
        self.left -= 1
        self.removers.add(threading.current_thread())
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        for name in self.find(path) if recursive else [path]:
            self.rm_file(self._strip_protocol(name))

    def rename(self, path, target, recursive=False):
        source, target = self._strip_protocol(path), self._strip_protocol(target)
        assert recursive and self.find(source), path
        for name in self.find(source):
            self.cp_file(name, target + name.removeprefix(source))
            self.rm_file(name)


class Writer:
    """Commits a save without its arrays, which TensorStore would write to the real service."""

    def __init__(self, store):
        self.store = store

    def save_checkpointables_async(self, step, items, force):
        folder = self.store.directory / str(step)
        (folder / "state").write_text("new")
        (folder / "commit_success.txt").write_text("committed")
        return SimpleNamespace(result=lambda timeout=None: None)

    def reload(self): ...

    def close(self): ...


@pytest.fixture
def bucket(saved, monkeypatch):
    """A bucket with checkpoints 1, 2 and 3."""
    bucket = Bucket()
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: bucket)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    for file in saved[0].rglob("*"):
        if file.is_file():
            bucket.pipe_file(f"{RUN}/{file.relative_to(saved[0])}", file.read_bytes())
    for step in (1, 2, 3):
        bucket.pipe_file(f"{RUN}/{step}/commit_success.txt", b"committed")
    opened = Checkpoints._open_writer

    def open_writer(store):
        opened(store).close()  # what unfinished saves have left is removed
        return Writer(store)

    monkeypatch.setattr(Checkpoints, "_open_writer", open_writer)
    return bucket


def objects(bucket, folder):
    """Content of the objects in a folder of the run, by their names in it."""
    root = bucket._strip_protocol(f"{RUN}/{folder}")
    return {name.removeprefix(root): bucket.cat_file(name) for name in (bucket.find(root) if bucket.exists(root) else ())}


def turned_back():
    """A new start of the run, which goes on from step 1."""
    store = open_store(RUN)
    store.resume_at(1)
    return store


def test_a_run_that_turns_back_in_a_bucket_saves_and_keeps_the_other_future_aside(saved, bucket):
    before = {step: objects(bucket, str(step)) for step in (2, 3)}
    assert len(before[3]) > 3
    for _ in range(2):
        store = turned_back()
        assert store.save(2, saved[1][2], {})
        store.close()
        assert store.steps() == [1, 2]
    assert {step: objects(bucket, f"aside/{step}") for step in (2, 3)} == before
    assert objects(bucket, "aside/2-2") == {"/state": b"new", "/commit_success.txt": b"committed"}
    assert open_store(f"{RUN}/aside").steps() == [2, 3]


@pytest.mark.parametrize("removals", [1, 2, 3, 6, 12])
def test_a_kill_while_a_checkpoint_is_moved_leaves_none_that_lacks_something(saved, bucket, removals):
    whole = {step: objects(bucket, str(step)) for step in (1, 2, 3)}
    bucket.left = removals
    with pytest.raises(KilledError):
        turned_back().save(2, saved[1][2], {})
    bucket.left = 10**9
    for folder in ("", "aside/"):
        assert all(objects(bucket, f"{folder}{step}") == whole[step] for step in open_store(f"{RUN}/{folder}".rstrip("/")).steps())
    store = turned_back()
    assert store.save(4, saved[1][2], {})
    store.close()
    assert store.steps() == [1, 4], "what was left of the one that was moved is gone"


def test_what_a_save_has_left_is_removed_alone_and_before_the_writer_is_open(saved, bucket):
    left, kept = [f"{RUN}/5/state/d", f"{RUN}/6/manifest"], [f"{RUN}/{name}" for name in ("notes/a", "3-copy/state/d", "readme", "7")]
    for name in left + kept:
        bucket.pipe_file(name, b"bytes")
    before = objects(bucket, "")
    open_store(RUN)._open_writer()
    after = objects(bucket, "")
    assert bucket.removers == {threading.current_thread()}, "in the background it would meet what is moved or written by then"
    assert before.keys() - after.keys() == {name.removeprefix(RUN) for name in left}
    assert all(after[name] == content for name, content in before.items() if name in after)
