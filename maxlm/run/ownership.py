"""Locks of the folders that a run writes. The last start of a run owns its checkpoints: an earlier one that still runs somewhere notices
before its next save, and ends.

Locks of local folders (`config.directory_lock`) do that for runs in one folder. A bucket has no locks, and the lock of an elastic run may
be held by a host that was only stopped or cut off, so these also have a token in the folder of the checkpoints.
"""

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from maxlm.base import directory_lock
from maxlm.base.errors import ExitCode, UnavailableError, UserError
from maxlm.base.paths import check_regular, is_remote
from maxlm.base.transient import is_storage_error, retried
from maxlm.cluster import agree, deadline
from maxlm.cluster.message_socket import own_name
from maxlm.config.sections.checkpoint import CheckpointConfig
from maxlm.config.sections.elastic import ElasticConfig
from maxlm.config.sections.run import RunConfig
from maxlm.run import frozen
from maxlm.run.open_run import OpenRun
from maxlm.telemetry.run_dir import RunDirectory, unwritable

FILE = "owner"  # in the folder of the checkpoints
LOCK_FIX = "end that first, or choose another run.name or run.dir"
LOCK_MARGIN_SECONDS = 10.0  # beyond the grace time, in which a run that received a signal has ended for certain
_log = logging.getLogger(__name__)


class SupersededRunError(UserError):
    """Another start of an elastic run owns its checkpoints: this host may be needed there."""

    exit_code = ExitCode.HOST_LOST


class Ownership:
    """Ownership of the checkpoints in `folder`, taken by process 0; in the others it does nothing."""

    def __init__(self, folder: ocp.path.Path, kind: type[UserError] = SupersededRunError) -> None:
        """Take the ownership from earlier starts of the run; `check` raises `kind` once it is lost. Raises UnavailableError in all
        processes if it cannot be written.
        """
        self._file, self._own = folder / FILE, {"token": secrets.token_hex(16), "host": own_name()}
        self._kind = kind

        def take() -> None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            check_regular(self._file)
            self._file.write_text(json.dumps(self._own))

        agree.on_process_0(lambda: retried(take, f"writing {self._file}"), f"writing {self._file}")

    def check(self) -> None:
        """Raise an error of the given kind if a later start has taken it. A file that is missing or cannot be read proves nothing."""
        if jax.process_index() != 0:
            return
        try:
            check_regular(self._file)
            owner = json.loads(self._file.read_text())
            token, host = str(owner["token"]), str(owner["host"])
        except Exception as error:
            if not isinstance(error, ValueError | TypeError | KeyError) and not is_storage_error(error):
                raise
            _log.warning("%s cannot be read: %s", self._file, error)
            return
        if token != self._own["token"]:
            raise self._kind(
                f"{self._file.parent}: another start of this run, on {host}, has taken over: this one ends, and saves nothing more."
            )


@contextlib.contextmanager
def locked(run: RunConfig, checkpoint: CheckpointConfig, elastic: ElasticConfig | None, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the directories that this run writes. A run that holds them and received a signal is given its grace time.

    Raises UserError in all processes alike: another run holds one, or one is not writable.
    """
    directory = RunDirectory(Path(run.dir) / run.name, primary=jax.process_index() == 0)
    folders = {directory.path.resolve(): (directory.path, "run.dir")}
    checkpoints = checkpoint.dir or str(directory.checkpoints)  # possibly the folder of another run, by a setting or link
    if not is_remote(checkpoints):  # under two names it would wait for itself
        field = "checkpoint.dir" if checkpoint.dir else "run.dir"
        folders.setdefault(Path(checkpoints).resolve(), (Path(checkpoints), field))
    with contextlib.ExitStack() as locks:

        def lock() -> None:
            seconds, taken = deadline.grace_seconds() + LOCK_MARGIN_SECONDS, _superseded(elastic)
            if directory.primary:
                frozen.check_folder(directory)
            for folder, field in folders.values() if directory.primary else ():
                try:
                    locks.enter_context(directory_lock.locked(folder, field, seconds, say, LOCK_FIX, taken)).watch()
                except UserError as error:  # held, perhaps by a host that is about to be found lost
                    if elastic is None:
                        raise
                    raise UnavailableError(str(error)) from error
                except OSError as error:
                    place = run.dir if field == "run.dir" else str(folder)
                    raise frozen.may_pass(unwritable(error, field, place)) from error

        agree.on_all(lock)
        yield


def owning(run: OpenRun) -> Callable[[], None]:
    """Own the run's folders and checkpoints. Returns a check, which raises UserError once another start of the run does."""
    folder, needs_token = run.checkpoints.directory, run.context.asked.elastic is not None or is_remote(str(run.checkpoints.directory))
    owner = Ownership(folder, _superseded(run.context.asked.elastic)) if needs_token else None

    def check() -> None:
        for path in (run.directory.path, *([] if is_remote(str(folder)) else [Path(folder)])):
            directory_lock.check(path)
        if owner is not None:
            owner.check()

    check()
    run.checkpoints.check_owner = check
    return check


def _superseded(elastic: ElasticConfig | None) -> type[UserError]:
    """Error of a start that has lost the run to a later one; an elastic one may join that."""
    return UserError if elastic is None else SupersededRunError
