"""The checkpoints of a run: `directory/STEP/`, written in the background, verified when read.

Each holds two items, committed together: `state`, the arrays, and `manifest`, which describes them (digest of every
leaf, identity of the experiment, data position). With several processes all of them call every method, in the same
order, and each writes its own shards.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import CoroutineType
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from maxlm.base.errors import WRONG_PATH
from maxlm.base.paths import is_remote
from maxlm.base.transient import first_line, is_storage_error, is_transient, retried
from maxlm.checkpoint import digest, manifest
from maxlm.checkpoint.errors import CheckpointError, CopyLostError, DamagedError, UnevenSaveError, UnreachableError, failed_save
from maxlm.checkpoint.folder import HEALTHY, CheckpointFolder, retention
from maxlm.checkpoint.memory import MemoryCopies
from maxlm.checkpoint.reader import STATE, read_checkpoint
from maxlm.checkpoint.recovery import Found
from maxlm.checkpoint.tree_paths import OPTIONAL, abstract_leaf, bytes_here, named_leaves
from maxlm.cluster import agree
from maxlm.config.schema import CheckpointConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig

_log = logging.getLogger(__name__)
_LIBRARIES = ("orbax", "tensorstore", "uvloop")
_LOG_CHARS = 300  # of a line of another library
STORE = "checkpoint"  # source of a state that was not in memory
_CHECKED_OLDER = 8  # checkpoints older than the restored one: their steps are checked
_PROBE_BYTES = 1 << 20
_LEAST_PART = 4 << 20  # bytes of a replicated leaf that a replica writes; of a smaller one the first replica writes all
_READERS = 8  # manifests that are read at a time
_GOOD, _FAILED, _MAY_PASS = 0, 1, 2  # outcomes of processes, which agree on the largest: a save is retried if any failure is transient


@dataclasses.dataclass(frozen=True)
class Restored:
    """Result of a restore: `state` (or the parameters alone), and why newer checkpoints were skipped, newest first."""

    step: int
    state: Any
    data_position: dict[str, Any]
    skipped: tuple[str, ...] = ()
    source: str = STORE  # or "memory", or "memory of peers" where a process had lost its part


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a save as this process sees it: committed if `failure` is None."""

    step: int
    failure: CheckpointError | None


@dataclasses.dataclass(frozen=True)
class _Pending:
    step: int
    response: ocp.AsyncResponse[bool]
    needed_bytes: int


