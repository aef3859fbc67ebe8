"""Copies of the state in host memory: this process's part, and its peer's part, so that neither a crash nor a lost host costs many steps.

The main thread only starts copies on the devices; a background thread brings them to the host and writes them to a `host_copies.RunFolder`,
where they outlive this process. All processes take part in every copy, in the same order, because a peer's part is sent by a collective.
"""

import contextlib
import functools
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxlm.base.errors import ConfigError, UnavailableSettingError, setting_error
from maxlm.base.host import available_memory, host_memory, in_bytes, in_memory
from maxlm.base.paths import check_regular, is_remote
from maxlm.base.transient import first_line, retried
from maxlm.checkpoint import digest, host_copies, recovery
from maxlm.checkpoint.copy_job import CopyJob
from maxlm.checkpoint.errors import DamagedError, UnreachableError
from maxlm.checkpoint.host_copies import RunFolder
from maxlm.checkpoint.recovery import Found, Loaded
from maxlm.checkpoint.snapshot import Group, Snapshots
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.cluster import agree
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig

_log = logging.getLogger(__name__)
_RUN = ".memory-run"  # file among the checkpoints: the number of the run, their directory, and its inode if it is a local one
_DIGITS = 7  # of each part of it that processes exchange as an integer
_NUMBER = re.compile(f"[0-9a-f]{{{4 * _DIGITS}}}")
_FIRST_GAP, _GAP = 2, 8  # steps before the first copy, and between the next ones, from which times are measured
_UNMEASURED = 3  # copies until a time is agreed that does not include compilation
_MAX_WARNINGS = 8  # of each host, about copies that are not used
_COMPLETE = 2  # copies at a time: the last complete one, and the one that is written


