"""Paths in settings: `~` expanded, and unsupported storage refused before anything is opened."""

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from pydantic_core import PydanticCustomError

from maxlm.config.errors import UserError, shorten

MOST_BYTES = 2**26  # of a file that is read as a whole
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
ADDRESS = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^?#%\\]*)?")


def expand_home(path: str) -> str:
    """`path` with `~` or `~user` at its start replaced by that user's home. Raises ValueError where there is no such user."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        name = path.partition("/")[0]
        raise ValueError(f"the home of `{name}` is not known; write the path out, or ./{name} for a folder of that name") from None


def local(path: str) -> str:
    """A path of this machine's file system, `~` expanded. Raises PydanticCustomError for anything with a scheme, such as gs://."""
    if SCHEME.match(path):
        if path.startswith("file:"):
            refuse("be a path, without file:", "write the path alone, such as /data/texts")
        refuse("be a path of this machine's file system", "mount the bucket (gcsfuse) and name the mount, or copy it here")
    return _expanded(path)


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file of this machine to read its bytes. Raises OSError; IsADirectoryError also for a pipe and a device, which would never
    end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "a folder, a pipe or a device, and not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """The bytes of a small file, as those that hold the state of a run. Raises OSError as `open_regular`, and for more than MOST_BYTES."""
    with open_regular(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES:,} bytes, which no such file is", str(path))
    return content


def is_remote(path: str) -> bool:
    """True for a URL such as gs://bucket/folder, False for a path of this machine."""
    return "://" in path


def readable(path: str) -> str:
    """A path of this machine, `~` expanded, or a URL that fsspec may read. Raises PydanticCustomError for anything else with a scheme."""
    scheme = SCHEME.match(path)
    return path if scheme is not None and scheme[1] != "file" and path[scheme.end() :].strip("/") and is_remote(path) else local(path)


def stored(path: str) -> str:
    """A folder of this machine or of a bucket, gs://bucket/folder. Raises PydanticCustomError for any other scheme."""
    scheme = SCHEME.match(path)
    if scheme is None:
        return _expanded(path)
    if scheme[1].lower() != "gs":
        refuse(
            "be a folder of this machine's file system or gs://bucket/folder, the only storage that is supported",
            f"copy it to one of them, or mount it and name the mount ({scheme[1][:20]}: is not supported)",
        )
    if not ADDRESS.fullmatch(path) or ".." in path.split("/"):
        rule = "be written gs://bucket/folder, the bucket of 3 letters or more in lower case, without ?, #, % and .."
        refuse(rule, "write it so, as in gs://corpus/fineweb")
    return path


def store_argument(path: str) -> str:
    """Check an argument of the command line as `stored` does. Raises UserError."""
    try:
        return stored(path)
    except PydanticCustomError as error:
        context = error.context or {}
        raise UserError(f"{shorten(path)}: must {context['rule']}; {context['fix']}.") from None


def same_place(path: str) -> str:
    """One spelling for all of a place: no `/` at the end, no `.` or `..` inside, links followed."""
    return path.rstrip("/") if SCHEME.match(path) else os.path.realpath(path)


def is_inside(path: str, folder: str) -> bool:
    """True if `path` is `folder` or below it, as far as their names and links tell."""
    inner, outer = same_place(path), same_place(folder).rstrip("/")
    return inner == outer or inner.startswith(f"{outer}/")


def refuse(rule: str, fix: str) -> NoReturn:
    """Reject a value from inside a validator: what it must do, and what to write instead."""
    raise PydanticCustomError("setting", "must {rule}", {"rule": rule, "fix": fix})


def _expanded(path: str) -> str:
    try:
        return expand_home(path)
    except ValueError as error:
        rule, _, fix = str(error).partition("; ")
        refuse(f"be a path ({rule})", fix)
