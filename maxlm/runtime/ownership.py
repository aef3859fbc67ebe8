"""The last start of a run owns its checkpoints: an earlier one that still runs somewhere notices before its next save, and ends.

Locks of local folders (`config.directory_lock`) do that for runs in one folder. A bucket has no locks, and the lock of an elastic run may
be held by a host that was only stopped or cut off, so these also have a token beside the checkpoints.
"""

import json
import logging
import secrets

import jax
from orbax.checkpoint import v1 as ocp

from maxlm.checkpoint import multihost
from maxlm.config.errors import ExitCode, UserError
from maxlm.config.paths import check_regular
from maxlm.config.transient import is_storage_error, retried
from maxlm.runtime.message_socket import own_name

FILE = "owner"  # in the folder of the checkpoints
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
        multihost.only_process_0(lambda: retried(self._take, f"writing {self._file}"), f"writing {self._file}")

    def _take(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        check_regular(self._file)
        self._file.write_text(json.dumps(self._own))

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