class MemoryCopies:
    """Makes, finds and removes the copies of one run. `directory`: of its checkpoints; `hosts`: the host of each process."""

    def __init__(
        self,
        config: MemoryCheckpointsConfig,
        directory: ocp.path.Path,
        identity: dict[str, str],
        *,
        hosts: Sequence[str] = (),
        owner: int = 0,
    ) -> None:
        """`owner`: the process that starts this one again if it dies, or 0."""
        self.config, self._directory, self._identity = config, directory, dict(identity)
        self._hosts = tuple(hosts) or ("",) * jax.process_count()
        self._owner = owner
        self._folder: RunFolder | None = None
        self._snapshots: Snapshots | None = None
        self._job: CopyJob | None = None
        self._complete = -1  # step of the newest copy that all processes know to be complete
        self._written = -1  # step of the newest copy of this attempt that is complete here
        self._copies = 0
        self._next: int | None = None  # step of the next copy, unless the interval is given
        self._agreed = [0, 0, 0]  # as `_measured`, some copies ago: the largest of all processes
        self._searched = False
        self._left: RunFolder | None = None  # the folder of an attempt before
        self._found: Found | None = None  # before the first copy
        self._ended, self._at = 0.0, 0  # when the newest copy was started, and its step
        self._measured = (0, 0, 0)  # microseconds: training was blocked, milliseconds: the copy took, microseconds: a step
        self._warnings: list[str] = []  # reasons that copies were not used, at this host
        self.blocked_s = 0.0  # for all copies together
        self.failure = ""  # of the first copy that was not written, until it is taken
        self._failing = self._small = False

    def due(self, step: int) -> bool:
        """True if a copy of the state after `step` updates is due. The same in all processes."""
        if self.config.every_steps is not None:
            return step % self.config.every_steps == 0 and step != self._at
        if self._next is None:
            self._next = step + _FIRST_GAP
        return step >= self._next

    def newest(self) -> Found | None:
        """Return the newest copy that is complete and undamaged over all processes, before the first `save`; None afterwards."""
        if self._copies:
            return None
        if not self._searched and (run := self._run(make=False)):
            self._left = RunFolder(self.config.folder, run)
            self._left.mark(self._owner)  # before it is read: runs that start now must not remove it
            self._found = recovery.find(self._left, self._identity, self._say)
        self._searched = True
        return self._found

    def restore(self, wanted: dict[str, jax.ShapeDtypeStruct]) -> Loaded | None:
        """Load the arrays of `newest` onto the shardings of `wanted`. None without a copy, or if its bytes have changed: then `newest` is
        the previous copy.
        """
        found = self.newest()
        if found is None:
            return None
        try:
            return recovery.load(found, wanted, self._say)
        except DamagedError as error:
            self.pass_over(str(error))
            return None

    def pass_over(self, reason: str) -> None:
        """Discard `newest` and fall back to the previous copy (collective)."""
        found = self.newest()
        assert self._left is not None and found is not None, "it was found there"
        self._say(f"the copy of step {found.step} in memory is not used: {reason}")
        self._found = recovery.find(self._left, self._identity, self._say, before=found.step)

    def prepare(self, abstract_state: Any, processes_here: int) -> None:
        """Claim the folder, and check that two copies fit. Raises ConfigError; UnavailableSettingError if they may fit later."""
        if self.config.domains is not None and len(self.config.domains) != jax.process_count():
            rule = f"names the failure domain of each process, and there are {jax.process_count()}"
            raise ConfigError("memory_checkpoints.domains", list(self.config.domains), rule, "name one for each, or remove it")
        try:
            needed = self._snapshots_of(named_leaves(abstract_state)).bytes_here * processes_here
        except ValueError as error:
            fix = "name domains of at most half of the processes each, or write false"
            raise ConfigError("memory_checkpoints.peer", self.config.peer, f"finds no peer for each process: {error}", fix) from error
        try:
            folder = self._claimed()
            try:
                self._check_space(folder, needed)
            except ConfigError:
                self.close(remove=not folder.steps())
                raise
        except OSError as error:
            rule = f"cannot be used ({error.strerror or first_line(error)})"
            fix = "free space there, or name a folder of this host's memory or of its disk"
            raise setting_error(error)(host_copies.FIELD, self.config.folder, rule, fix) from error

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Start a copy of `state`, which may be donated as soon as this returns. Waits for the copy before.

        A failure is stored in `failure`: training goes on without the copy. With several processes, one that cannot start it raises, since
        the others are in the collectives of the copy.
        """
        began = time.monotonic()
        self._settle()
        known = self._snapshots
        leaves = named_leaves(state) if known is None else dict(zip(known.kinds, jax.tree.leaves(state), strict=True))
        snapshots = self._snapshots_of(leaves)
        if self._copies == 0:
            self._remove_newer(step)
            self._complete = self.newest_step if self.newest_step < step else -1  # the same in all processes
        if self._copies:
            a_step = min((began - self._ended) / max(step - self._at, 1), 2e3)
            self._measured = (*self._measured[:2], max(int(a_step * 1e6), 1))
        agreed = agree.start_largest(np.array([-max(self._complete, self._written), *self._measured], np.int32))
        job = self._job = CopyJob(self._claimed(), step, agreed)
        try:
            self._start(job, snapshots, leaves)
            job.finish(digest.start(leaves), snapshots, self._identity, position)
        except Exception as error:  # any, such as a lack of device memory
            job.abandon(error)
            if jax.process_count() > 1:  # the others have started collectives, and would wait for this process
                raise
        self._next = step + self._gap()
        self._copies, self._at, self._ended, self._found = self._copies + 1, step, time.monotonic(), None
        self._measured = (int(min(self._ended - began, 2e3) * 1e6), *self._measured[1:])
        self.blocked_s += self._ended - began

    def _start(self, job: CopyJob, snapshots: Snapshots, leaves: dict[str, Any]) -> None:
        for group in snapshots.groups:
            fits = group.bytes <= snapshots.budget
            job.wait_for_room(snapshots.budget - group.bytes)
            taken = tuple(leaves[name] for name in group.names)
            copies, sent = group.program(taken) if fits else (taken, (None,) * len(taken))
            job.put(group, copies, sent)
            if not fits:  # straight from the state, which the next step overwrites
                job.wait_for_room(0)
                self._report_small(group, snapshots.budget)

    def _report_small(self, group: Group, budget: float) -> None:
        """Report once that peers have no copy for want of device memory."""
        if any(group.received) and not self._small:
            self._small = True
            self.failure = (
                f"peers have no copy of {group.names[0]}: that takes {in_bytes(group.bytes)} on each device while a step runs, and "
                f"{in_bytes(budget)} may be used; free device memory (memory.remat, more shards), or set memory_checkpoints.peer=false"
            )
            _log.warning("%s", self.failure)

    def drain_warnings(self) -> list[str]:
        """Return the reasons that copies were not used, at all hosts, once (collective)."""
        mine, self._warnings = self._warnings[:_MAX_WARNINGS], []
        everywhere = agree.agree(mine)
        others = [
            f"{self._hosts[number]}: {line}" for number, lines in enumerate(everywhere) for line in lines if line not in everywhere[0]
        ]
        return [*everywhere[0], *others]

    def take_failure(self) -> str:
        """Return the reason that a copy was not written, once; "" if all were, or if the copy before failed for the same reason."""
        failure, self.failure = self.failure, ""
        return failure

    def forget_newer(self, step: int) -> None:
        """Remove copies newer than `step`, from which training continues: it has gone back."""
        if self._copies:
            self._settle()
            self._remove_newer(step + 1)
            self._next, self._complete, self._written, self._at = None, -1, -1, -1

    def discard(self, reason: str = "") -> None:
        """Forget `newest`: it cannot be used."""
        if reason and self._found is not None:
            self._say(f"the copy of step {self._found.step} in memory is not used: {reason}")
        self._found = None

    @property
    def newest_step(self) -> int:
        """Step of the newest copy that this process knows to be complete; -1: none."""
        return max(self._complete, self._written, -1 if self._found is None else self._found.step)

    def close(self, *, remove: bool = True) -> None:
        """Wait for the copy that is being written. With `remove` the copies go too: the run has ended in order."""
        self._settle()
        for folder in (self._folder, self._left):
            with contextlib.suppress(OSError):
                if folder is not None:
                    folder.release(remove=remove)
        self._folder = None

    def _run(self, *, make: bool) -> str:
        """Return the number of the run, the same in all processes; "" if it has none yet, or if it cannot be read or written."""
        file, number = self._directory / _RUN, ""
        if jax.process_index() == 0:
            try:
                number = retried(functools.partial(_read_number, file), f"reading {file}")
                number = number or (_new_number(file) if make else "")
            except Exception as error:  # any: clients of buckets raise kinds of their own, and the other processes wait below
                _log.warning("%s: copies in memory that were made before are not used: %s", file, first_line(error))
                number = ""
        return agree.from_process_0(number)

    def _say(self, line: str) -> None:
        self._warnings.append(line)
        _log.warning("%s", line)

    def _claimed(self) -> RunFolder:
        """The folder of this run. Raises OSError, ConfigError; UnreachableError if the run's number cannot be read or written."""
        if self._folder is None:
            run = self._run(make=True)
            if not run:
                file = self._directory / _RUN
                raise UnreachableError(f"{file} cannot be read or written by process 0; try again when the cause is gone.")
            folder = self._left if self._left is not None and self._left.run == run else RunFolder(self.config.folder, run)
            folder.claim(self._owner)
            self._folder = folder
        return self._folder

    def _snapshots_of(self, leaves: dict[str, Any]) -> Snapshots:
        self._snapshots = self._snapshots or Snapshots(leaves, self._hosts, self.config.domains, peer=self.config.peer)
        return self._snapshots

    def _check_space(self, folder: RunFolder, needed: int) -> None:
        """Raise ConfigError unless two copies of `needed` bytes fit into the folder, and into memory if it is one; UnavailableSettingError
        where they would without the files that others have there now.
        """
        free = folder.free_bytes()
        if _COMPLETE * needed > free:
            kind = ConfigError if _COMPLETE * needed > folder.total_bytes() else UnavailableSettingError
            rule = f"has {in_bytes(free)} free, and {_COMPLETE} copies of {in_bytes(needed)} must fit, one complete and one being written"
            fix = "enlarge it (for /dev/shm: mount -o remount,size=..., docker run --shm-size), or name a folder of a local disk"
            raise kind(host_copies.FIELD, self.config.folder, rule, fix)
        available = available_memory()
        if in_memory(folder.path) and available is not None and (_COMPLETE + 1) * needed > available:
            rule = f"is memory, of which {in_bytes(available)} are available, and copies take up to {in_bytes((_COMPLETE + 1) * needed)}"
            kind = ConfigError if (_COMPLETE + 1) * needed > (host_memory() or available) else UnavailableSettingError
            raise kind(host_copies.FIELD, self.config.folder, rule, "name a folder of a local disk, or remove memory_checkpoints")

    def _settle(self) -> None:
        """Wait for the copy that is being written."""
        job, self._job = self._job, None
        if job is None:
            return
        complete, *self._agreed = job.join()
        self._complete, self._written, failure = -int(complete), job.step if job.complete else -1, ""
        if job.error is not None:
            failure = f"the copy of step {job.step:,} was not written in {self.config.folder}: {first_line(job.error)}"
        if failure and not self._failing:
            self.failure = failure
            _log.warning("%s", self.failure)
        self._failing = bool(failure)
        self._measured = (self._measured[0], int(min(job.seconds, 2e6) * 1e3), self._measured[2])

    def _gap(self) -> int:
        """Steps until the next copy. The same in all processes, since it follows from figures on which they agree."""
        blocked, written, a_step = (int(value) for value in self._agreed)
        if self._copies < _UNMEASURED or not a_step:
            return _GAP
        mtbf_s = self.config.mtbf_hours * 3600 / len(set(self._hosts))
        return steps_between(blocked / 1e6, written / 1e3, a_step / 1e6, mtbf_s)

    def _remove_newer(self, step: int) -> None:
        """Remove copies of `step` and later ones: of steps that this run takes again."""
        folder = self._claimed()
        for number, process in folder.steps():
            try:
                if number >= step:
                    folder.delete(number, process)
            except OSError as error:
                self.failure = f"the copy of step {number:,} in {folder.path} cannot be removed ({first_line(error)}): remove it"
                _log.warning("%s", self.failure)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves that block it for `save_s`, at one failure every `mtbf_s` on average.

    Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22:303, equation 37). Its first term,
    sqrt(2 save_s mtbf_s), is Young's (CACM 17:530, 1974).
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def steps_between(save_s: float, written_s: float, step_s: float, mtbf_s: float) -> int:
    """`daly` in steps of `step_s`, and no fewer than the background takes for `written_s`, so that no save waits for the one before."""
    return max(1, math.ceil(max(daly(max(save_s, 1e-6), mtbf_s), written_s) / max(step_s, 1e-6)))


