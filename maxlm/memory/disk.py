"""State in a scratch file, by units of an update: what an optimizer reads at once lies side by side in the file.

Each process keeps the parts of its own devices, one copy of each. Reads and writes are large aligned requests past the page cache, several
in flight.
"""

import contextlib
import errno
import itertools
import logging
import math
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from maxlm.base.errors import UnavailableError, UserError, error_kind
from maxlm.config.sections.offload_state import NvmeConfig
from maxlm.memory.spaces import HOST, on_device

ALIGN = 4096  # of offsets, sizes and addresses: direct I/O on any disk
REQUEST_BYTES = 16 * 2**20
FIELD = "memory.offload_state.nvme.dir"

_REASONS = {
    errno.ENOENT: ("does not exist on this host", "make it, on a local disk"),
    errno.ENOTDIR: ("is not a folder", "name a folder on a local disk"),
    errno.EINVAL: ("is on a file system without direct I/O", "name a folder on a local disk (tmpfs has no direct I/O)"),
    errno.EACCES: ("is not writable", "allow it, or name another folder"),
    errno.EROFS: ("is read-only", "name another folder"),
}


def aligned(size: int) -> int:
    """`size`, rounded up to whole blocks."""
    return -(-size // ALIGN) * ALIGN


def _whole_blocks(moved: int) -> int:
    """Bytes of a request that was cut short from which on it can be repeated. Raises OSError if that is none."""
    if moved < ALIGN:
        raise OSError(errno.EIO, "a request was cut short")
    return moved // ALIGN * ALIGN


class Buffer:
    """Host memory at an aligned address."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(aligned(size), ALIGN))
        self.view = memoryview(self._map)


class ScratchFile:
    """A file of fixed size without a name: the system frees it when the process ends, however it ends. So no later start can read it."""

    def __init__(self, folder: str, size: int, threads: int) -> None:
        """Reserve `size` bytes in `folder`. Raises UserError if that is impossible."""
        self._folder, self._size = folder, aligned(size)
        path = Path(folder) / f".maxlm-{secrets.token_hex(8)}"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError as error:
            path.unlink(missing_ok=True) if error.errno == errno.EINVAL else None
            raise self._explained(error) from None
        path.unlink()
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
        except OSError as error:
            os.close(self._descriptor)
            raise self._explained(error) from None
        self._pool = ThreadPoolExecutor(threads, "maxlm-nvme")

    def close(self) -> None:
        """Wait for requests in flight, and free the space."""
        self._pool.shutdown()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def read(self, offset: int, view: memoryview) -> list[Future[None]]:
        """Start to fill `view` from `offset`."""
        return self._requests(self._read, offset, view)

    def write(self, offset: int, view: memoryview) -> list[Future[None]]:
        """Start to write `view` at `offset`."""
        return self._requests(self._write, offset, view)

    def wait(self, requests: Sequence[Future[None]]) -> None:
        """Wait for requests. Raises UnavailableError for a failed request: the next start makes a new file from the checkpoint."""
        for request in requests:
            try:
                request.result()
            except OSError as error:
                raise UnavailableError(str(self._explained(error))) from None

    def _requests(self, move: object, offset: int, view: memoryview) -> list[Future[None]]:
        starts = range(0, len(view), REQUEST_BYTES)
        return [self._pool.submit(move, offset + start, view[start : start + REQUEST_BYTES]) for start in starts]  # type: ignore[arg-type]

    def _read(self, offset: int, view: memoryview) -> None:
        while view:
            moved = _whole_blocks(os.preadv(self._descriptor, [view], offset))
            offset, view = offset + moved, view[moved:]

    def _write(self, offset: int, view: memoryview) -> None:
        while view:
            moved = _whole_blocks(os.pwritev(self._descriptor, [view], offset))
            offset, view = offset + moved, view[moved:]

    def _explained(self, error: OSError) -> UserError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self._folder).free
            reason = f"has no room for {self._size / 1e9:.1f} GB of state ({free / 1e9:.1f} GB are free)"
            fix = "free space, or name another folder"
        else:
            reason, fix = _REASONS.get(error.errno or 0, (f"fails ({error.strerror})", "check the disk, or name another folder"))
        return error_kind(error)(f"{FIELD} = {self._folder} {reason}; {fix}.")


SLOW_BYTES_PER_S = 200e6  # slower than any NVMe disk

LeafPath = tuple[str, ...]  # of a leaf in the state
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A piece of a leaf on the devices of this process: `slots` says which of the distinct tiles a device holds."""

    path: LeafPath
    shape: tuple[int, ...]  # of the piece on all devices
    tile: tuple[int, ...]  # of one device's part
    dtype: Any
    sharding: NamedSharding
    slots: Mapping[jax.Device, int]
    offset: int  # in its unit

    @property
    def stride(self) -> int:
        """Bytes from one tile to the next."""
        return aligned(math.prod(self.tile) * np.dtype(self.dtype).itemsize)

    @property
    def bytes(self) -> int:
        """Bytes of all tiles."""
        return self.stride * len(set(self.slots.values()))

    def tiles(self, view: memoryview) -> list[np.ndarray]:
        """The tiles in a unit's bytes."""
        count, starts = math.prod(self.tile), range(self.offset, self.offset + self.bytes, self.stride)
        return [np.frombuffer(view, self.dtype, count, start).reshape(self.tile) for start in starts]


class Unit(NamedTuple):
    """Piece `piece` of the leaves of a group."""

    group: int
    piece: int
    offset: int  # in the file
    bytes: int
    parts: tuple[Part, ...]


class DiskArray:
    """A leaf of the state that is in the file. It is no jax.Array, so nothing computes with it by mistake."""

    def __init__(self, state: "DiskState", path: LeafPath, leaf: Any) -> None:
        self._state, self.path = state, path
        self.shape, self.dtype, self.sharding = leaf.shape, leaf.dtype, leaf.sharding

    def load(self) -> jax.Array:
        """The array in host memory."""
        return self._state.load(self)

    def delete(self) -> None:
        """Nothing: the file is overwritten by the next state."""


def load_all(tree: Any) -> Any:
    """`tree` with arrays in host memory in place of those in files."""
    return jax.tree.map(lambda leaf: leaf.load() if isinstance(leaf, DiskArray) else leaf, tree)


class DiskState:
    """The leaves of a state that are kept in a file, and what is in flight."""

    def __init__(self, groups: Sequence[tuple[Mapping[LeafPath, Any], int]], settings: NvmeConfig) -> None:
        """`groups`: for each group its leaves in the file (abstract, with shardings), and its pieces. Raises UserError without room."""
        self._leaves = dict(itertools.chain.from_iterable(leaves.items() for leaves, _ in groups))
        self.units: list[Unit] = []
        end = 0
        for number, (leaves, pieces) in enumerate(groups):
            for piece in range(pieces if leaves else 0):
                parts = _parts(leaves, pieces)
                size = sum(part.bytes for part in parts)
                self.units.append(Unit(number, piece, end, size, parts))
                end += size
        self.bytes = end
        self._settings = settings
        self._file = ScratchFile(settings.dir, end, settings.threads)
        largest = max((unit.bytes for unit in self.units), default=0)
        self._reading, self._writing = ([Buffer(largest) for _ in range(2)] for _ in range(2))
        self._reads: dict[int, list[Future[None]]] = {}  # by number of the unit
        self._writes: list[list[Future[None]]] = [[], []]  # by buffer
        self._written = 0  # units
        self._failed: UserError | None = None
        self._adopted, self._adopting, self._warned = 0, 0.0, False  # bytes, seconds

    def array(self, path: LeafPath) -> DiskArray:
        """The leaf of this path."""
        return DiskArray(self, path, self._leaves[path])

    def adopt(self, leaves: Mapping[LeafPath, jax.Array]) -> None:
        """Write whole leaves, of all paths or of some, whatever the file held."""
        for requests in (*self._reads.values(), *self._writes):  # of an update that was cut short
            with contextlib.suppress(UserError):
                self._file.wait(requests)
        self._reads, self._writes, self._failed = {}, [[], []], None
        began = time.monotonic()
        for unit in self.units:
            parts = [part for part in unit.parts if part.path in leaves]
            self._adopted += sum(part.bytes for part in parts)
            if parts:
                self._write(unit, parts, [[_piece(part, unit.piece, tile) for tile in _by_slot(part, leaves[part.path])] for part in parts])
        self.flush()
        self._adopting += time.monotonic() - began
        speed = self._adopted / max(self._adopting, 1e-9)
        if self._adopted > 2**28 and speed < SLOW_BYTES_PER_S and not self._warned:
            self._warned = True
            least, place = 2 * self.bytes / speed, self._settings.dir
            _log.warning("%s = %s is slow: it writes %.0f MB/s, so an update takes %.0f s or more", FIELD, place, speed / 1e6, least)

    def start_read(self, number: int) -> None:
        """Start to read a unit, if there is one of this number. At most two may be read and not yet taken."""
        if number < len(self.units) and number not in self._reads:
            unit = self.units[number]
            self._reads[number] = self._file.read(unit.offset, self._reading[number % 2].view[: unit.bytes])

    def take(self, number: int) -> list[jax.Array]:
        """The pieces of a unit on the devices, in the order of its parts; its buffer is free then."""
        unit = self.units[number]
        self._check(self._reads.pop(number))
        arrays = [_on_devices(part, part.tiles(self._reading[number % 2].view)) for part in unit.parts]
        jax.block_until_ready(arrays)
        return arrays

    def give(self, number: int, pieces: Sequence[jax.Array]) -> None:
        """Start to write a unit's new pieces, once a buffer is free."""
        unit = self.units[number]
        self._write(unit, unit.parts, [_by_slot(part, piece) for part, piece in zip(unit.parts, pieces, strict=True)])

    def flush(self) -> None:
        """Wait for all writes."""
        for requests in self._writes:
            self._check(requests)
        self._writes = [[], []]

    def load(self, array: DiskArray) -> jax.Array:
        """A whole leaf in host memory. Raises UserError after an error of the disk: the file may hold a half-written state."""
        if self._failed is not None:
            raise self._failed
        self.flush()
        shape, slots = array.sharding.shard_shape(array.shape), dict[jax.Device, int]()
        tiles: dict[int, np.ndarray] = {}
        for unit, part in ((one, part) for one in self.units for part in one.parts if part.path == array.path):
            buffer = Buffer(part.bytes)
            self._check(self._file.read(unit.offset + part.offset, buffer.view[: part.bytes]))
            for slot, tile in enumerate(part._replace(offset=0).tiles(buffer.view)):
                np.copyto(_piece(part, unit.piece, tiles.setdefault(slot, np.empty(shape, array.dtype))), tile)
            slots = dict(part.slots)
        placed = [jax.device_put(tiles[slot], SingleDeviceSharding(device, memory_kind=HOST)) for device, slot in slots.items()]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)

    def close(self) -> None:
        """Free the space."""
        self._file.close()

    def _write(self, unit: Unit, parts: Sequence[Part], tiles: Sequence[Sequence[np.ndarray]]) -> None:
        """Copy tiles of parts of a unit to a buffer, once that is free, and start to write it."""
        which = self._written % 2
        self._written += 1
        self._check(self._writes[which])
        view = self._writing[which].view
        for part, found in zip(parts, tiles, strict=True):
            for target, tile in zip(part.tiles(view), found, strict=True):
                np.copyto(target, tile)
        spans = [(0, unit.bytes)] if len(parts) == len(unit.parts) else [(part.offset, part.bytes) for part in parts]
        requests = (self._file.write(unit.offset + start, view[start : start + size]) for start, size in spans)
        self._writes[which] = list(itertools.chain.from_iterable(requests))

    def _check(self, requests: Sequence[Future[None]]) -> None:
        try:
            self._file.wait(requests)
        except UserError as error:
            self._failed = error
            raise


