"""Write a token store: append documents to their split, shard after shard.

The progress of an unfinished store is one object next to the arrays, replaced atomically, from which the same command continues. Shards
written after the last save are written again, with the same content. It holds the digest of every finished shard: one that is rewritten
meanwhile is noticed by readers of the store.
"""

import hashlib
import io
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxlm.base import directory_lock
from maxlm.base.errors import error_kind
from maxlm.data import storage
from maxlm.data.manifest import PROGRESS, SPLITS, Split, SplitInfo, fingerprint
from maxlm.data.metadata import About, MetadataWriter
from maxlm.data.storage import ArrayLayout


class FlatWriter:
    """Append to a flat array: whole shards are written at once, the rest is buffered in memory."""

    def __init__(self, folder: str, dtype: np.dtype, layout: ArrayLayout, *, resume: tuple[int, bytes, np.ndarray] | None = None) -> None:
        """`resume`: number of elements on disk (whole shards), digests of their shards, and the rest, from `written`, `shards` and
        `rest()`.
        """
        self._folder, self._dtype, self._layout = folder, dtype, layout
        self.written, self.shards, rest = resume or (0, b"", np.zeros(0, dtype))
        self._parts, self._buffered = [rest], len(rest)
        self._array = storage.create_array(folder, dtype, layout) if resume is None else storage.open_array(folder, write=True)

    @property
    def size(self) -> int:
        """Elements appended so far."""
        return self.written + self._buffered

    def append(self, values: np.ndarray) -> None:
        """Add `values` to the end."""
        self._parts.append(values.astype(self._dtype))
        self._buffered += len(values)
        while self._buffered >= self._layout.shard:
            rest = self.rest()
            self._write(rest[: self._layout.shard])
            self._buffer(rest[self._layout.shard :].copy())

    def rest(self) -> np.ndarray:
        """Elements not yet on disk: less than a shard."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def finish(self) -> None:
        """Write the rest, even if it is empty, since that sets the length of the array; and the digests of all shards."""
        self._write(self.rest())
        store, _, name = self._folder.rpartition("/")
        storage.write_bytes(store, f"{name}.shards", self.shards)
        self._buffer(np.zeros(0, self._dtype))

    def _buffer(self, values: np.ndarray) -> None:
        self._parts, self._buffered = [values], len(values)

    def _write(self, values: np.ndarray) -> None:
        directory_lock.check()
        end = self.written + len(values)
        with storage.failures_named(self._folder, "write it"):
            self._array = self._array.resize(exclusive_max=[end], resize_metadata_only=True).result()
            if len(values):
                self._array[self.written : end].write(values).result()
        if len(values):
            digests = storage.chunk_digests(values, self._layout)
            storage.write_bytes(self._folder, f"digests/{self.written // self._layout.shard}", digests)
            self.shards += storage.digest(digests)
        self.written = end


@dataclass(frozen=True)
class SavedProgress:
    """Arrays are named split/array, as train/tokens."""

    fingerprint: str  # of the settings
    documents: int = 0  # of the sources, in the arrays
    written: dict[str, int] = field(default_factory=dict)  # elements on disk, of each array
    shards: dict[str, str] = field(default_factory=dict)  # digests of the shards on disk, in hex, of each array
    buffered: dict[str, np.ndarray] = field(default_factory=dict)  # elements in memory, of each array
    metadata: dict[str, Any] = field(default_factory=dict)  # split -> `MetadataWriter.state`


class SplitWriter:
    """Tokens, document offsets and metadata of one split."""

    def __init__(self, store: str, split: str, dtype: np.dtype, done: SavedProgress | None = None) -> None:
        """`done`: continue from there, if it has arrays."""
        self.arrays: dict[str, FlatWriter] = {}
        layouts = {f"{split}/tokens": (dtype, storage.TOKENS), f"{split}/documents": (np.dtype(np.uint64), storage.DOCUMENTS)}
        for name, (kind, layout) in layouts.items():
            resume = None
            if done is not None and done.written:
                resume = done.written[name], bytes.fromhex(done.shards[name]), done.buffered[name]
            self.arrays[name] = FlatWriter(f"{store}/{name}", kind, layout, resume=resume)
        self._tokens, self._documents = self.arrays.values()
        if self._documents.size == 0:
            self._documents.append(np.zeros(1, np.uint64))
        self.metadata = MetadataWriter(store, split, done.metadata.get(split) if done is not None else None)

    @property
    def info(self) -> SplitInfo:
        """Tokens and documents appended so far."""
        return SplitInfo(tokens=self._tokens.size, documents=self._documents.size - 1)

    def add(self, tokens: np.ndarray, about: About | None = None) -> None:
        """Append one document. `about`: of all documents or of none."""
        if about is not None:
            self.metadata.add(about)
        self._tokens.append(tokens)
        self._documents.append(np.array([self._tokens.size], np.uint64))

    def finish(self) -> None:
        """Write what is buffered."""
        self._tokens.finish()
        self._documents.finish()
        self.metadata.finish()


class Router:
    """Send documents to their splits, so that neither is empty if there are two documents.

    Until both splits have a document, the newest is held back; if the sources end then, it goes to the empty split.
    """

    def __init__(self, writers: dict[str, SplitWriter], eval_fraction: float) -> None:
        self.writers = writers
        self.settled = eval_fraction == 0 or all(writer.info.documents for writer in writers.values())  # nothing is held back
        self._spare: tuple[str, np.ndarray, About] | None = None

    def add(self, tokens: np.ndarray, held_out: bool, about: About) -> None:
        """Add a document to its split, or hold it back."""
        split = SPLITS[held_out]
        if self.settled:
            self.writers[split].add(tokens, about)
            return
        if self._spare is not None:
            self.writers[self._spare[0]].add(*self._spare[1:])
        self._spare = (split, tokens, about)
        if any(writer.info.documents for name, writer in self.writers.items() if name != split):
            self.writers[split].add(tokens, about)
            self._spare, self.settled = None, True

    def finish(self) -> dict[Split, SplitInfo]:
        """Place the document held back, write everything, and return the size of each split."""
        if self._spare is not None:
            split, tokens, about = self._spare
            alone = not any(writer.info.documents for writer in self.writers.values())
            self.writers["train" if alone or split == "eval" else "eval"].add(tokens, about)
        for writer in self.writers.values():
            writer.finish()
        return {split: self.writers[split].info for split in SPLITS}


def save_progress(store: str, fingerprint: str, documents: int = 0, writers: dict[str, SplitWriter] | None = None) -> None:
    """Save that the first `documents` documents of the sources are in `writers`; without writers, mark the store as begun."""
    arrays = {name: array for writer in (writers or {}).values() for name, array in writer.arrays.items()}
    state: dict[str, Any] = {"fingerprint": fingerprint, "documents": documents}
    state["written"] = {name: array.written for name, array in arrays.items()}
    state["shards"] = {name: array.shards.hex() for name, array in arrays.items()}
    state["metadata"] = {split: writer.metadata.state for split, writer in (writers or {}).items()}
    content = io.BytesIO()
    buffered: dict[str, Any] = {name: array.rest() for name, array in arrays.items()}
    state["sha256"] = _checksum(json.loads(json.dumps(state)), buffered)
    np.savez(content, state=np.frombuffer(json.dumps(state).encode(), np.uint8), **buffered)
    storage.write_bytes(store, PROGRESS, content.getvalue())


def load_progress(store: str) -> SavedProgress | None:
    """The saved progress, or None if there is none."""
    content = storage.read_bytes(store, PROGRESS)
    if content is None:
        return None
    try:
        with np.load(io.BytesIO(content)) as arrays:
            buffered = dict(arrays)
        state = json.loads(buffered.pop("state").tobytes())
        if state.pop("sha256", None) != _checksum(state, buffered):
            raise ValueError("it does not match its checksum")
        return SavedProgress(**state, buffered=buffered)
    except Exception as error:  # zipfile, zlib and numpy raise many kinds
        raise error_kind(error)(f"{store}/{PROGRESS} is damaged: {error}; delete {store} and prepare it again.") from error


def _checksum(state: dict[str, Any], buffered: dict[str, np.ndarray]) -> str:
    """sha256, in hex, of the state and the arrays."""
    arrays = {name: [array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()] for name, array in buffered.items()}
    return fingerprint([state, arrays])
