"""What can go wrong with a checkpoint, in words, and whether an older checkpoint would help."""

import enum
import shutil
from pathlib import Path

from maxlm.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written, read or used. One line: which, where, why, and what to do."""


class DamagedError(Exception):
    """The bytes of a checkpoint are not the ones that were written: the one before may be whole."""


class Verdict(enum.IntEnum):
    """How reading a checkpoint ended in one process. Ordered: the worst of all processes is the verdict of the cluster."""

    GOOD = 0
    DAMAGED = 1  # an older checkpoint may be good
    REFUSED = 2  # an older checkpoint would be refused too, or could not be read either


# Status names of tensorstore and XLA that speak of the machine or the network, not of the data on disk.
_PASSING = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")
_FULL = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota exceeded", "File too large")


def verdict_of(error: Exception) -> Verdict:
    """Whether `error`, met while reading a checkpoint, means that its bytes are bad. What may pass by itself does not."""
    if isinstance(error, UserError | PermissionError | MemoryError | TimeoutError):
        return Verdict.REFUSED
    return Verdict.REFUSED if any(name in str(error) for name in _PASSING) else Verdict.DAMAGED


def explain_failed_save(error: Exception, step: int, directory: str, needed_bytes: int) -> str:
    """Why the checkpoint of `step` was not written; a full disk is said with its figures (bytes in decimal units)."""
    what = f"checkpoint {step} was not saved in {directory}"
    if any(sign in str(error) for sign in _FULL):
        free = free_bytes(directory)
        left = "" if free is None else f" and {readable(free)} are free"
        return (
            f"{what}: no room left (this process writes up to {readable(needed_bytes)}{left}); free some space, lower checkpoint.keep "
            "or point run.dir at a larger disk. Older checkpoints are untouched."
        )
    return f"{what}: {first_line(error)}. Older checkpoints are untouched."


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


def first_line(error: BaseException) -> str:
    """The kind of an error and the start of what it says, short enough for one line."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else ""
    return f"{type(error).__name__}: {text[:240]}".rstrip(": .")
