"""Bytes and flat arrays on a disk or in a bucket, through TensorStore. Every failure is a UserError naming the place.

A flat array is a one-dimensional zarr3 array in the sharding codec: one object (a shard) holds many small uncompressed
chunks, so a random window costs one short read, and every chunk carries a CRC32C, so bit rot and truncation are noticed.
Chunks that hold only zeros are stored too: an absent chunk is then always damage, never a zero.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from maxlm.config.errors import UserError

CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16  # offset and length of a chunk inside its shard
SHARED_CONTEXT = ts.Context()


@dataclass(frozen=True)
class ArrayLayout:
    """How a flat array is cut, in elements: `chunk` is what a read fetches, `shard` is what an object holds."""

    chunk: int
    shard: int

    def shard_bytes(self, elements: int, itemsize: int) -> int:
        """Size in bytes of a shard that holds `elements` of `itemsize` bytes: whole chunks, their CRCs, the index and its CRC."""
        chunks = -(-elements // self.chunk)
        return chunks * (self.chunk * itemsize + CRC_BYTES) + self.shard // self.chunk * INDEX_ENTRY_BYTES + CRC_BYTES


# 2**13 uint16 tokens are a 16 KiB read; 2**24 tokens a shard are 900,000 objects for 15 trillion tokens.
TOKENS = ArrayLayout(chunk=2**13, shard=2**24)
DOCUMENTS = ArrayLayout(chunk=2**10, shard=2**20)


@contextlib.contextmanager
def failures_named(place: str, doing: str) -> Iterator[None]:
    """Turn what TensorStore and the file system raise into a UserError that names `place`."""
    try:
        yield
    except (ValueError, OSError) as error:  # TensorStore raises ValueError with its status in front
        reason = str(error).split(" [tensorstore_spec=")[0].replace("\x00", "")
        raise UserError(f"{place}: cannot {doing}: {reason}") from error


def is_remote(path: str) -> bool:
    """Whether `path` is a URL (gs://bucket/folder) rather than a path of this machine."""
    return "://" in path


def kvstore_spec(path: str) -> Any:
    """TensorStore's name for the folder `path`."""
    if is_remote(path):
        return path.rstrip("/") + "/"
    return {"driver": "file", "path": f"{Path(path).expanduser().absolute()}/"}


def open_folder(path: str) -> ts.KvStore:
    """The folder `path`, local or gs://, as keys and bytes. It need not exist."""
    with failures_named(path, "open it"):
        return ts.KvStore.open(kvstore_spec(path), context=SHARED_CONTEXT).result()


def read_bytes(folder: str, key: str) -> bytes | None:
    """The object `key` in `folder`, or None where there is none."""
    with failures_named(f"{folder}/{key}", "read it"):
        result = open_folder(folder).read(key).result()
        return bytes(result.value) if result.state == "value" else None


def write_bytes(folder: str, key: str, value: bytes) -> None:
    """Write the object `key`, atomically: readers see all of it or none."""
    with failures_named(f"{folder}/{key}", "write it"):
        open_folder(folder).write(key, value).result()


def delete_prefix(folder: str, prefix: str) -> None:
    """Delete every object in `folder` whose key begins with `prefix`."""
    with failures_named(f"{folder}/{prefix}", "delete it"):
        store = open_folder(folder)
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # the first key that no longer begins with it
        store.delete_range(ts.KvStore.KeyRange(prefix, after)).result()


def array_spec(folder: str, **options: Any) -> dict[str, Any]:
    """The TensorStore spec of the array in `folder`."""
    return {"driver": "zarr3", "kvstore": kvstore_spec(folder), **options}


def create_array(folder: str, dtype: np.dtype, layout: ArrayLayout) -> ts.TensorStore:
    """A new empty flat array in `folder`; whatever was there is deleted. Grow it with `resize`."""
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    if dtype.itemsize == 1:
        checked[0] = {"name": "bytes"}
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": [layout.chunk], "codecs": checked, "index_codecs": index}
    metadata = {
        "shape": [0],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = array_spec(folder, metadata=metadata, store_data_equal_to_fill_value=True)
    with failures_named(folder, "create it"):
        return ts.open(spec, create=True, delete_existing=True, context=SHARED_CONTEXT).result()


def open_array(folder: str, *, context: ts.Context | None = None, write: bool = False) -> ts.TensorStore:
    """The flat array in `folder`. A chunk that is missing or damaged raises when it is read."""
    options = {"store_data_equal_to_fill_value": True} if write else {"recheck_cached_data": False}
    with failures_named(folder, "open it"):
        spec = array_spec(folder, fill_missing_data_reads=False, **options)
        return ts.open(spec, open=True, read=True, write=write, context=context or SHARED_CONTEXT).result()
