"""Copies of this host's part of the state, in a folder of its memory or local disk: `FOLDER/maxlm-UID/RUN/STEP-PROCESS/`.

Each holds `data`, the tiles one after another, and `manifest.json`, which describes the whole state as a checkpoint's manifest does,
and the tiles in `data`, each with its checksum and whether a peer has sent it. A copy is written under another name and renamed when it is
complete. Other users of the machine may not read or write here. RUN is a random number that the run has stored next to its checkpoints: no
other run's copies are read.

Processes mark the folder as in use by locked files with random names: containers that share it have process numbers of their own.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from maxlm.base import directory_lock
from maxlm.base.errors import ConfigError, UserError
from maxlm.base.host import process_namespace, process_started
from maxlm.checkpoint import manifest
from maxlm.checkpoint.errors import DamagedError
from maxlm.checkpoint.manifest import Manifest
from maxlm.checkpoint.tiles import Tiling

FIELD = "memory_checkpoints.folder"
_DATA, _MANIFEST = "data", "manifest.json"
_COPY = re.compile(r"([0-9]{1,10})-([0-9]{1,6})")
_DRAFT, _LEASE, _NEW = ".draft-", ".lease-", ".new-"
_STARTING_S = 60.0  # that a folder without any mark may belong to a process which is about to mark it
_OWNER_UNSEEN_S = 86400.0  # after the last copy, that an owner whom this process cannot see counts as alive
Tile = tuple[str, int]  # name of the leaf, number of the tile


@dataclasses.dataclass(frozen=True)
class Stored:
    """Place of a tile in `data`, in bytes, its CRC-32, and whether a peer has sent it."""

    offset: int
    size: int
    checksum: int
    received: bool


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A complete copy that one process wrote. `layout`: description of the whole state, the same text in all processes."""

    folder: Path
    layout: str
    tiles: dict[Tile, Stored]

    def read(self, tile: Tile) -> np.ndarray:
        """Bytes of a tile as uint8. Raises OSError, DamagedError."""
        place = self.tiles[tile]
        content = np.fromfile(self.folder / _DATA, np.uint8, place.size, offset=place.offset)
        if content.size != place.size or zlib.crc32(content.data) != place.checksum:
            raise DamagedError(f"the bytes of {tile[0]} are not the ones that were written")
        return content


@dataclasses.dataclass(frozen=True)
class Layout:
    """The whole state of a copy: a checkpoint's manifest, and the tiles of each leaf."""

    described: Manifest
    tilings: dict[str, Tiling]

    def to_text(self) -> str:
        """Return the layout as JSON for `parse`."""
        return json.dumps({"manifest": self.described.to_text(), "tiles": {name: one.tile for name, one in self.tilings.items()}})

    @property
    def content(self) -> bytes:
        """Digest of step, run and arrays: equal only for the same state."""
        described = self.described
        leaves = {name: dataclasses.astuple(leaf) for name, leaf in described.leaves.items()}
        tiles = {name: one.tile for name, one in self.tilings.items()}
        return hashlib.sha256(json.dumps([described.step, described.identity, leaves, tiles], sort_keys=True).encode()).digest()


def parse(text: str) -> Layout:
    """Parse the layout in `text`. Raises DamagedError."""
    try:
        body = json.loads(text)
        described = manifest.parse(body["manifest"])
        tilings = {name: Tiling(leaf.shape, tuple(body["tiles"][name])) for name, leaf in described.leaves.items()}
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise DamagedError("its manifest is unreadable") from error
    return Layout(described, tilings)


