"""The last start of an elastic run owns its checkpoints: an earlier one that still runs somewhere notices before its next save, and ends.

A group of processes cannot finish a save once one of them has gone over to another group (see quorum.py). This holds off the rest: a host
that was replaced while it was only stopped or cut off, and the process of a group of one.
"""

import json
import logging
import secrets

import jax
from orbax.checkpoint import v1 as ocp

from maxlm.checkpoint import multihost
from maxlm.config.errors import ExitCode, UserError
from maxlm.config.transient import is_storage_error, retried
from maxlm.runtime.lookout import own_name

FILE = "owner"  # in the folder of the checkpoints
_log = logging.getLogger(__name__)


class SupersededRunError(UserError):
    """Another start of the run owns its checkpoints."""

    exit_code = ExitCode.HOST_LOST


class Ownership:
    """Ownership of the checkpoints in `folder`, taken by process 0; in the others it does nothing."""

    def __init__(self, folder: ocp.path.Path) -> None:
        """Take the ownership from earlier starts of the run. Raises UnavailableError in all processes if it cannot be written."""
        self._file, self._own = folder / FILE, {"token": secrets.token_hex(16), "host": own_name()}
        multihost.only_process_0(lambda: retried(self._take, f"writing {self._file}"), f"writing {self._file}")

    def _take(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._own))

    def check(self) -> None:
        """Raise SupersededRunError if a later start has taken it. A file that is missing or cannot be read proves nothing."""
        if jax.process_index() != 0:
            return
        try:
            owner = json.loads(self._file.read_text())
            token, host = str(owner["token"]), str(owner["host"])
        except Exception as error:
            if not isinstance(error, ValueError | TypeError | KeyError) and not is_storage_error(error):
                raise
            _log.warning("%s cannot be read: %s", self._file, error)
            return
        if token != self._own["token"]:
            raise SupersededRunError(
                f"{self._file.parent}: another start of this run, on {host}, has taken over: this one ends, and saves nothing more."
            )
