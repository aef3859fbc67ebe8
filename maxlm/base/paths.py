"""Paths in settings: `~` expanded, and unsupported storage refused before anything is opened."""

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from pydantic_core import PydanticCustomError

from maxlm.base.errors import ConfigError, UserError, shorten

NAME_BYTES = 200  # file systems allow 255; names derived from a run's name are longer
NAME_FIX = "use letters, digits, `-`, `_` and `.`, as in `llama-8b.2`"
MOST_BYTES = 2**26  # of a file that is read as a whole
PYTHON = "python://"  # begins the name of data that a program gives
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


def user_path(path: str) -> Path:
    """A local path that was given by a user, `~` expanded. Raises UserError where that home is not known."""
    try:
        return Path(expand_home(path))
    except ValueError as error:
        raise UserError(f"{shorten(path)}: {error}.") from None


def local(path: str) -> str:
    """A path of this machine's file system, `~` expanded. Raises PydanticCustomError for anything with a scheme, such as gs://."""
    if SCHEME.match(path):
        if path.startswith("file:"):
            refuse("be a path, without file:", "write the path alone, such as /data/texts")
        refuse("be a path of this machine's file system", "mount the bucket (gcsfuse) and name the mount, or copy it here")
    return _expanded(path)


def is_remote(path: str) -> bool:
    """True for a URL such as gs://bucket/folder, False for a path of this machine."""
    return "://" in path


def readable(path: str) -> str:
    """A path of this machine, `~` expanded, or a URL that fsspec may read. Raises PydanticCustomError for anything else with a scheme."""
    scheme = SCHEME.match(path)
    return path if scheme is not None and scheme[1] != "file" and path[scheme.end() :].strip("/") and is_remote(path) else local(path)


def given_or_stored(path: str) -> str:
    """As `stored`, or `python://NAME` for batches that a Python program gives."""
    return path if path.startswith(PYTHON) else stored(path)


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


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def irregular(path: str | Path) -> str:
    """Kind of a special file at `path`, such as "a named pipe"; "" for a regular or a missing file."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")  # noqa: PTH116  # str or Path
    except (OSError, ValueError):
        return ""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file by a path that a user gave. Raises OSError; IsADirectoryError, naming the kind, for a special file: a pipe
    would wait for a writer, and a device never ends.
    """
    return os.fdopen(_descriptor(path, os.O_RDONLY), "rb")


def append_regular(path: str | Path) -> int:
    """Descriptor that writes to the end of a file, which is made if there is none. Raises OSError as `open_regular`: a pipe would wait for
    a reader.
    """
    return _descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def check_regular(path: object) -> None:
    """Raise IsADirectoryError as `open_regular`, for a path that a library opens. Files of a bucket pass, and missing ones."""
    if kind := irregular(str(path)):
        raise _other_kind(kind, path)


def _descriptor(path: str | Path, flags: int) -> int:
    check_regular(path)  # before it is opened, which some devices act upon
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if kind := _KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode), ""):
        os.close(descriptor)
        raise _other_kind(kind, path)
    return descriptor


def _other_kind(kind: str, path: object) -> OSError:
    return IsADirectoryError(errno.EISDIR, f"it is {kind}, and not a regular file", str(path))


def read_file(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file that is read whole, of at most `most` bytes. Raises OSError as `open_regular`, and for more bytes."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise OSError(errno.EINVAL, f"it has more than {most:,} bytes, which no such file has", str(path))
    return content


def check_run_name(name: str, source: str = "") -> None:
    """Raise ConfigError unless `name` is one plain folder name, which cannot lead out of its directory on any system."""
    rule = ""
    if not name:
        rule = "is empty"
    elif not name.isprintable() or name != name.strip():
        rule = "holds a control character, or a space at an end"
    elif any(bad in name for bad in ("/", "\\", "..")) or name.startswith((".", "-")):
        rule = "must be one folder name, without `/`, `\\` or `..`, and not start with `.` or `-`"
    elif len(name.encode()) > NAME_BYTES:
        rule = f"is {len(name.encode())} bytes long, and {NAME_BYTES} are allowed"
    if rule:
        raise ConfigError("run.name", name, rule, NAME_FIX, source)


def check_out(path: Path | None, option: str = "--out") -> None:
    """Raise UserError if the file that `option` names would be in a folder that does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first.")


def refuse(rule: str, fix: str) -> NoReturn:
    """Reject a value from inside a validator: what it must do, and what to write instead."""
    raise PydanticCustomError("setting", "must {rule}", {"rule": rule, "fix": fix})


def _expanded(path: str) -> str:
    try:
        return expand_home(path)
    except ValueError as error:
        rule, _, fix = str(error).partition("; ")
        refuse(f"be a path ({rule})", fix)
