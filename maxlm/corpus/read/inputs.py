"""Files to read: named, in folders, matching globs, or at any URL that fsspec reads, in a fixed order."""

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.transient import first_line, is_transient, retried

# Names of what fsspec's file systems tell of the content or time of a file; the first that is there counts: hashes before times.
VERSIONS = ("md5Hash", "ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "modified", "updated", "created")


@dataclass(frozen=True)
class Input:
    """One file. `path` is what `read` takes; `size` in bytes, 0 where it is not known; `source`: the entry of `sources` that lists it;
    `version`: what tells the content of a remote file from another one of its size, "" where storage does not say.
    """

    path: str
    size: int
    source: str
    version: str = field(default="", compare=False)


def find(sources: Sequence[str]) -> list[Input]:
    """The files of `sources` (files, folders with all below them, globs, URLs), sorted by path; one that two sources list comes once.

    Folders that links lead to are read once each, so that links in a circle end. Names that begin with a dot are left out of folders.

    Raises:
        UserError: a source does not exist, has no file, cannot be listed, or needs a package that is not installed.
        UnavailableError: its storage cannot be reached now.
    """
    found: dict[str, Input] = {}
    for source in sources:
        files = _remote(source) if "://" in source else _local(source)
        if not files:
            raise UserError(f"{source} has no file in it; give a file, a folder, a glob or a URL that has.")
        for file in files:
            found.setdefault(file.path, file)
    return sorted(found.values(), key=lambda file: file.path)


def folders(sources: Sequence[str]) -> list[str]:
    """The local folders of which find() lists everything below."""
    paths = [os.path.expanduser(source) for source in sources if "://" not in source]  # noqa: PTH111
    given = [path for path in paths if os.path.lexists(path)]
    matches = [match for path in paths if path not in given for match in glob.iglob(path, recursive=True)]  # noqa: PTH207
    return [path for path in (*given, *matches) if Path(path).is_dir()]


def version_of(path: str) -> str:
    """The version that storage tells of a remote file now; "" where it says nothing, or has no such file. Raises UserError.

    Compare it with another answer of this function alone: a listing may say the same in other words.
    """
    filesystem, name = _filesystem(path)
    try:
        filesystem.invalidate_cache()
        return _version(retried(lambda: filesystem.info(name), f"looking at {path}"))
    except FileNotFoundError:
        return ""
    except Exception as error:
        kind = UnavailableError if is_transient(error) else UserError
        raise kind(f"{path}: cannot be read: {first_line(error)}; try again when the cause is gone.") from error


def _version(info: dict[str, Any]) -> str:
    return next((f"{name}={info[name]}" for name in VERSIONS if info.get(name)), "")


def open_input(path: str) -> BinaryIO:
    """The bytes of a file or URL. Raises OSError or UserError."""
    if "://" in path:
        filesystem, name = _filesystem(path)
        return cast(BinaryIO, filesystem.open(name, "rb"))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(path)
    return os.fdopen(descriptor, "rb")


def _local(source: str) -> list[Input]:
    path = os.path.expanduser(source)  # noqa: PTH111 - Path would change the name that ids begin with
    if Path(path).is_dir():
        names = _below(path, source)
    elif os.path.lexists(path):
        names = iter([path])
    elif glob.has_magic(path):
        matches = sorted(glob.iglob(path, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        names = (name for match in matches for name in (_below(match, source) if Path(match).is_dir() else [match]))
    else:
        raise UserError(f"{source} does not exist; give a file, a folder, a glob or a URL.")
    return [Input(name, _size(name), source) for name in names]


def _below(folder: str, source: str) -> Iterator[str]:
    """Files below a folder, sorted. Depth first, so that of two links to one folder the first one by name counts."""
    seen: set[tuple[int, int]] = set()
    left = [folder]
    while left:
        current = left.pop()
        try:
            status = Path(current).stat()
            names = sorted(os.listdir(current), reverse=True)  # noqa: PTH208
        except OSError as error:
            raise UserError(f"{source}: the folder {current} cannot be listed: {error.strerror or error}.") from error
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        paths = [os.path.join(current, name) for name in names if not name.startswith(".")]  # noqa: PTH118 - keeps the folder as it was given
        left += [path for path in paths if Path(path).is_dir()]
        yield from (path for path in reversed(paths) if not Path(path).is_dir())


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # a link that leads nowhere: `read` says so
        return 0


def _remote(url: str) -> list[Input]:
    filesystem, path = _filesystem(url)
    try:
        infos = retried(lambda: _listed(filesystem, path), f"listing {url}")
    except Exception as error:
        kind = UnavailableError if is_transient(error) else UserError
        raise kind(f"{url}: cannot be listed: {first_line(error)}.") from error
    if infos is None:
        raise UserError(f"{url} does not exist; give a file, a folder, a glob or a URL.")
    inside = [(name, info) for name, info in infos.items() if info["type"] == "file"]
    return [Input(filesystem.unstrip_protocol(name), info.get("size") or 0, url, _version(info)) for name, info in inside]


def _listed(filesystem: Any, path: str) -> dict[str, Any] | None:
    try:
        info = filesystem.info(path)
    except FileNotFoundError as error:  # over https:// also for a server that does not answer, with the reason as its cause
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise error.__cause__ from None
        return dict(filesystem.glob(path, detail=True)) if glob.has_magic(path) else None
    if info["type"] != "directory":
        return {path: info}
    below = dict(filesystem.find(path, detail=True))
    return {name: item for name, item in below.items() if not any(part.startswith(".") for part in PurePosixPath(name[len(path) :]).parts)}


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or str(error)
        raise UserError(f"{url}: {scheme}:// needs the package {package}, which is not installed: `pip install {package}`.") from error
    except ValueError as error:
        raise UserError(f"{url}: {scheme}:// is no storage that fsspec knows; copy it to this machine or to a bucket.") from error
    return filesystem, path