def _read_number(file: ocp.path.Path) -> str:
    """Return the number of the run; "" if there is none, if it is damaged, or if this directory is a copy of the one it was made in: both
    are logged. Raises what the storage raises.
    """
    try:
        check_regular(file)
        number, *lines = file.read_bytes().decode(errors="replace").strip().split("\n")
    except FileNotFoundError:
        return ""
    if not _NUMBER.fullmatch(number) or len(lines) != 2:
        _log.warning("%s is damaged: copies in memory that were made before are not used", file)
        return ""
    if lines[1] != _directory_lines(file.parent)[1]:
        why = "was made in %s, which this directory was copied from: copies in memory belong to the run there, and are not used"
        _log.warning(f"%s {why}", file, lines[0])
        return ""
    return number


def _directory_lines(directory: ocp.path.Path) -> list[str]:
    """Return the address of a directory, and its identity: its inode, which a copy of the directory has not, or in a bucket its address."""
    path = str(directory) if is_remote(str(directory)) else os.path.realpath(directory)
    return [ascii(path), ascii(path) if is_remote(path) else f"inode {Path(path).stat().st_ino}"]


def _new_number(file: ocp.path.Path) -> str:
    """Write a new number with the directory of `file`, whole or not at all; return it. Raises what the storage raises."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number = secrets.token_hex(2 * _DIGITS)
    draft = file if is_remote(str(file)) else file.with_name(f"{file.name}.draft")
    draft.write_text("\n".join([number, *_directory_lines(file.parent), ""]))
    if draft is not file:
        draft.replace(file)
    return number