class Checkpoints:
    """Saves and restores states under one directory (a folder or `gs://...`).

    `identity`: fields and values that a checkpoint must share with this run to be continued. Reading never writes:
    the directory is created, cleaned of unfinished saves and tidied by the first `save`.
    """

    def __init__(self, directory: Path | str, config: CheckpointConfig, identity: dict[str, str]) -> None:
        _quieten_orbax()
        absolute = str(directory) if is_remote(str(directory)) else Path(directory).absolute()
        self.directory: ocp.path.Path = ocp.options.FileOptions().path_class(absolute)
        self.folder = CheckpointFolder(self.directory)
        self._config = config
        self.identity = dict(identity)
        self._writer: ocp.training.Checkpointer | None = None
        self._pending: _Pending | None = None
        self._unreported: int | None = None  # step of a save that `ended` has not returned
        self._resumed_at: int | None = None  # a restored step; newer checkpoints are still in the directory
        self._damaged_step: int | None = None  # step of a damaged checkpoint that a copy in memory replaced
        self._healthy: dict[int, bool] = {}  # marks of checkpoints, by step
        self.last_failure: CheckpointError | None = None  # of the newest save that failed, if no later one succeeded
        self.failed_in_a_row = 0  # saves, up to the newest that has ended; the same in all processes
        self.check_owner: Callable[[], None] = lambda: None  # raises once another start of the run owns the directory
        self.memory: MemoryCopies | None = None  # copies in host memory, which `latest` and `restore` prefer where they are newer

    def add_memory(self, config: MemoryCheckpointsConfig, hosts: Sequence[str] = (), owner: int = 0) -> None:
        """Also use copies in host memory. `hosts`: the host of each process; `owner`: the process that starts this one again, or 0."""
        self.memory = MemoryCopies(config, self.directory, self.identity, hosts=hosts, owner=owner)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints this process sees, oldest first. Raises UnreachableError."""
        return self.folder.listing()[0]

    def saved_steps(self) -> list[int]:
        """`steps` of process 0, in all processes. Raises UnavailableError in all."""
        return self._listed_by_process_0()[0]

    def latest(self, unfit: Container[int] = ()) -> int | None:
        """Step of the newest committed checkpoint that process 0 sees, but for the `unfit`, or of a newer copy in memory, or None; if there
        are only strays, the log says so. Raises UnavailableError in all processes.
        """
        steps, strays = self._listed_by_process_0()
        if strays and not steps:
            _log.warning("%s has no checkpoint: %s", self.directory, "; ".join(strays))
        copy = self._copy()
        return max([*(step for step in steps if step not in unfit), *([] if copy is None else [copy.step])], default=None)

    def strays(self) -> list[str]:
        """Entries of the directory with a number in their names that are not committed checkpoints, each with the reason."""
        return self.folder.listing()[1]

    def positions(self) -> dict[int, dict[str, Any]]:
        """Return step -> data position of every checkpoint with a manifest that process 0 can read, and of a copy in memory.

        Raises UnavailableError in all processes: a missing one may be a step that training has gone back behind.
        """
        self._settle()
        copy = self._copy()
        found = {} if copy is None else {copy.step: copy.layout.described.data_position}
        read = agree.on_process_0(lambda: list({**found, **self.positions_here()}.items()), f"reading the manifests in {self.directory}")
        return dict(read)

    def positions_here(self) -> dict[int, dict[str, Any]]:
        """Step -> data position of every checkpoint with a manifest that this process sees; those that are damaged are reported when they
        are restored.
        """
        steps = self.steps()
        with ThreadPoolExecutor(_READERS) as pool:
            return {step: one for step, one in zip(steps, pool.map(self.position_here, steps), strict=True) if one is not None}

    def position_here(self, step: int) -> dict[str, Any] | None:
        """Data position of one checkpoint; None if this process sees no good manifest of it."""
        folder = self.directory / str(step)
        with contextlib.suppress(CheckpointError, DamagedError):
            return retried(functools.partial(manifest.read, folder), f"reading the manifest of {folder}").data_position
        return None

    def pass_over_copies(self, judge: Callable[[int, Mapping[str, Any]], str]) -> None:
        """Use no copies in memory for which `judge` of step and data position gives a reason, the same in all processes."""
        while self.memory is not None and (copy := self._copy()) is not None:
            if not (reason := judge(copy.step, copy.layout.described.data_position)):
                return
            self.memory.pass_over(reason)

    def resume_at(self, step: int) -> None:
        """The run continues from `step`: the first save moves newer checkpoints into `aside/`."""
        self._resumed_at = step

    def claim(self) -> None:
        """Make the directory, and write and remove a small file in it from every process: fails early if it is not writable.

        Raises CheckpointError, and then leaves nothing behind: UnreachableError if it may pass, and so if checkpoints were written there
        before.
        """
        folders = (self.directory, *self.directory.parents)  # deepest first; a bucket has none
        made = [] if is_remote(str(self.directory)) else [folder for folder in folders if not folder.exists()]
        error: Exception | None = None
        try:
            self.folder.probe(_PROBE_BYTES)
        except Exception as failure:  # any: clients of buckets raise kinds of their own, and the other processes must learn of it
            error = failure
        own = _GOOD if error is None else _MAY_PASS if self._may_pass(error) else _FAILED
        worst = agree.max_over_processes(own)
        if worst != _GOOD:
            for folder in made if error is not None else ():  # a folder that another process has filled stays
                with contextlib.suppress(OSError):
                    folder.rmdir()
            reason = "another process cannot write there" if error is None else getattr(error, "strerror", None) or first_line(error)
            fix = "choose another folder"
            if worst == _MAY_PASS:
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                fix = f"free space or {fix}" if full else f"try again when the cause is gone, or {fix}"
            kind = UnreachableError if worst == _MAY_PASS else CheckpointError
            raise kind(f"checkpoint.dir = {self.directory}: cannot be written ({reason}); {fix}.") from error

    def _may_pass(self, error: Exception) -> bool:
        """True if another start may be able to write here: also where the path looks wrong, if there are checkpoints already."""
        if not is_transient(error):
            return False
        if not isinstance(error, OSError) or error.errno not in WRONG_PATH:
            return True
        try:
            return bool(self.steps())
        except UnreachableError:
            return True

    def save(self, step: int, state: Any, data_position: dict[str, Any]) -> bool:
        """Start a save in the background; False if `step` is saved already. `state` may be donated as soon as this returns.

        Waits for the previous save if it is still running. If that has failed, this one is tried all the same, and the failure
        is logged and stored in `last_failure`. `state` is a pytree of jax.Arrays with an entry `params`; `data_position` is JSON.

        Raises CheckpointError in all processes if one of them cannot write there: the state is not saved, and the next save may succeed.
        Raises UnevenSaveError in a process that fails later on while it is not alone.
        """
        self._settle()
        json.dumps(data_position)  # a value that is not JSON must fail here, not in the background
        leaves = named_leaves(state)
        needed = bytes_here(leaves)
        saved: list[int] = []
        with self._in_all(step, needed):  # faults are found here, as far as possible: below, processes wait for each other
            self.folder.probe(1)
            saved = self.steps()
        self._set_newer_aside(saved, functools.partial(self._in_all, step, needed))
        if step in agree.from_process_0(saved):
            return False
        self._healthy[step] = data_position.get(HEALTHY, True)
        sums: Future[digest.Sums] = Future()
        items = {STATE: leaves, manifest.NAME: self._deferred_manifest(step, leaves, data_position, sums)}
        try:
            self._writer = self._writer or self._open_writer()
            response = self._writer.save_checkpointables_async(step, items, force=True)
            # Started last: on a CPU it would compete with the part of the save that the loop waits for.
            sums.set_result(digest.start(leaves))
        except Exception as error:  # any: clients of buckets raise kinds of their own
            sums.cancel()
            failure = failed_save(error, step, str(self.directory), needed)
            if jax.process_count() > 1:
                raise UnevenSaveError(str(failure)) from error
            raise self._failed(failure) from error
        assert response is not None, "forced, so no policy can have declined"
        self._pending, self._unreported = _Pending(step, response, needed), step
        return True

    def ended(self, wait_s: float | None = 0.0) -> Ended | None:
        """End of the newest save, returned once; None while it runs. Without communication; waits for `wait_s` seconds at most (None:
        until it has ended). Call it before the next `save`, which waits for this one and does not report it.
        """
        pending = self._pending
        if pending is None or self._unreported is None:
            return None
        failure = None
        try:
            pending.response.result(timeout=wait_s)
        except Exception as error:  # any: it comes from a background thread
            if isinstance(error, TimeoutError) and wait_s is not None:
                return None
            failure = self._explain(error, pending.step, pending.needed_bytes)
        self._unreported = None
        return Ended(pending.step, failure)

    def wait(self) -> None:
        """Wait for the running save. Raises CheckpointError if it failed, or if the last one did and that was not yet raised."""
        self._settle()
        failure, self.last_failure = self.last_failure, None
        if failure is not None:
            raise failure

    def discard_copy(self, reason: str) -> None:
        """Use the newest copy in memory no more; `reason` is logged."""
        if self.memory is not None:
            self.memory.discard(reason)

    def close(self, *, remove_copies: bool = False) -> None:
        """Wait as `wait` does, and end the background threads. Copies in memory go once there is a checkpoint as new as they are, or with
        `remove_copies`.
        """
        try:
            self.wait()
            if self.memory is not None:
                saved = max(self._listed_by_process_0()[0], default=-1)
                copied = agree.max_over_processes(self.memory.newest_step + 1) - 1
                self.memory.close(remove=remove_copies or saved >= copied)
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def restore(self, abstract_state: Any, step: int | None = None, unfit: Mapping[int, str] | None = None) -> Restored:
        """Restore the newest undamaged checkpoint or copy in memory, or exactly `step`, onto the shardings of `abstract_state` (any mesh).

        `unfit`: steps of checkpoints to pass over, with reasons; the same in all processes. Copies in memory are not passed over.

        Verified against its digests; damaged ones are left where they are, logged, and listed in `skipped`, as are strays. The first save
        afterwards moves checkpoints newer than the restored one into `aside/`. Raises CheckpointError if all are damaged (naming each), if
        the identity differs, or if a leaf is missing, unknown, or of another shape or dtype; UnreachableError if storage still fails
        after several tries.
        """
        copy = self._copy() if step is None else None
        restored = self._restore(abstract_state, step, self.identity, unfit or {}, copy)
        self._resumed_at, self._damaged_step = restored.step, None if restored.source == STORE else restored.step
        if self.memory is not None:
            self.memory.forget_newer(restored.step)
            restored = dataclasses.replace(restored, skipped=(*self.memory.drain_warnings(), *restored.skipped))
        return restored

    def restore_entries(self, abstract_state: dict[str, Any], step: int | None = None, unfit: Mapping[int, str] | None = None) -> Restored:
        """As `restore`, but reads and verifies only these entries of the state, and the identity is not checked."""
        return self._restore(abstract_state, step, None, unfit or {})

    def _copy(self) -> Found | None:
        """The newest copy in memory that was not passed over."""
        return self.memory.newest() if self.memory is not None else None

    def _from_memory(self, abstract_state: Any, copy: Found) -> Restored | None:
        """The state of `copy`, the newest in the memory of the hosts; None if its bytes have changed: then the newest is one before it."""
        assert self.memory is not None, "it has a copy"
        wanted = {name: abstract_leaf(name, leaf) for name, leaf in named_leaves(abstract_state).items()}
        described = copy.layout.described.leaves
        absent = {name: leaf for name, leaf in wanted.items() if name.startswith(OPTIONAL) and name not in described}
        loaded = self.memory.restore({name: leaf for name, leaf in wanted.items() if name not in absent})
        if loaded is None:
            return None
        arrays = loaded.arrays | {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in absent.items()}
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])
        return Restored(copy.step, state, loaded.data_position, source="memory of peers" if loaded.sent else "memory")

    def _restore(
        self, abstract_state: Any, step: int | None, identity: dict[str, str] | None, unfit: Mapping[int, str], copy: Found | None = None
    ) -> Restored:
        """`copy`: in memory, which is tried before the checkpoints older than it."""
        self._settle()
        present, strays = self._listed_by_process_0()
        candidates = [number for number in reversed(present) if number not in unfit and step in (None, number)]
        if not candidates and copy is None and (self.memory is None or step is not None):
            asked = "" if step is None else f" {step} (there are: {', '.join(map(str, present)) or 'none'})"
            passed = (f"checkpoint {number} is passed over unless it is named: {reason}" for number, reason in unfit.items())
            raise CheckpointError(f"{'; '.join([f'{self.directory} has no checkpoint{asked}', *strays, *passed])}.")
        skipped: list[str] = [*(f"checkpoint {number} was passed over: {reason}" for number, reason in unfit.items())]
        skipped += strays if step is None else []
        restored, left = None, candidates
        while restored is None and copy is not None:
            newer = [number for number in left if number >= copy.step]
            restored = self._newest_good(abstract_state, newer, candidates, identity, skipped) or self._from_memory(abstract_state, copy)
            left, copy = left[len(newer) :], self._copy()
        restored = restored or self._newest_good(abstract_state, left, candidates, identity, skipped)
        if restored is not None:
            return dataclasses.replace(restored, skipped=(*skipped, *restored.skipped))
        if not candidates:
            raise CopyLostError(f"{self.directory} has no checkpoint to continue from, and no copy in memory can be used.")
        fix = "Nothing was changed. Bring back a copy of one, or begin anew under another run.name."
        raise CheckpointError(f"no good checkpoint in {self.directory}: {'; '.join(skipped)}. {fix}")

    def _newest_good(
        self, abstract_state: Any, steps: list[int], candidates: list[int], identity: dict[str, str] | None, skipped: list[str]
    ) -> Restored | None:
        """The first of `steps`, newest first, that is not damaged; those before go to `skipped`. `candidates`: all that may be read."""
        wanted = {name: abstract_leaf(name, leaf) for name, leaf in named_leaves(abstract_state).items()}
        for step in steps:
            try:
                arrays, position = read_checkpoint(self.directory / str(step), wanted, identity)
            except DamagedError as error:
                skipped.append(f"checkpoint {step} is damaged: {error}")
                _log.warning("%s/%s skipped: %s", self.directory, step, error)
                continue
            older = [number for number in candidates if number < step][:_CHECKED_OLDER]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])
            return Restored(step, state, position, tuple(self._renamed(older)))
        return None

    def _renamed(self, steps: list[int]) -> list[str]:
        """Reasons that checkpoints among `steps` hold another step than their folder names: one of them may be the newest."""
        described = [(step, self._described(step)) for step in steps]
        reasons = [(step, "" if one is None else one.disagreement(str(step))) for step, one in described]
        return [f"checkpoint {step} is damaged: {reason}" for step, reason in reasons if reason]

    def _described(self, step: int) -> manifest.Manifest | None:
        """The manifest of a checkpoint that is not needed now; None if it cannot be read, which is reported when it is needed."""
        try:
            return manifest.read(self.directory / str(step))
        except Exception as error:
            if not isinstance(error, CheckpointError | DamagedError) and not is_storage_error(error):
                raise
            return None

    def _listed_by_process_0(self) -> tuple[list[int], list[str]]:
        """Return the steps and strays that process 0 sees, in all processes: with listings of their own, one process might begin anew and
        the others restore. Raises UnavailableError in all processes.
        """
        steps, strays = agree.on_process_0(self.folder.listing, f"listing {self.directory}")
        return steps, strays

    def _deferred_manifest(
        self, step: int, leaves: dict[str, jax.Array], data_position: dict[str, Any], sums: "Future[digest.Sums]"
    ) -> manifest.DeferredText:
        kinds = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()}  # the arrays may be donated by then

        def text() -> str:
            done = digest.fetch(sums.result())
            described = {name: manifest.Leaf(dtype, shape, done[name]) for name, (dtype, shape) in kinds.items()}
            content = manifest.Manifest(step, self.identity, data_position, described)
            assert not content.disagreement(str(step)), content.disagreement(str(step))
            self.check_owner()  # of the last thing that is written before the save is committed
            return content.to_text()

        return text

    def _settle(self) -> None:
        """Wait for the running save, if any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error: Exception | None = None
        try:
            pending.response.result()
        except Exception as problem:  # any: it comes from a background thread, and the other processes must learn of it
            error = problem
        failure = self._agreed(error, pending.step, pending.needed_bytes, "another process could not write its part")
        if failure is None:
            self.last_failure, self.failed_in_a_row = None, 0
        else:
            _log.error("%s", self._failed(failure))

    @contextlib.contextmanager
    def _in_all(self, step: int, needed: int) -> Iterator[None]:
        """Raise CheckpointError in all processes if the block, which must not communicate through jax, fails in one of them."""
        error: Exception | None = None
        try:
            yield
        except Exception as problem:  # any: clients of buckets raise kinds of their own, and the other processes must learn of it
            error = problem
        failure = self._agreed(error, step, needed, "another process could not begin it")
        if failure is not None:
            raise self._failed(failure)

    def _agreed(self, error: Exception | None, step: int, needed: int, elsewhere: str) -> CheckpointError | None:
        """Return the failure of a save in all processes, if any of them has met an `error`; it is transient in all if it is in one.
        `elsewhere`: message in a process without an error.
        """
        failure = None if error is None else self._explain(error, step, needed)
        worst = agree.max_over_processes(_severity(failure))
        if worst == _GOOD:
            return None
        failure = failure or self._explain(RuntimeError(elsewhere), step, needed)
        if worst == _MAY_PASS and not isinstance(failure, UnreachableError):
            cause, failure = failure.__cause__, UnreachableError(str(failure))
            failure.__cause__ = cause
        return failure

    def _failed(self, failure: CheckpointError) -> CheckpointError:
        """Note that a save has failed. The writer is replaced: Orbax's would raise the same error at every save."""
        self.last_failure, self.failed_in_a_row = failure, self.failed_in_a_row + 1
        self._reopen_writer()
        return failure

    def _explain(self, error: Exception, step: int, needed: int) -> CheckpointError:
        failure = failed_save(error, step, str(self.directory), needed)
        failure.__cause__ = error
        return failure

    def _open_writer(self) -> ocp.training.Checkpointer:
        if jax.process_index() == 0:
            self.folder.remove_unfinished()
        context = ocp.Context()
        # Weights hardly compress (8%), and zstd takes the cores the data pipeline needs: measured, a save takes three times as long.
        context.array.saving.use_compression = False
        # Of a replicated leaf each replica writes a part, by a program for each part that the first save compiles: not for small ones.
        context.array.saving.min_slice_bytes_for_replica_parallel = _LEAST_PART
        # Only the two handlers in use: by default Orbax queries every handler for every leaf, twice, while the loop waits.
        registry = ocp.handlers.local_registry(include_global_registry=False)
        registry.add(ocp.handlers.PyTreeHandler, checkpointable_name=STATE)
        context.checkpointables.registry = registry.add(manifest.DeferredTextHandler, checkpointable_name=manifest.NAME)
        return ocp.training.Checkpointer(
            self.directory,
            context=context,
            preservation_policy=retention(self._config, self._was_healthy),
        )

    def _was_healthy(self, step: int) -> bool | None:
        """Mark of a checkpoint; None if it cannot be read, now or at all."""
        if step not in self._healthy and (described := self._described(step)) is not None:
            self._healthy[step] = described.data_position.get(HEALTHY, True)
        return self._healthy.get(step)

    def _reopen_writer(self) -> None:
        """Replace the writer; the new one removes failed saves from the disk."""
        if self._writer is not None:
            with contextlib.suppress(Exception):  # it repeats the failure that is already reported
                self._writer.close()
        self._writer = None
        with contextlib.suppress(Exception):  # then the next save tries again, and reports
            self._writer = self._open_writer()

    def _set_newer_aside(self, saved: list[int], in_all: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Move checkpoints newer than the restored one into `aside/`: damaged ones, and steps that this run will take again.

        Older ones with damaged metadata too: with them in the directory, Orbax saves no other. `saved`: all steps; moved ones leave it.
        """
        resumed_at = self._resumed_at
        if resumed_at is None:
            return
        newer: list[int] = []
        with in_all():
            newer = [step for step in saved if step > resumed_at or step == self._damaged_step or not self.folder.is_readable(step)]
        newer = agree.from_process_0(newer)
        with in_all():
            for step in newer if jax.process_index() == 0 else ():
                self.check_owner()
                self.folder.set_aside(step, resumed_at)
        saved[:] = [step for step in saved if step not in newer]
        self._resumed_at = None
        if newer and self._writer is not None:
            self._writer.reload()


def _severity(failure: CheckpointError | None) -> int:
    """Return the kind of a failure. Ordered: the largest over processes is the kind in all."""
    if failure is None:
        return _GOOD
    return _MAY_PASS if isinstance(failure, UnreachableError) else _FAILED


@functools.cache
def _quieten_orbax() -> None:
    """Filter the loggers that Orbax uses: it prints pages of tracebacks for one full disk, and then raises the error. Filter Python's
    warnings about its coroutines that were never awaited, too.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_shorten)
    before = sys.unraisablehook

    def log_or_print(unraisable: Any) -> None:
        """Log exceptions of coroutines that Orbax drops when one of many reads fails, in place of printing them."""
        source = unraisable.object
        code = source.cr_code.co_filename if isinstance(source, CoroutineType) else ""
        text = f"{code} {type(source).__module__} {unraisable.err_msg} {unraisable.exc_value}"
        if any(library in text for library in _LIBRARIES) or "Event loop is closed" in text:
            _log.debug("ignored: %s", text[:_LOG_CHARS].split("\n", maxsplit=1)[0])
        else:
            before(unraisable)

    sys.unraisablehook = log_or_print


def _shorten(record: logging.LogRecord) -> bool:
    """Shorten a record of Orbax to one line, and drop exceptions: one is raised to the caller, the others are of other leaves."""
    if not any(library in f"{record.pathname} {record.getMessage()}" for library in _LIBRARIES):
        return True
    if record.exc_info or "exception was never retrieved" in record.getMessage():
        return False
    message = record.getMessage().strip().split("\n")[0]
    record.msg, record.args = message[:_LOG_CHARS], ()
    return True
