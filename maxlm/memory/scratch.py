"""A file for state that is read and written in large aligned requests past the page cache, several in flight."""

import contextlib
import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from maxlm.base.errors import UnavailableError, UserError, error_kind

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
        """Wait for what is in flight, and free the space."""
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
        """Wait for requests. Raises UnavailableError for one that failed: the next start makes a new file from the checkpoint."""
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