def _parts(leaves: Mapping[LeafPath, Any], pieces: int) -> tuple[Part, ...]:
    found, offset = [], 0
    for path, leaf in leaves.items():
        shape = (leaf.shape[0] // pieces, *leaf.shape[1:]) if pieces > 1 else tuple(leaf.shape)
        sharding = on_device(leaf.sharding)
        numbers: dict[Any, int] = {}
        indices = sharding.addressable_devices_indices_map(shape)
        slots = {device: numbers.setdefault(str(index), len(numbers)) for device, index in indices.items()}
        part = Part(path, shape, sharding.shard_shape(shape), leaf.dtype, sharding, slots, offset)
        found.append(part)
        offset += part.bytes
    return tuple(found)


def _piece(part: Part, number: int, whole: np.ndarray) -> np.ndarray:
    """The rows of a piece, of one device's part of a whole leaf."""
    if whole.shape == part.tile:
        return whole
    rows = part.tile[0]
    return whole[number * rows : (number + 1) * rows]


def _by_slot(part: Part, array: jax.Array) -> list[np.ndarray]:
    """The distinct tiles of an array on this process's devices."""
    found: dict[int, np.ndarray] = {}
    for shard in array.addressable_shards:
        slot = part.slots[shard.device]
        if slot not in found:
            found[slot] = np.asarray(shard.data)
    return [found[slot] for slot in range(len(found))]


def _on_devices(part: Part, tiles: Sequence[np.ndarray]) -> jax.Array:
    """The piece on the devices. The tiles' memory is used again, and jax may take memory for a CPU's array as it is."""
    placed = [
        jax.device_put(np.array(tiles[slot]) if device.platform == "cpu" else tiles[slot], device) for device, slot in part.slots.items()
    ]
    return jax.make_array_from_single_device_arrays(part.shape, part.sharding, placed)
