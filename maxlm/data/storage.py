"""Bytes and flat arrays on a disk or in a bucket, through TensorStore. Every failure is a UserError naming the path: UnavailableError if
the medium, the network or a credential failed, DamagedStoreError or another UserError if the content is wrong.

A flat array is a one-dimensional zarr3 array in the sharding codec: one object (a shard) holds many small uncompressed
chunks, so a random window costs one short read, and every chunk carries a CRC32C, so bit rot and truncation are noticed.
Chunks that hold only zeros are stored too: an absent chunk is then always damage, never a zero. `digests/SHARD` next to the shards holds
a digest of every chunk, so that a chunk which was rewritten with a CRC that fits is noticed too.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from maxlm.base import directory_lock
from maxlm.base.errors import UnavailableError, UserError
from maxlm.base.paths import irregular, is_remote, read_file
from maxlm.base.transient import is_transient

CRC_BYTES = 4
MOST_BYTES = 2**32  # of a small object, such as a manifest
INDEX_ENTRY_BYTES = 16  # offset and length of a chunk inside its shard
# The default of TensorStore is 32 silent tries over 15 minutes.
SHARED_CONTEXT = ts.Context({"gcs_request_retries": {"max_retries": 5, "initial_delay": "1s", "max_delay": "8s"}})
CREDENTIALS = "for gs:// run `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS to a key file that may read it"


class DamagedStoreError(UserError):
    """Stored bytes differ from those that were written; reading again does not help."""


@dataclass(frozen=True)
class ArrayLayout:
    """Partition of a flat array, in elements: `chunk` is the unit of a read, `shard` the content of an object."""

    chunk: int
    shard: int

    def shards(self, length: int) -> int:
        """Number of shards that hold `length` elements."""
        return -(-length // self.shard)

    def size_of(self, shard: int, length: int, itemsize: int) -> int:
        """Size in bytes of shard number `shard` of an array of `length` elements: whole chunks, their CRCs, the index and its CRC."""
        chunks = -(-min(length - shard * self.shard, self.shard) // self.chunk)
        return chunks * (self.chunk * itemsize + CRC_BYTES) + self.shard // self.chunk * INDEX_ENTRY_BYTES + CRC_BYTES


# 2**13 uint16 tokens are a 16 KiB read; 2**24 tokens a shard are 900,000 objects for 15 trillion tokens.
TOKENS = ArrayLayout(chunk=2**13, shard=2**24)
DOCUMENTS = ArrayLayout(chunk=2**10, shard=2**20)


@contextlib.contextmanager
def failures_named(path: str, doing: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn errors of TensorStore and the file system into one that names `path`: UnavailableError if transient, else `kind`."""
    try:
        yield
    except (ValueError, OSError) as error:  # TensorStore raises ValueError with its status in front
        reason = str(error).split(" [tensorstore_spec=")[0].split(" [os_error_code=")[0].replace("\x00", "")
        if not is_transient(error):
            raise kind(f"{path}: cannot {doing}: {reason}") from error
        hint = f"; {CREDENTIALS}" if path.startswith("gs://") else ""
        raise UnavailableError(f"{path}: cannot {doing}: {reason}{hint}; try again when the cause is gone.") from error


def kvstore_spec(path: str) -> Any:
    """TensorStore spec of the folder `path`."""
    if is_remote(path):
        return path.rstrip("/") + "/"
    return {"driver": "file", "path": f"{Path(path).expanduser().absolute()}/"}


def open_folder(path: str) -> ts.KvStore:
    """Open the folder `path`, local or gs://, as a key-value store. It need not exist."""
    with failures_named(path, "open it"):
        return ts.KvStore.open(kvstore_spec(path), context=SHARED_CONTEXT).result()


def read_bytes(folder: str, key: str) -> bytes | None:
    """Read the object `key` in `folder`; None if it does not exist. A pipe or a device is refused, which TensorStore would wait for."""
    with failures_named(f"{folder}/{key}", "read it"):
        if not is_remote(folder):
            try:
                return read_file(Path(folder).expanduser() / key, MOST_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except IsADirectoryError as error:
                raise DamagedStoreError(f"{folder}/{key}: {error.strerror}.") from error
        result = open_folder(folder).read(key).result()
        return bytes(result.value) if result.state == "value" else None


def write_bytes(folder: str, key: str, value: bytes) -> None:
    """Write the object `key`, atomically: readers see all of it or none."""
    directory_lock.check(None if is_remote(folder) else Path(folder).expanduser())
    with failures_named(f"{folder}/{key}", "write it"):
        open_folder(folder).write(key, value).result()


def delete(folder: str, key: str) -> None:
    """Delete the object `key` in `folder`, if it exists."""
    with failures_named(f"{folder}/{key}", "delete it"):
        open_folder(folder).write(key, None).result()


def delete_folder(folder: str) -> None:
    """Delete all objects in `folder`, if there are any."""
    with failures_named(folder, "delete it"):
        open_folder(folder).delete_range(ts.KvStore.KeyRange()).result()


DIGEST_BYTES = 16


def digest(content: bytes | memoryview) -> bytes:
    """SHA-256 of a chunk's elements in little-endian order, or of the digests of a shard, cut to DIGEST_BYTES."""
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]


def chunk_digests(values: np.ndarray, layout: ArrayLayout) -> bytes:
    """Digests of the chunks of one shard, in order; its last chunk may be shorter."""
    return b"".join(digest(values[start : start + layout.chunk].data) for start in range(0, len(values), layout.chunk))


def create_array(folder: str, dtype: np.dtype, layout: ArrayLayout) -> ts.TensorStore:
    """Create an empty flat array in `folder`, replacing what is there. Grow it with `resize`."""
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    chunks = [{"name": "bytes"}, {"name": "crc32c"}] if dtype.itemsize == 1 else index
    sharding = {"chunk_shape": [layout.chunk], "codecs": chunks, "index_codecs": index}
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = {"driver": "zarr3", "kvstore": kvstore_spec(folder), "metadata": metadata, "store_data_equal_to_fill_value": True}
    with failures_named(folder, "create it"):
        return ts.open(spec, create=True, delete_existing=True, context=SHARED_CONTEXT).result()


def open_array(folder: str, *, context: ts.Context | None = None, write: bool = False) -> ts.TensorStore:
    """Open the flat array in `folder`. Reading a missing or damaged chunk raises."""
    options = {"store_data_equal_to_fill_value": True} if write else {"recheck_cached_data": False}
    with failures_named(folder, "open it"):
        if not is_remote(folder) and (kind := irregular(Path(folder).expanduser() / "zarr.json")):
            raise ValueError(f"its zarr.json is {kind}, and not a regular file")
        spec = {"driver": "zarr3", "kvstore": kvstore_spec(folder), "fill_missing_data_reads": False, **options}
        return ts.open(spec, open=True, read=True, write=write, context=context or SHARED_CONTEXT).result()