class RunFolder:
    """The copies of one run on this host."""

    def __init__(self, root: str, run: str) -> None:
        self._root = root
        self._all = Path(root) / f"maxlm-{os.geteuid()}"  # of all runs of this user
        self.run, self.path = run, self._all / run
        self._token = secrets.token_hex(8)
        self._lease: IO[str] | None = None

    def copies(self) -> tuple[list[HostCopy], list[str]]:
        """Return the complete copies, newest first, and the reasons that others are not used. Reads no tile."""
        found, problems = [], []
        folders = self._folders()
        try:
            for folder in (self._all, self.path) if folders else ():
                self._check_private(folder)
        except UserError as error:
            return [], [str(error)]
        for folder in folders:
            try:
                found.append(_open(folder))
            except (OSError, DamagedError) as error:
                problems.append(f"the copy {folder.name} in {self.path} is not used: {error}")
        return found, problems

    def claim(self, owner: int) -> None:
        """Make the folder and mark it as in use by this process and by `owner` (the process that starts it again, or 0). Remove unfinished
        copies, and the folders of runs that have ended. Raises ConfigError, OSError.
        """
        try:
            self._make(owner)
        except FileNotFoundError:  # a run that started at the same time took the new folder for an abandoned one
            self._make(owner)
        for other in self._all.iterdir():
            if other != self.path and other.is_dir() and not other.is_symlink() and not _is_new(other) and not _in_use(other):
                _remove(other)
        for draft in self.path.glob(f"{_DRAFT}*"):
            if not _is_locked(self._lease_of(draft.name.removeprefix(_DRAFT))):
                shutil.rmtree(draft, ignore_errors=True)

    def mark(self, owner: int) -> None:
        """Mark the folder, if there is one, as in use by this process and by `owner`."""
        with contextlib.suppress(OSError, ConfigError):  # `copies` and `claim` say why
            self._check_private(self.path)
            self._lease = self._lease or self._new_lease(owner)

    def steps(self) -> list[tuple[int, int]]:
        """(step, process) of the complete copies, newest first."""
        return [(int(step), int(process)) for step, _, process in (folder.name.partition("-") for folder in self._folders())]

    def delete(self, step: int, process: int) -> None:
        """Remove a copy, if it is there."""
        _remove(self.path / f"{step}-{process}")

    def free_bytes(self) -> int:
        """Return the bytes that copies of this run can take: free ones, and the ones that its copies take now."""
        taken = sum(file.stat().st_size for folder in self._folders() for file in folder.iterdir())  # of other processes on this host too
        return shutil.disk_usage(self.path).free + taken

    def total_bytes(self) -> int:
        """Size of the file system, in bytes."""
        return shutil.disk_usage(self.path).total

    def draft(self) -> "Draft":
        """A new copy, which `Draft.commit` completes."""
        return Draft(self.path / f"{_DRAFT}{self._token}")

    def release(self, *, remove: bool) -> None:
        """Remove the mark of this process; with `remove` the last process of this host that has a mark removes the copies, too."""
        if self._lease is not None:
            self._lease_of(self._token).unlink(missing_ok=True)
            self._lease.close()
            self._lease = None
        if remove and not _in_use(self.path, owners=False):
            _remove(self.path)

    def _make(self, owner: int) -> None:
        """Make and mark the folder, unless it is. Raises ConfigError, OSError."""
        with contextlib.suppress(FileExistsError):
            Path(self._root).mkdir(parents=True)
        for folder in (self._all, self.path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            self._check_private(folder)
        self._lease = self._lease or self._new_lease(owner)

    def _new_lease(self, owner: int) -> IO[str]:
        """Make the lease of this process, which is locked while the file is open."""
        text = json.dumps({"owner": owner, "started": process_started(owner), "namespace": process_namespace()})
        new = self.path / f"{_NEW}{self._token}"
        lease = new.open("w")
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lease.write(text)
        lease.flush()
        new.rename(self._lease_of(self._token))  # locked and complete from the moment that others look for it
        for before in self.path.glob(f"{_LEASE}*"):
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                if not _is_locked(before) and before.read_text() == text:  # of an attempt that the same owner has started
                    before.unlink()
        return lease

    def _lease_of(self, token: str) -> Path:
        return self.path / f"{_LEASE}{token}"

    def _check_private(self, folder: Path) -> None:
        """Raise ConfigError unless only this user can read and write in `folder`."""
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                FIELD, self._root, f"{folder} there is not a folder of this user alone (mode 0700)", "remove it, or name another"
            )

    def _folders(self) -> list[Path]:
        try:
            names = [(int(match[1]), int(match[2])) for entry in self.path.iterdir() if (match := _COPY.fullmatch(entry.name))]
        except OSError:
            return []
        return [self.path / f"{step}-{process}" for step, process in sorted(names, reverse=True)]


class Draft:
    """A copy that is being written."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._file = (folder / _DATA).open("wb")
        self._tiles: dict[str, list[tuple[int, int, int, int, bool]]] = {}
        self.size = 0  # bytes so far

    def add(self, tile: Tile, array: np.ndarray, *, received: bool) -> None:
        """Append a tile, which a peer has sent if `received`. Raises OSError."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._tiles.setdefault(tile[0], []).append((tile[1], self.size, content.size, zlib.crc32(content.data), received))
        self._file.write(content.data)
        self.size += content.size

    def commit(self, layout: str, name: str) -> None:
        """Complete the copy as `name`, instead of one of that name. Raises OSError, and UserError once another start has the run."""
        self._file.flush()
        os.fsync(self._file.fileno())  # free in memory; on a disk it may fail only here
        self._file.close()
        body = {"layout": layout, "tiles": self._tiles}
        with (self._folder / _MANIFEST).open("w") as file:
            file.write(json.dumps({**body, "sha256": _checksum(body)}))
            file.flush()
            os.fsync(file.fileno())
        target = self._folder.with_name(name)
        directory_lock.check()
        _remove(target)
        self._folder.rename(target)

    def discard(self) -> None:
        """Remove the unfinished copy."""
        with contextlib.suppress(OSError):
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _open(folder: Path) -> HostCopy:
    """Raises OSError, DamagedError."""
    try:
        body = json.loads((folder / _MANIFEST).read_text())
        if body.pop("sha256") != _checksum(body):
            raise DamagedError("its manifest does not match its checksum")
        tiles = {(name, tile): Stored(*place) for name, places in body["tiles"].items() for tile, *place in places}
        copy = HostCopy(folder, body["layout"], tiles)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("its manifest is unreadable") from error
    end = max((place.offset + place.size for place in tiles.values()), default=0)
    if (folder / _DATA).stat().st_size != end:
        raise DamagedError("its data has another length than was written")
    step = parse(copy.layout).described.step
    if not folder.name.startswith(f"{step}-"):
        raise DamagedError(f"its manifest is of step {step}")
    return copy


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _is_new(folder: Path) -> bool:
    """True if a process has just made the folder and not yet marked it; False if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return not any(folder.glob(f"{_LEASE}*")) and time.time() < folder.stat().st_mtime + _STARTING_S
    return False


def _in_use(folder: Path, *, owners: bool = True) -> bool:
    """True if a process has marked the run's folder, or, with `owners`, if the one that starts such a process again is alive."""
    for lease in folder.glob(f"{_LEASE}*"):
        if _is_locked(lease):
            return True
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            body = json.loads(lease.read_text())
            if not (owners and body["started"]):
                continue
            if body["namespace"] != process_namespace():
                if time.time() < folder.stat().st_mtime + _OWNER_UNSEEN_S:
                    return True
            elif process_started(int(body["owner"])) == body["started"]:
                return True
    return False


def _is_locked(lease: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), lease.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(folder: Path) -> None:
    """Remove a folder; while its files are deleted it has another name, so no process takes it for a copy."""
    gone = folder.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
