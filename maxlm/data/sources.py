"""Source files of `data prepare`, on a local disk or at any URL that fsspec reads (gs://, s3://, hf://, https://), in a fixed order.

fsspec and not etils.epath, though orbax and grain bring both: epath reads neither hf:// nor https://, and has no memory:// for tests.
"""

import contextlib
import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import urlsplit

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.paths import is_remote
from maxlm.config.transient import first_line, is_transient, retried

FIELD = "data.prepare.sources"
STDLIB = "python-stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# By which a file system states that a file is another than before, under the names that its kind of server uses.
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "blob_id", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
Digests = dict[str, tuple[list[int | str], str]]  # path -> version of the file, digest of its content in hex


@dataclass(frozen=True)
class SourceFile:
    """One file to read: a local path, or a URL with the file system that reads it."""

    path: str
    size: int  # bytes; 0 if a server does not state it
    source: str  # the entry of data.prepare.sources that lists it
    name: str  # its path from the last folder that the entry names on, which documents are named by
    filesystem: Any = None  # of fsspec; None: local

    @property
    def suffixes(self) -> list[str]:
        """Endings of the name in lower case, such as [".jsonl", ".gz"]. The query of an https:// URL is no part of it."""
        name = urlsplit(self.path).path if self.path.startswith(("http://", "https://")) else self.path
        return [suffix.lower() for suffix in PurePosixPath(name).suffixes]

    def open(self) -> BufferedReader:
        return cast(BufferedReader, Path(self.path).open("rb") if self.filesystem is None else self.filesystem.open(self.path, "rb"))

    def version(self) -> list[int | str]:
        """Values that change whenever the content does; [] if the file system states none."""
        if self.filesystem is None:
            status = Path(self.path).stat()  # the kernel sets ctime at every change of content, whatever mtime is set to afterwards
            return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        info = self.filesystem.info(self.path)
        stated = [str(info[key]) for key in VERSIONS if info.get(key)]
        return [self.size, *stated] if stated else []


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """The files of `sources`: source after source, sorted by path inside each.

    Raises:
        UserError: a source does not exist, has no file, or needs a package that is not installed.
        UnavailableError: its storage cannot be reached now.
    """
    return [file for source in sources for file in (_remote_files(source) if is_remote(source) else _local_files(source))]


def read_url(url: str) -> bytes | None:
    """The content of one remote file, or None if it does not exist. Raises as `find_files` does."""
    filesystem, path = _filesystem(url)
    return _or_none(filesystem.cat_file, path, url)


def digests(files: Sequence[SourceFile], known: Digests) -> Digests:
    """Version of every file and digest of its content. A file whose version is in `known` is not read again."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([file.path for file in files], pool.map(lambda file: _digest(file, known), files), strict=True))


def combined(files: Sequence[SourceFile], of_files: Digests) -> str:
    """Digest of all files in hex: suffixes, size and content of each, in order, whatever their folder and their dates."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{''.join(file.suffixes[-2:])} {file.size} {of_files[file.path][1]}\n".encode())
    return total.hexdigest()


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what is raised while `path` is read into a UserError of one line; UnavailableError if remote storage failed, not the content."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_remote(path) and is_transient(error):
            raise UnavailableError(f"{path}: cannot be read: {first_line(error)}; try again when the cause is gone.") from error
        if is_remote(path):
            raise UserError(f"{path}: cannot be read: {first_line(error)}.") from error
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
        raise


def text_of(content: bytes, origin: str) -> str:
    """`content` as UTF-8 text. Raises UserError naming `origin` if it is something else."""
    if b"\0" in content:
        raise UserError(f"{origin} is not text: byte {content.index(0)} is NUL; leave it out of {FIELD}.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8 text: byte {error.start} is wrong; convert it or leave it out.") from error


def _digest(file: SourceFile, known: Digests) -> tuple[list[int | str], str]:
    with reading(file.path):
        version = file.version()
        if version and file.path in known and known[file.path][0] == version:
            return version, known[file.path][1]
        with file.open() as stream:
            return version, hashlib.file_digest(stream, "blake2b").hexdigest()


def _local_files(source: str) -> list[SourceFile]:
    path, paths = Path(source).expanduser(), []
    if source == STDLIB:
        return _sized(_stdlib(), source, Path(sysconfig.get_paths()["stdlib"]))
    root = path.parent
    if path.is_file():
        return _sized([path], source, root)
    if path.is_dir():
        paths = [file for file in path.rglob("*") if not _hidden(file.relative_to(path).parts)]
        problem = "is a folder without files"
    elif glob.has_magic(source):
        paths = [Path(name) for name in glob.iglob(str(path), recursive=True)]  # noqa: PTH207 - Path.glob takes no absolute pattern
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)).parent
        problem = "matches no file"
    else:
        problem = "does not exist"
    return _sized(sorted(path for path in paths if path.is_file()), source, root) or _no_file(source, problem)


def _sized(paths: Iterable[Path], source: str, root: Path) -> list[SourceFile]:
    files = []
    for path in paths:
        with reading(str(path)):
            files.append(SourceFile(str(path), path.stat().st_size, source, path.relative_to(root).as_posix()))
    return files


def _remote_files(url: str) -> list[SourceFile]:
    """The files at one URL: an object, all below a prefix, or all that match a glob."""
    filesystem, path = _filesystem(url)
    info, infos, problem = _or_none(filesystem.info, path, url), {}, "does not exist"
    with reading(url):
        if info is None and glob.has_magic(path):
            infos = retried(lambda: filesystem.glob(path, detail=True), f"listing {url}")
            problem = "matches no file"
        elif info is not None and info["type"] == "directory":
            infos = retried(lambda: filesystem.find(path, detail=True), f"listing {url}")
            infos = {name: item for name, item in infos.items() if not _hidden(PurePosixPath(name[len(path) :]).parts)}
            problem = "is a folder without files"
        elif info is not None:
            infos = {path: info}
    names = sorted((name for name, item in infos.items() if item["type"] == "file"), key=PurePosixPath)
    fixed = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), path.rstrip("/").split("/")))
    start = fixed.rfind("/") + 1
    files = [SourceFile(filesystem.unstrip_protocol(name), infos[name].get("size") or 0, url, name[start:], filesystem) for name in names]
    return files or _no_file(url, problem)


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


def _no_file(source: str, problem: str) -> list[SourceFile]:
    raise UserError(f"{FIELD}: {source} {problem}; give a file, a folder, a glob or {STDLIB}.")


def _hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises UserError naming the package that is missing."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    with reading(url):
        try:
            return url_to_fs(url)
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or str(error)
            raise UserError(f"{url}: {scheme}:// needs the package {package}, which is not installed: `pip install {package}`.") from error
        except ValueError as error:
            raise UserError(f"{url}: {scheme}:// is no storage that fsspec knows; copy it to this machine or to a bucket.") from error


def _stdlib() -> list[Path]:
    """Modules of the running interpreter: no tests, nothing installed, nothing that is not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - NOT_STDLIB)  # what is installed there may be far larger than the library
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in paths if _is_text(path))


def _is_text(path: Path) -> bool:
    try:
        text_of(path.read_bytes(), str(path))
    except UserError:
        return False
    return True
