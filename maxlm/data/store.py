"""Reading a token store: ranges and windows of the flat token stream, from a disk or a bucket."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts

from maxlm.config.errors import UserError
from maxlm.data import manifest, storage
from maxlm.data.manifest import Split, SplitInfo, StoreInfo
from maxlm.data.storage import ArrayLayout

CACHE_BYTES = 2**28  # of chunks and shard indices, in this process
REMAKE = "run `maxlm data prepare` again, after deleting the folder if it still fails"


def read_context(read_threads: int = 4) -> ts.Context:
    """A cache of CACHE_BYTES and `read_threads` concurrent reads, to be shared by stores that are read together."""
    limits = {"cache_pool": {"total_bytes_limit": CACHE_BYTES}}
    limits |= {name: {"limit": read_threads} for name in ("file_io_concurrency", "gcs_request_concurrency")}
    return ts.Context(limits, parent=storage.SHARED_CONTEXT)


class TokenStore:
    """One split of a token store. Opening checks that all of it is there; reading checks every chunk's CRC."""

    def __init__(self, path: str, split: Split, info: StoreInfo, context: ts.Context) -> None:
        """Use `TokenStore.open`."""
        self.path, self.split, self.info = path, split, info
        self._tokens = self._array("tokens", np.dtype(info.dtype), self.size.tokens, storage.TOKENS, context)
        self._documents = self._array("documents", np.dtype(np.uint64), self.size.documents + 1, storage.DOCUMENTS, context)

    @classmethod
    def open(cls, path: str, split: Split = "train", *, context: ts.Context | None = None) -> "TokenStore":
        """The split `split` of the store in the folder `path`, local or gs://.

        `context` is what `read_context` gave, for stores that share a cache; None: its own.

        Raises:
            UserError: there is no store, it is unfinished or of another kind, or parts of it are missing or cut short.
        """
        path = path.rstrip("/")
        info = manifest.load(path)
        if info is None:
            if storage.read_bytes(path, manifest.PROGRESS) is not None:
                raise UserError(f"{path} is unfinished: its preparation was interrupted; run `maxlm data prepare` again to go on.")
            raise UserError(f"{path} is not a token store (no {manifest.MANIFEST} in it); make it with `maxlm data prepare`.")
        return cls(path, split, info, context or read_context())

    @property
    def size(self) -> SplitInfo:
        """Tokens and documents of this split."""
        return self.info.splits[self.split]

    @property
    def n_tokens(self) -> int:
        """Tokens of this split, end-of-document tokens included."""
        return self.size.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, in the store's dtype."""
        assert 0 <= start <= stop <= self.n_tokens, (start, stop, self.n_tokens)
        return self._read(self._tokens[start:stop])

    def read_documents(self, start: int, stop: int) -> np.ndarray:
        """Offsets of the first token of documents [start, stop), uint64; document n_documents is the end of the stream."""
        assert 0 <= start <= stop <= self.size.documents + 1, (start, stop, self.size)
        return self._read(self._documents[start:stop])

    def read_windows(self, starts: Sequence[int] | np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows of `width` tokens, read together.

        Returns:
            Tokens [B, width] in the store's dtype, zero beyond the end of the stream, and how many of each row are real [B].
        """
        starts = np.asarray(starts, np.int64)
        lengths = np.clip(self.n_tokens - starts, 0, width)
        whole = np.flatnonzero(lengths == width)
        parts = [self._tokens[int(start) : int(start) + width].translate_to[0] for start in starts[whole]]
        if len(parts) == len(starts) and parts:
            return self._read(ts.stack(parts)), lengths
        windows = np.zeros((len(starts), width), self.info.dtype)
        if parts:
            windows[whole] = self._read(ts.stack(parts))
        for row in np.flatnonzero((lengths > 0) & (lengths < width)):
            windows[row, : lengths[row]] = self.read(int(starts[row]), self.n_tokens)
        return windows, lengths

    def _read(self, view: ts.TensorStore) -> np.ndarray:
        with storage.failures_named(self.path, f"read its {self.split} tokens ({REMAKE})"):
            with ts.Batch() as batch:  # one request for neighbours in a shard
                future = view.read(batch=batch)
            return future.result()

    def _array(self, name: str, dtype: np.dtype, length: int, layout: ArrayLayout, context: ts.Context) -> ts.TensorStore:
        """Open an array and check, without reading it, that it is what the manifest says."""
        folder = f"{self.path}/{self.split}/{name}"
        array = storage.open_array(folder, context=context)
        if array.dtype.numpy_dtype != dtype or array.shape != (length,):
            found = f"{array.dtype.name} of shape {array.shape}, not {dtype.name} of shape {(length,)}"
            raise UserError(f"{folder} is not the array that {manifest.MANIFEST} describes: {found}; {REMAKE}.")
        if storage.is_remote(self.path):
            if length:  # objects in a bucket are whole or absent; reads notice an absent one
                self._read(array[length - 1 :])
            return array
        for shard in range(-(-length // layout.shard)):
            file = Path(folder).expanduser() / "c" / str(shard)
            expected = layout.shard_bytes(min(length - shard * layout.shard, layout.shard), dtype.itemsize)
            found_bytes = file.stat().st_size if file.is_file() else None
            if found_bytes is None:
                raise UserError(f"{file} is missing; {REMAKE}.")
            if found_bytes != expected:
                raise UserError(f"{file} is cut short or foreign: {found_bytes:,} bytes, not {expected:,}; {REMAKE}.")
        return array
