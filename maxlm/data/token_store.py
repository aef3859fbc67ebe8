"""Read a token store: ranges and windows of the flat token stream, from a disk or a bucket."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorstore as ts

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.paths import is_remote
from maxlm.config.transient import retried
from maxlm.data import manifest, marks, storage
from maxlm.data.manifest import REMAKE, Split, SplitInfo, StoreInfo
from maxlm.data.storage import ArrayLayout, DamagedStoreError

T = TypeVar("T")
CACHE_BYTES = 2**28  # of chunks and shard indices, in this process


def read_context(read_threads: int = 4) -> ts.Context:
    """A cache of CACHE_BYTES and a limit of `read_threads` concurrent reads, shared by stores that are read together."""
    limits = {"cache_pool": {"total_bytes_limit": CACHE_BYTES}}
    limits |= {name: {"limit": read_threads} for name in ("file_io_concurrency", "gcs_request_concurrency")}
    return ts.Context(limits, parent=storage.SHARED_CONTEXT)


class TokenStore:
    """One split of a token store. Opening checks that all shards exist; reading checks the CRC of every chunk, and that a shard has not
    been exchanged with another.
    """

    def __init__(self, path: str, split: Split = "train", *, context: ts.Context | None = None) -> None:
        """The split `split` of the store in the folder `path`, local or gs://.

        `context`: from `read_context`, for stores that share a cache; None: one of its own. Raises UserError: there is no store, it is
        unfinished or of another kind, or parts of it are missing, cut short or edited. Raises UnavailableError: it cannot be reached now.
        """
        self.path, self.split = path.rstrip("/"), split
        self.info = _finished(self.path)
        context = context or read_context()
        manifest.check_files(
            self.path, self.info, [manifest.TOKENIZER, *(name for name in self.info.files if name.startswith(f"{split}/"))]
        )
        self._tokens = _FlatArray(self, "tokens", np.dtype(self.info.dtype), self.size.tokens, storage.TOKENS, context)
        self._documents = _FlatArray(self, "documents", np.dtype(np.uint64), self.size.documents + 1, storage.DOCUMENTS, context)

    @property
    def size(self) -> SplitInfo:
        """Tokens and documents of this split."""
        return self.info.splits[self.split]

    @property
    def n_tokens(self) -> int:
        """Tokens of this split, end-of-document tokens included."""
        return self.size.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, in the store's dtype, without marks. Raises DamagedStoreError; UnavailableError after some
        tries.
        """
        assert 0 <= start <= stop <= self.n_tokens, (start, stop, self.n_tokens)
        tokens = self._tokens.read([(start, stop)])[0]
        return tokens if self.info.content == "text" else tokens & marks.IDS

    def read_marked(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Tokens [start, stop) of every range, as they are stored: see `marks`. Raises as `read`."""
        assert all(0 <= start <= stop <= self.n_tokens for start, stop in ranges), (ranges, self.n_tokens)
        return self._tokens.read_each(ranges)

    def read_documents(self, start: int, stop: int) -> np.ndarray:
        """Offsets of the first token of documents [start, stop), uint64; n_documents is the end of the stream. Raises as `read`."""
        assert 0 <= start <= stop <= self.size.documents + 1, (start, stop, self.size)
        return self._documents.read([(start, stop)])[0]

    def document_at(self, token: int) -> int:
        """Number of the document that holds a token of the stream. Raises as `read`."""
        assert 0 <= token < self.n_tokens, (token, self.n_tokens)
        numbers = range(self.size.documents)
        return bisect_right(numbers, token, key=lambda number: int(self.read_documents(number, number + 1)[0])) - 1

    def read_windows(self, starts: Sequence[int] | np.ndarray, width: int, end: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Windows read together: tokens [B, width] in the store's dtype, zero from token `end` of the stream on (None: its own end), and
        how many of each row are real [B]. For stores of text. Raises as `read`.
        """
        assert self.info.content == "text", "conversations are packed"
        starts = np.asarray(starts, np.int64)
        end = self.n_tokens if end is None else end
        lengths = np.clip(end - starts, 0, width)
        windows = np.zeros((len(starts), width), self.info.dtype)
        whole = np.flatnonzero(lengths == width)
        if len(whole):
            windows[whole] = self._tokens.read([(int(start), int(start) + width) for start in starts[whole]])
        for row in np.flatnonzero((lengths > 0) & (lengths < width)):
            windows[row, : lengths[row]] = self.read(int(starts[row]), end)
        return windows, lengths

    def bad_chunks(self, start: int, stop: int) -> list[int]:
        """Indices of the unreadable chunks among those that hold tokens [start, stop)."""
        chunk, bad = storage.TOKENS.chunk, []
        for number in range(start // chunk, -(-min(stop, self.n_tokens) // chunk)):
            try:
                self.read(number * chunk, min((number + 1) * chunk, self.n_tokens))
            except DamagedStoreError:
                bad.append(number)
        return bad


def _finished(path: str) -> StoreInfo:
    """The manifest of a finished store. Raises UserError if there is none, naming the folder that a relative path counts from."""
    info = manifest.load(path)
    if info is not None:
        return info
    if storage.read_bytes(path, manifest.PROGRESS) is not None:
        raise UserError(f"{path} is unfinished: its preparation was interrupted; run `maxlm data prepare` again to continue.")
    seen_from = "" if is_remote(path) or Path(path).is_absolute() else f", seen from {Path.cwd()}"
    raise UserError(f"{path} is not a token store (no {manifest.MANIFEST} in it{seen_from}); make it with `maxlm data prepare`.")


class _FlatArray:
    """One array of a split. Opening compares it with store.json without reading it."""

    def __init__(self, store: TokenStore, name: str, dtype: np.dtype, length: int, layout: ArrayLayout, context: ts.Context) -> None:
        self._store, self._name, self._dtype, self._length, self._layout = store, name, dtype, length, layout
        self._folder = f"{store.path}/{store.split}/{name}"
        self._array = array = storage.open_array(self._folder, context=context)
        if array.dtype.numpy_dtype != dtype or array.shape != (length,):
            actual = f"{array.dtype.name} of shape {array.shape}, not {dtype.name} of shape {(length,)}"
            raise UserError(f"{self._folder} is not the array that {manifest.MANIFEST} describes: {actual}; {REMAKE}.")
        self._samples = self._read_samples()
        self._verified: set[int] = set()  # shards with compared samples
        if is_remote(store.path):
            if length:  # an object in a bucket is whole or absent, and reading an absent one fails
                self.read([(length - 1, length)])
            return
        for shard in range(layout.shards(length)):
            file = Path(self._folder).expanduser() / "c" / str(shard)
            expected = layout.size_of(shard, length, dtype.itemsize)
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                raise UserError(f"{file} is missing; {REMAKE}.")
            if size != expected:
                raise UserError(f"{file} is cut short or foreign: {size:,} bytes, not {expected:,}; {REMAKE}.")

    def read(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """Elements [start, stop) of each range, all of one length, stacked; transient failures are retried."""

        def stacked(views: list[ts.TensorStore]) -> np.ndarray:
            with ts.Batch() as batch:  # one request for neighbours in a shard
                future = ts.stack(views).read(batch=batch)
            return np.asarray(future.result())

        return retried(lambda: self._read(ranges, stacked), f"reading {self._folder}")

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Elements [start, stop) of each range, of any lengths; transient failures are retried."""

        def each(views: list[ts.TensorStore]) -> list[np.ndarray]:
            with ts.Batch() as batch:
                futures = [view.read(batch=batch) for view in views]
            return [np.asarray(future.result()) for future in futures]

        return retried(lambda: self._read(ranges, each), f"reading {self._folder}")

    def _read(self, ranges: Sequence[tuple[int, int]], read: Callable[[list[ts.TensorStore]], T]) -> T:
        try:
            for start, stop in ranges:
                for shard in range(start // self._layout.shard, self._layout.shards(stop)):
                    self._verify(shard)
            views = [self._array[start:stop].translate_to[0] for start, stop in ranges]
            fix = f"{REMAKE}; data.skip_bad_chunks.at_most=100 leaves out what is damaged" if self._name == "tokens" else REMAKE
            doing = f"read its {self._store.split} {self._name} ({fix})"
            with storage.failures_named(self._store.path, doing, DamagedStoreError):
                return read(views)
        except DamagedStoreError as error:
            if storage.read_bytes(self._store.path, manifest.MANIFEST) is None:  # an unmounted file system is empty
                raise UnavailableError(f"{self._store.path} is gone; start again when it is available.") from error
            raise

    def _verify(self, shard: int) -> None:
        """Compare the samples of a shard with those recorded, once. A few may differ because of damaged chunks, which CRCs report."""
        if self._samples is None or shard in self._verified:
            return
        samples = storage.shard_samples(self._folder, shard, self._layout.size_of(shard, self._length, self._dtype.itemsize))
        if np.count_nonzero(samples != self._samples[shard]) > storage.SAMPLES // 2:
            problem = f"{self._folder}/c/{shard} is damaged or another shard's"
            raise DamagedStoreError(f"{self._store.path}: cannot read its {self._store.split} {self._name}: {problem}; {REMAKE}.")
        self._verified.add(shard)

    def _read_samples(self) -> np.ndarray | None:
        """Recorded samples of all shards, [shards, SAMPLES]; None in a store without checksums."""
        name = f"{self._folder.removeprefix(self._store.path + '/')}.shards"
        if name not in self._store.info.files:
            return None
        content = storage.read_bytes(self._store.path, name) or b""
        return np.frombuffer(content, "<u4").reshape(-1, storage.SAMPLES)
