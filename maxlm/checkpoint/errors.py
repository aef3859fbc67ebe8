"""What can go wrong with a checkpoint, in words, and whether an older checkpoint would help."""

import enum
import shutil
from pathlib import Path

import jax

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.transient import first_line, is_transient


class CheckpointError(UserError):
    """A checkpoint could not be written, read or used. One line: which, where, why, and what to do."""


class DamagedError(Exception):
    """The bytes of a checkpoint are not the ones that were written: the one before may be whole."""


class UnreachableError(CheckpointError, UnavailableError):
    """Storage failed in a way that may pass, while a checkpoint was read or written: the checkpoints may be whole."""


class Verdict(enum.IntEnum):
    """How reading a checkpoint ended in one process. Ordered: the worst of all processes is the verdict of the cluster."""

    GOOD = 0
    DAMAGED = 1  # an older checkpoint may be good
    UNREACHABLE = 2  # it may be read later
    REFUSED = 3  # an older checkpoint would be refused too


_FULL = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota exceeded", "File too large")


def verdict_of(error: Exception) -> Verdict:
    """Classify `error`, met while a checkpoint was read.

    Content shows its damage in many ways (TypeError, KeyError, any status of TensorStore), so whatever is neither a refusal of ours, nor a
    failure of the medium, nor a lack of memory is damage.
    """
    if isinstance(error, DamagedError):
        return Verdict.DAMAGED
    if isinstance(error, MemoryError) or (isinstance(error, jax.errors.JaxRuntimeError) and "ut of memory" in str(error)):
        return Verdict.REFUSED
    if is_transient(error):
        return Verdict.UNREACHABLE
    return Verdict.REFUSED if isinstance(error, UserError) else Verdict.DAMAGED


def failed_save(error: Exception, step: int, directory: str, needed_bytes: int) -> CheckpointError:
    """Why the checkpoint of `step` was not written; a full disk is said with its figures (bytes in decimal units)."""
    what = f"checkpoint {step} was not saved in {directory}"
    if any(sign in str(error) for sign in _FULL):
        free = free_bytes(directory)
        left = "" if free is None else f" and {readable(free)} are free"
        return UnreachableError(
            f"{what}: no room left (this process writes up to {readable(needed_bytes)}{left}); free some space, lower checkpoint.keep "
            "or point run.dir at a larger disk. Older checkpoints are untouched."
        )
    kind = UnreachableError if is_transient(error) else CheckpointError
    return kind(f"{what}: {first_line(error)}. Older checkpoints are untouched.")


def free_bytes(directory: str) -> int | None:
    """Free bytes of the disk under `directory`; None where that is not a question (a bucket)."""
    if "://" in directory:
        return None
    place = Path(directory)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def readable(count: int) -> str:
    """A number of bytes as a person says it: 1,234 B, 56.7 MB, 8.90 GB."""
    if count >= 10**9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 10**6 else f"{count:,} B"
