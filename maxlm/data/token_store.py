"""Read a token store: ranges and windows of the flat token stream, from a disk or a bucket."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import tensorstore as ts

from maxlm.base.errors import MissingError, UnavailableError, UserError
from maxlm.base.paths import is_remote
from maxlm.base.transient import retried
from maxlm.data import manifest, marks, storage
from maxlm.data.manifest import REMAKE, Split, SplitInfo, StoreInfo
from maxlm.data.storage import DIGEST_BYTES, ArrayLayout, DamagedStoreError

CACHE_BYTES = 2**28  # in this process: half of it chunks and their digests, half of it TensorStore's, of shard indices above all
_AT_ONCE = 1024  # chunks that are read together: a longer range takes no more memory than its result


class ReadContext:
    """A cache of CACHE_BYTES and a limit of `read_threads` concurrent reads, shared by stores that are read together."""

    def __init__(self, read_threads: int = 4) -> None:
        limits = {"cache_pool": {"total_bytes_limit": CACHE_BYTES // 2}}
        limits |= {name: {"limit": read_threads} for name in ("file_io_concurrency", "gcs_request_concurrency")}
        self.tensorstore = ts.Context(limits, parent=storage.SHARED_CONTEXT)
        self._kept: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> np.ndarray | None:
        """Return the content under `key`; None if it was evicted or never kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: tuple[str, int], content: np.ndarray) -> np.ndarray:
        """Keep `content`, which must not change, and evict the least recently used entries."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = content
                self._bytes += content.nbytes
            while self._bytes > CACHE_BYTES // 2:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return content


class TokenStore:
    """One split of a token store. Opening checks that all shards exist; reading compares every chunk with the digest recorded in the store,
    each time that it is read from the disk or the bucket.
    """

    def __init__(self, path: str, split: Split = "train", *, context: ReadContext | None = None) -> None:
        """The split `split` of the store in the folder `path`, local or gs://.

        `context`: for stores that share a cache; None: one of its own. Raises UserError: there is no store, it is
        unfinished or of another kind, or parts of it are missing, cut short or edited. Raises UnavailableError: it cannot be reached now.
        """
        self.path, self.split = path.rstrip("/"), split
        self.info = _finished(self.path)
        context = context or ReadContext()
        manifest.check_split(self.path, self.info, split)
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
        return self._tokens.read(ranges)

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
    raise MissingError(f"{path} is not a token store (no {manifest.MANIFEST} in it{seen_from}); make it with `maxlm data prepare`.")


class _FlatArray:
    """One array of a split. Opening compares it with store.json without reading it."""

    def __init__(self, store: TokenStore, name: str, dtype: np.dtype, length: int, layout: ArrayLayout, context: ReadContext) -> None:
        self._store, self._name, self._dtype, self._length, self._layout = store, name, dtype, length, layout
        self._folder, self._context = f"{store.path}/{store.split}/{name}", context
        self._per_shard = layout.shard // layout.chunk
        self._array = array = storage.open_array(self._folder, context=context.tensorstore)
        if array.dtype.numpy_dtype != dtype or array.shape != (length,):
            actual = f"{array.dtype.name} of shape {array.shape}, not {dtype.name} of shape {(length,)}"
            raise UserError(f"{self._folder} is not the array that {manifest.MANIFEST} describes: {actual}; {REMAKE}.")
        self._shards = storage.read_bytes(f"{store.path}/{store.split}", f"{name}.shards") or b""  # digests of the digests of each shard
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

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Elements [start, stop) of each range; transient failures are retried."""
        found = [np.empty(stop - start, self._dtype) for start, stop in ranges]
        size, places = self._layout.chunk, dict[int, list[tuple[int, int, np.ndarray]]]()
        for (start, stop), out in zip(ranges, found, strict=True):
            for chunk in range(start // size, -(-stop // size)):
                places.setdefault(chunk, []).append((start, stop, out))
        chunks = sorted(places)
        for at in range(0, len(chunks), _AT_ONCE):
            together = chunks[at : at + _AT_ONCE]
            kept = {chunk: values for chunk in together if (values := self._context.get((self._folder, chunk))) is not None}
            if missing := [chunk for chunk in together if chunk not in kept]:
                kept |= zip(missing, retried(partial(self._load, missing), f"reading {self._folder}"), strict=True)
            for chunk, values in kept.items():
                first = chunk * size
                for start, stop, out in places[chunk]:
                    low, high = max(start, first), min(stop, first + size)
                    out[low - start : high - start] = values[low - first : high - first]
        return found

    def _load(self, chunks: Sequence[int]) -> list[np.ndarray]:
        size = self._layout.chunk
        try:
            recorded = []  # before TensorStore, which remembers that a shard is missing
            for chunk in chunks:
                shard, number = divmod(chunk, self._per_shard)
                recorded.append(self._digests(shard)[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES].tobytes())
            fix = f"{REMAKE}; data.skip_bad_chunks.at_most=100 leaves out what is damaged" if self._name == "tokens" else REMAKE
            doing = f"read its {self._store.split} {self._name} ({fix})"
            with storage.failures_named(self._store.path, doing, DamagedStoreError):
                with ts.Batch() as batch:  # one request for neighbours in a shard
                    reads = [self._array[chunk * size : min((chunk + 1) * size, self._length)].read(batch=batch) for chunk in chunks]
                loaded = [np.asarray(read.result()) for read in reads]
            for chunk, values, digest in zip(chunks, loaded, recorded, strict=True):
                if digest != storage.digest(values.data):
                    shard, number = divmod(chunk, self._per_shard)
                    raise self._damaged(f"c/{shard}, chunk {number}, is not what was written: its digest differs from the recorded one")
                self._context.keep((self._folder, chunk), values)
        except DamagedStoreError as error:
            if storage.read_bytes(self._store.path, manifest.MANIFEST) is None:  # an unmounted file system is empty
                raise UnavailableError(f"{self._store.path} is gone; start again when it is available.") from error
            raise
        return loaded

    def _digests(self, shard: int) -> np.ndarray:
        """Recorded digests of the chunks of a shard. Raises DamagedStoreError: the record was changed."""
        key = (f"{self._folder}/digests", shard)
        kept = self._context.get(key)
        if kept is not None:
            return kept
        content = storage.read_bytes(self._folder, f"digests/{shard}") or b""
        if storage.digest(content) != self._shards[shard * DIGEST_BYTES : (shard + 1) * DIGEST_BYTES]:
            raise self._damaged(f"digests/{shard} is missing, damaged or was edited")
        return self._context.keep(key, np.frombuffer(content, np.uint8))

    def _damaged(self, problem: str) -> DamagedStoreError:
        doing = f"cannot read its {self._store.split} {self._name}"
        return DamagedStoreError(f"{self._store.path}: {doing}: {self._folder}/{problem}; {REMAKE}.")
