"""Errors of checkpoints, and whether an older checkpoint may be good."""

import enum
import json
import re
import shutil
from pathlib import Path

from maxlm.base.errors import UnavailableError, UserError
from maxlm.base.host import in_bytes
from maxlm.base.paths import is_remote
from maxlm.base.transient import ABSENT, first_line, is_out_of_memory, is_transient


class CheckpointError(UserError):
    """A checkpoint could not be written, read or used. One line: which one, where, why, and what to do."""


class CopyLostError(CheckpointError):
    """A copy in memory was all there was to continue from, and it cannot be used."""


class DamagedError(Exception):
    """The bytes of a checkpoint are not those that were written; the previous one may be good."""


class UnreachableError(CheckpointError, UnavailableError):
    """Storage failed for now, while a checkpoint was read or written; the checkpoints may be good."""


class UnevenSaveError(UnreachableError):
    """A save has failed in this process, and others are still in it: they can only save again after they have all started again."""


class Verdict(enum.IntEnum):
    """Outcome of reading a checkpoint in one process. Ordered: the maximum over processes is the outcome of all."""

    GOOD = 0
    DAMAGED = 1  # an older checkpoint may be good
    UNREACHABLE = 2  # it may be read later
    REFUSED = 3  # an older checkpoint would be refused too


_FULL = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota exceeded", "File too large")


# What damaged bytes raise, and a missing file: TensorStore with its status in front, and readers of text.
_DAMAGE = re.compile(r"\b(DATA_LOSS|NOT_FOUND|OUT_OF_RANGE)\b|\bError decoding ")
_MISREAD = (*ABSENT, KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError)


def verdict_of(error: Exception, *, remote: bool) -> Verdict:
    """Classify `error`, raised while a checkpoint was read; `remote`: from a bucket.

    Damaged content raises many kinds of errors (TypeError, KeyError, any status of TensorStore). On a disk all but our refusals, failures
    of storage and a lack of memory count as damage. Clients of buckets raise any kind for what a server answers, so there only those
    that damage is known to raise do: a checkpoint that is wrongly taken for damaged is training lost in silence.
    """
    if isinstance(error, DamagedError):
        return Verdict.DAMAGED
    if is_out_of_memory(error):
        return Verdict.REFUSED
    if is_transient(error):
        return Verdict.UNREACHABLE
    if isinstance(error, UserError):
        return Verdict.REFUSED
    unnamed = isinstance(error, OSError) and error.errno is None  # of a mounted bucket, or of a client that is not known here
    known = isinstance(error, _MISREAD) or _DAMAGE.search(str(error)) is not None
    return Verdict.DAMAGED if known or not (remote or unnamed) else Verdict.UNREACHABLE


def failed_save(error: Exception, step: int, directory: str, needed_bytes: int) -> CheckpointError:
    """Error for a checkpoint of `step` that was not written; for a full disk with the bytes needed and free."""
    what = f"checkpoint {step} was not saved in {directory}"
    if any(sign in str(error) for sign in _FULL):
        folder = Path(directory)
        existing = next((parent for parent in (folder, *folder.parents) if not is_remote(directory) and parent.exists()), None)
        left = "" if existing is None else f" and {in_bytes(shutil.disk_usage(existing).free)} are free"
        return UnreachableError(
            f"{what}: no space left (this process writes up to {in_bytes(needed_bytes)}{left}); free some space, lower checkpoint.keep "
            "or point run.dir at a larger disk. Older checkpoints are untouched."
        )
    kind = UnreachableError if is_transient(error) else CheckpointError
    return kind(f"{what}: {first_line(error)}. Older checkpoints are untouched.")
