"""Files of sources: files, folders, globs, and any URL that fsspec reads (gs://, s3://, hf://, https://), in a fixed order.

fsspec and not etils.epath, though orbax and grain bring both: epath reads neither hf:// nor https://, and has no memory:// for tests.
"""

import contextlib
import glob
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, cast

from maxlm.base.errors import UnavailableError, UserError, as_user_error, error_kind, shorten
from maxlm.base.paths import is_remote, open_regular
from maxlm.base.transient import first_line, is_transient, retried
from maxlm.documents.formats import UNKNOWN, facts_of, format_by_name, suffix_of, suffixes_of

# Names by which file systems of fsspec tell the content or the time of a file, hashes before times.
VERSIONS = ("md5Hash", "ETag", "etag", "generation", "blob_id", "mtime", "LastModified", "Last-Modified", "last_modified", "created")
# Names of files that describe data or a project: no source in a folder has them unless it names them.
DESCRIPTIONS = re.compile(
    r"(dataset_(infos?|dict)|state|croissant|data-card|metadata|manifest|checksums?|citation|requirements)\.json|"
    r"(package|package-lock|composer|tsconfig|jsconfig|deno|lerna|vercel|angular|nx|turbo)\.json|"
    r"_(success|metadata|common_metadata|(committed|started)_.*)|.*\.(md5|sha1|sha256|sha512|asc|sig)",
    re.IGNORECASE,
)
# Names with any suffix except a suffix of records.
DESCRIPTION_STEMS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors|code_of_conduct|security|requirements|manifest|checksums?|"
    r"(md5|sha1|sha256|sha512)sums?)([._-].*)?",
    re.IGNORECASE,
)
# Suffixes of documentation, loading scripts and pictures in the folder of a data set.
BESIDE_RECORDS = (".md", ".markdown", ".rst", ".bib", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg")
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
SHOWN = 5  # names in a line
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `path`: local or a URL, as `records` takes it; `size`: in bytes, 0 if it is not known; `source`: the entry of the
    sources that lists it; `name`: its path from the last folder that the entry names on; `version`: told of a remote file by its listing,
    "" where storage tells none.
    """

    path: str
    size: int
    source: str
    name: str = field(default="", compare=False)
    version: str = field(default="", compare=False)

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the name in lower case, compressions included."""
        return suffixes_of(self.path)

    @property
    def real_path(self) -> str:
        """The path without links and relative parts, the same for every name of one file; of a remote file its URL."""
        return self.path if is_remote(self.path) else os.path.realpath(self.path)

    def state(self) -> list[int | str]:
        """Values that change whenever the content does; [] if the file system states none."""
        if not is_remote(self.path):
            status = Path(self.path).stat()  # the kernel sets ctime at every change of content, whatever mtime is set to afterwards
            return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        filesystem, name = file_system(self.path)
        info = filesystem.info(name)
        stated = [str(info[key]) for key in VERSIONS if info.get(key)]
        return [self.size, *stated] if stated else []


def find(source: str) -> list[SourceFile]:
    """The files of a source, sorted by their path.

    A folder has all files below it but hidden ones, links out of it, and files that describe data (a README, a licence, dataset_infos.json,
    and next to files of records also documentation, scripts and pictures); one line of the log names them. A glob has the files and
    folders that it matches. A file that is named is always taken.

    Raises:
        UserError: the source does not exist, has no file, cannot be listed, or needs a package that is not installed.
        UnavailableError: its storage cannot be reached now.
    """
    if is_remote(source):
        return _remote(source)
    path = os.path.expanduser(source)  # noqa: PTH111 - Path would change the name that ids begin with
    root = PurePath(path).parent
    if Path(path).is_dir():
        names, problem = _data_only([path], source), "is a folder without files of data"
    elif os.path.lexists(path):
        names, problem = [path], ""
    elif glob.has_magic(path):
        matches = _matches(path)
        any_name = not re.search(r"\w", PurePosixPath(path).name)  # such as data/*, which names no file
        some = [] if any_name else [match for match in matches if not Path(match).is_dir()]
        left = [match for match in matches if match not in set(some)]
        names, problem = list(dict.fromkeys([*some, *(_data_only(left, source) if left else [])])), "matches no file"
        root = PurePath(*itertools.takewhile(lambda part: not glob.has_magic(part), PurePath(path).parts)).parent
    else:
        raise _none(source, "does not exist")
    if not names:
        raise _none(source, problem)
    found = []
    for name in sorted(names, key=PurePath):
        pure = PurePath(name)
        below = pure.relative_to(root) if pure.is_relative_to(root) else pure
        size = 0
        with contextlib.suppress(OSError):  # a link that leads nowhere: `records` says so
            size = Path(name).stat().st_size
        found.append(SourceFile(name, size, source, below.as_posix()))
    return found


def find_once(sources: Sequence[str]) -> list[SourceFile]:
    """The files of all `sources`, sorted by path as text, each file once. Raises as `find` does."""
    return sorted(each_once(file for source in sources for file in find(source)), key=lambda file: file.path)


def each_once(files: Iterable[SourceFile]) -> list[SourceFile]:
    """`files` without further names of a file: the first name and its source keep it. Logs the names left out in one line."""
    kept: dict[str, SourceFile] = {}
    again = [file for file in files if kept.setdefault(file.real_path, file) is not file]
    if again:
        first = kept[again[0].real_path]
        rule = "files that sources list more than once are read once: %s; %s stays with %s"
        _log.warning(rule, _listed_names([file.path for file in again]), shorten(first.path), shorten(first.source))
    return list(kept.values())


def folders(sources: Sequence[str]) -> list[str]:
    """The local folders of which find() lists everything below."""
    paths = [os.path.expanduser(source) for source in sources if not is_remote(source)]  # noqa: PTH111
    given = [path for path in paths if os.path.lexists(path)]
    matches = [match for path in paths if path not in given for match in _matches(path)]
    return [path for path in (*given, *matches) if Path(path).is_dir()]


def version_of(path: str) -> str:
    """The version that storage tells of a remote file now; "" where it says nothing, or has no such file. Raises UserError.

    Compare it with another answer of this function alone: a listing may say the same in other words.
    """
    filesystem, name = file_system(path)
    with reading(path), contextlib.suppress(FileNotFoundError):
        filesystem.invalidate_cache()
        return _version(retried(lambda: filesystem.info(name), f"looking at {path}"))
    return ""


def open_input(path: str) -> BufferedReader:
    """The bytes of a file or URL. Raises OSError or UserError; IsADirectoryError also for pipes and devices, which would never end."""
    if is_remote(path):
        filesystem, name = file_system(path)
        return cast(BufferedReader, filesystem.open(name, "rb"))
    return open_regular(path)


def read_url(url: str) -> bytes | None:
    """The content of one remote file, or None if it does not exist. Raises as `find` does."""
    filesystem, path = file_system(url)
    return cast("bytes | None", _or_none(filesystem.cat_file, path, url))


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises UserError naming the package that is missing."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    with reading(url):  # a client may read its credentials at once
        try:
            return cast("tuple[Any, str]", url_to_fs(url))
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or str(error)
            raise UserError(f"{url}: {scheme}:// needs the package {package}, which is not installed: `pip install {package}`.") from error
        except ValueError as error:
            raise UserError(f"{url}: {scheme}:// is no storage that fsspec knows; copy it to this machine or to a bucket.") from error


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failure to read `path` in the block into a UserError of one line; UnavailableError if it may pass."""
    try:
        yield
    except UserError:
        raise
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, a pipe or a device, and a file is read; give a file.") from error
    except Exception as error:  # of a server's own library, too
        if not is_remote(path):
            if isinstance(error, OSError):
                raise as_user_error(error) from error
            raise
        kind, fix = (UnavailableError, "; try again when the cause is gone") if is_transient(error) else (UserError, "")
        raise kind(f"{path}: cannot be read: {first_line(error)}{fix}.") from error


def _matches(pattern: str) -> list[str]:
    """Paths that a glob matches, sorted. `**` enters each real folder once, so that links to folders above end."""
    parts = PurePath(pattern).parts
    if "**" not in parts:
        return sorted(glob.iglob(pattern))  # noqa: PTH207 - Path.glob takes no absolute pattern
    at = parts.index("**")
    start, rest = os.path.join("", *parts[:at]), parts[at + 1 :] or ("*",)  # noqa: PTH118 - no `.` for the current folder
    entered: set[str] = set()
    left = [folder for folder in reversed(_matches(start)) if Path(folder).is_dir()] if start else [""]
    found: set[str] = set()
    while left:
        folder = left.pop()
        real = os.path.realpath(folder)
        if real in entered:
            continue
        entered.add(real)
        found.update(_matches(os.path.join(glob.escape(folder), *rest)))  # noqa: PTH118
        below = sorted(glob.iglob(os.path.join(glob.escape(folder), "*", "")), reverse=True)  # noqa: PTH118, PTH207
        left += [name.rstrip(os.sep) for name in below]
    return sorted(found)


def _below(folder: str, source: str, hidden: list[str]) -> Iterator[str]:
    """Files below a folder. Depth first: of two links to one folder the first one by name counts. `hidden`: gets names left out."""
    seen: set[tuple[int, int]] = set()
    tree, left, outside = _tree(folder), [folder], list[str]()
    while left:
        current = left.pop()
        try:
            status = Path(current).stat()
            names = sorted(os.listdir(current), reverse=True)  # noqa: PTH208
        except OSError as error:
            raise error_kind(error)(f"{source}: the folder {current} cannot be listed: {error.strerror or error}.") from error
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        hidden += [name for name in names if name.startswith(".")]
        paths = [os.path.join(current, name) for name in names if not name.startswith(".")]  # noqa: PTH118 - keeps the folder as it was given
        away = {path for path in paths if Path(path).is_symlink() and not Path(os.path.realpath(path)).is_relative_to(tree)}
        outside += away
        left += [path for path in paths if path not in away and Path(path).is_dir()]
        yield from (path for path in reversed(paths) if path not in away and not Path(path).is_dir())
    if outside:
        fix = "name the folder that they lead to, or the links themselves by a glob"
        _log.warning("%s: links out of the folder are not followed: %s; to read them, %s", shorten(source), _listed_names(outside), fix)


def _tree(folder: str) -> Path:
    """The folder inside which links are followed: itself; of a snapshot in the cache of the Hugging Face hub the repository's, which holds
    the files (huggingface_hub, "Understand caching").
    """
    real = Path(os.path.realpath(folder))
    snapshots = (parent.parent for parent in (real, *real.parents) if parent.parent.name == "snapshots")
    return next((place.parent for place in snapshots if (place.parent / "blobs").is_dir()), real)


def _data_only(places: Sequence[str], source: str) -> list[str]:
    """The files of data among `places`, which are files and folders."""
    hidden: list[str] = []
    below = [name for place in places for name in (_below(place, source, hidden) if Path(place).is_dir() else [place])]
    return _without_descriptions(list(dict.fromkeys(below)), source, hidden)


def _without_descriptions(names: list[str], source: str, hidden: Iterable[str]) -> list[str]:
    """The files that are data. Logs which ones are not, the hidden ones included."""
    records = {name for name in names if (kind := format_by_name(name)) != UNKNOWN and not facts_of(kind).whole}
    bare = {name: PurePosixPath(name).name for name in names}
    described = {
        name for name in names if DESCRIPTIONS.fullmatch(bare[name]) or (name not in records and DESCRIPTION_STEMS.fullmatch(bare[name]))
    }
    if records - described:
        described |= {name for name in names if suffix_of(name) in (*BESIDE_RECORDS, *PICTURES)}
    if out := [*hidden, *described]:
        _log.warning("%s: left out as no data: %s; to read one of them, name it", shorten(source), _listed_names(out))
    return [name for name in names if name not in described]


def _listed_names(paths: list[str]) -> str:
    """Names of a few files, and how many more there are."""
    names = sorted({PurePosixPath(path).name for path in paths})
    more = f" and others, {len(paths):,} in all" if len(paths) > len(names) or len(names) > SHOWN else ""
    return ", ".join(map(shorten, names[:SHOWN])) + more


def _remote(url: str) -> list[SourceFile]:
    """The files at one URL: an object, all below a prefix, or all that match a glob."""
    filesystem, path = file_system(url)
    info, infos, problem = _or_none(filesystem.info, path, url), dict[str, Any](), "does not exist"
    any_name = False
    with reading(url):
        if info is None and glob.has_magic(path):
            infos = retried(lambda: filesystem.glob(path, detail=True), f"listing {url}")
            problem, any_name = "matches no file", not re.search(r"\w", PurePosixPath(path).name)
        elif info is not None and info["type"] == "directory":
            infos = retried(lambda: filesystem.find(path, detail=True), f"listing {url}")
            problem, any_name = "is a folder without files of data", True
        elif info is not None:
            infos = {path: info}
    names = [name for name, item in infos.items() if item["type"] == "file"]
    if any_name:
        hidden = [name for name in names if any(part.startswith(".") for part in PurePosixPath(name[len(path) :]).parts)]
        names = _without_descriptions([name for name in names if name not in set(hidden)], url, hidden)
    if not names:
        raise _none(url, problem)
    fixed = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), path.rstrip("/").split("/")))
    start = fixed.rfind("/") + 1
    return [
        SourceFile(filesystem.unstrip_protocol(name), infos[name].get("size") or 0, url, name[start:], _version(infos[name]))
        for name in sorted(names, key=PurePosixPath)
    ]


def _or_none(read: Callable[[str], Any], path: str, url: str) -> Any:
    """`read(path)`, retried while storage fails; None if the file does not exist."""

    def attempt() -> Any:
        try:
            return read(path)
        except FileNotFoundError as error:  # over https:// also for a server that does not answer, with the reason as its cause
            if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
                raise error.__cause__ from None
            return None

    with reading(url):
        return retried(attempt, f"reading {url}")


def _none(source: str, problem: str) -> UserError:
    return UserError(f"{source} {problem}; give a file, a folder, a glob or a URL.")


def _version(info: dict[str, Any]) -> str:
    return next((f"{name}={info[name]}" for name in VERSIONS if info.get(name)), "")
