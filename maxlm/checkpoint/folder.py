"""The folder of a run's checkpoints: listing it, moving checkpoints aside, removing failed saves, and which checkpoints are retained.

Methods do not communicate: each process sees the folder for itself.
"""

import contextlib
import itertools
import logging
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from maxlm.base.paths import is_remote
from maxlm.base.transient import first_line, is_storage_error
from maxlm.checkpoint.errors import DamagedError, UnreachableError
from maxlm.checkpoint.reader import check_metadata, holds
from maxlm.config.schema import CheckpointConfig

_log = logging.getLogger(__name__)
_REMOVALS, _REMOVAL_SECONDS = 5, 0.1  # tries to remove a failed save, and the pause after each
_ASIDE = "aside"  # folder for checkpoints newer than the one a run resumed from
_STEP = re.compile(r"0|[1-9][0-9]{0,8}")  # the name of a checkpoint
_COMMITTED = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a save that is running or was killed


class CheckpointFolder:
    """The folder `path`, local or in a bucket."""

    def __init__(self, path: ocp.path.Path) -> None:
        self.path = path
        self._keeps = False
        self._kept: tuple[list[int], list[str]] | None = None

    @contextlib.contextmanager
    def one_listing(self) -> Iterator[None]:
        """List the directory once within this context, which must not write there: in a bucket each checkpoint takes a request."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None

    def listing(self) -> tuple[list[int], list[str]]:
        """Return the steps of committed checkpoints, oldest first, and a reason for each entry with a number that is none.

        Raises UnreachableError.
        """
        listing = self._kept or self._list()
        self._kept = listing if self._keeps else None
        return list(listing[0]), list(listing[1])

    def _list(self) -> tuple[list[int], list[str]]:
        steps, strays = [], []
        try:
            names: list[str] = []
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # `is_dir` is False if the storage fails
                names = [entry.name for entry in self.path.iterdir()]
            for name in sorted(names):
                if not _STEP.fullmatch(name):
                    if any(char.isdigit() for char in name) and _UNFINISHED not in name and not name.startswith("."):
                        strays.append(f"{name} is not the name of a checkpoint")
                elif reason := self._uncommitted(int(name)):
                    strays.append(f"{name} is not a committed checkpoint: {reason}")
                else:
                    steps.append(int(name))
        except Exception as error:
            if not is_storage_error(error):
                raise
            raise UnreachableError(f"{self.path} cannot be listed: {first_line(error)}.") from error
        return sorted(steps), strays

    def probe(self, size: int) -> None:
        """Write and remove a file of so many bytes. Raises OSError, or what a client of buckets raises."""
        probe = self.path / f".probe-{jax.process_index()}"
        self.path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(size))
        probe.unlink()

    def remove_unfinished(self) -> None:
        """Remove saves that failed or were killed; tried again while a thread of such a save still writes there.

        Not left to Orbax: its thread may be at it when a writer is closed already, and meet a checkpoint that is moved or written by then;
        and in a bucket it removes every folder without a mark, also those that are none of ours.
        """
        problems: list[str] = []
        for _ in range(_REMOVALS):
            try:
                left = [entry for entry in self.path.iterdir() if self._is_unfinished(entry)]
            except Exception as error:
                if not is_storage_error(error):
                    raise
                problems = [first_line(error)]
            else:
                if not left:
                    return
                problems = [*filter(None, map(_remove, left))]
            time.sleep(_REMOVAL_SECONDS)
        if problems:
            _log.warning("%s still holds unfinished saves, which take room: %s", self.path, "; ".join(problems))

    def set_aside(self, step: int, resumed_at: int) -> None:
        """Move a checkpoint into `aside/`. `resumed_at`: step that the run resumed from."""
        folder, aside, in_bucket = self.path / str(step), self.path / _ASIDE, is_remote(str(self.path))
        aside.mkdir(parents=True, exist_ok=True)
        if in_bucket:  # which has no folder without a file, and without this one a program of Orbax's takes it for an unfinished save
            (aside / _COMMITTED).write_text("checkpoints that training went back behind")
        taken = {entry.name for entry in aside.iterdir()}
        names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
        target = aside / next(name for name in names if name not in taken)
        committed = (folder / _COMMITTED).read_bytes() if in_bucket else b""
        if in_bucket:  # file after file is moved there: after a kill, the rest is no checkpoint
            (folder / _COMMITTED).unlink()
        folder.rename(target)
        if in_bucket:
            (target / _COMMITTED).write_bytes(committed)
        _log.warning("%s/%s moved to %s: the run resumed from %s", self.path, step, target, resumed_at)

    def is_readable(self, step: int) -> bool:
        """True if Orbax can read its metadata of this checkpoint; with a checkpoint that it cannot read, it saves no other."""
        try:
            check_metadata(self.path / str(step))
        except DamagedError:
            return False
        return True

    def _uncommitted(self, step: int) -> str:
        """Reason that the entry named `step` is not a committed checkpoint; "" if it is one. Raises what the storage raises if it fails:
        `is_dir`, and Orbax's own search, find none then, and training would go back in silence.
        """
        folder = self.path / str(step)
        if is_remote(str(self.path)):  # on a disk the renaming of the folder is the commit
            return "" if holds(folder / _COMMITTED) else "its save was not finished"
        try:
            return "" if stat.S_ISDIR(Path(folder).stat().st_mode) else "it is not a folder"
        except FileNotFoundError:
            return "it is gone"

    def _is_unfinished(self, entry: ocp.path.Path) -> bool:
        """True for a folder that a save has begun and not committed. Raises what the storage raises if it fails."""
        if is_remote(str(self.path)):
            return bool(_STEP.fullmatch(entry.name)) and entry.is_dir() and bool(self._uncommitted(int(entry.name)))
        return _UNFINISHED in entry.name and stat.S_ISDIR(Path(entry).lstat().st_mode)


def _remove(folder: ocp.path.Path) -> str:
    """Remove a folder and return its name with the error of the storage, if there is one; else ""."""
    try:
        folder.rmtree()
    except Exception as error:
        if not is_storage_error(error):
            raise
        return f"{folder.name}: {first_line(error)}"
    return ""


HEALTHY = "healthy"  # entry of a data position: False if training was in trouble when the state was saved


class NewestHealthy:
    """Preserves the newest checkpoint that is known to be healthy, and newer ones of which that is not known (the protocol
    `PreservationPolicy` of Orbax).
    """

    def __init__(self, healthy: Callable[[int], bool | None]) -> None:
        """`healthy`: the mark of the checkpoint of a step; None if it cannot be read."""
        self._healthy = healthy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Decisions for each checkpoint, oldest first: whether it stays."""
        preserved = set()
        for step in sorted((one.step for one in checkpoints), reverse=True):
            mark = self._healthy(step)
            if mark is not False:
                preserved.add(step)
            if mark:  # mostly the first: no other mark is read
                break
        return [one.step in preserved for one in checkpoints]


def retention(config: CheckpointConfig, healthy: Callable[[int], bool | None]) -> ocp.training.preservation_policies.AnyPreservationPolicy:
    """The policy that `config` describes."""
    policies = ocp.training.preservation_policies
    keep = [policies.LatestN(config.keep), NewestHealthy(healthy)]
    if config.keep_every is not None:
        keep.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(keep)
