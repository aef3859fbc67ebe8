"""Where text comes from: which files `data.prepare.sources` means, and the documents in them, always in the same order."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from maxlm.config.errors import UserError
from maxlm.data.readers import Document, read_documents, text_of

STDLIB = "python-stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Digests = dict[str, tuple[list[int], str]]  # path -> size and times of the file, digest of its content in hex


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `size` in bytes; `source` is the entry of data.prepare.sources that brought it."""

    path: Path
    size: int
    source: str


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """The files that `sources` mean: source after source, sorted by path inside each.

    Raises:
        UserError: a source is missing, or means no file.
    """
    return [_file(path, source) for source in sources for path in _paths(source)]


def documents(sources: Sequence[str], text_field: str) -> Iterator[Document]:
    """Every document of `sources` with text in it, in order. A file of text is one document.

    Raises:
        UserError: something is missing, foreign or damaged (named, with its line or record), or a source has no text at all.
    """
    yield from documents_in(find_files(sources), text_field)


def documents_in(files: Sequence[SourceFile], text_field: str) -> Iterator[Document]:
    """As `documents`, of files already found."""
    done, found = 0, 0
    for number, file in enumerate(files):
        for document in read_documents(file.path, text_field):
            found += 1
            yield document._replace(bytes_read=done + document.bytes_read)
        done += file.size
        if number + 1 == len(files) or files[number + 1].source != file.source:
            if found == 0:
                raise UserError(f"data.prepare.sources: {file.source} has no text in it; give it some or take it out.")
            found = 0


def digests(files: Sequence[SourceFile], known: Digests) -> Digests:
    """Digest of the content of every file, with what tells that it has not changed since. A file that `known` has is not read again."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([str(file.path) for file in files], pool.map(lambda file: _digest(file.path, known), files), strict=True))


def combined(files: Sequence[SourceFile], of_files: Digests) -> str:
    """Digest of all files in hex: kind, size and content of each, in order. Their folder does not matter, nor their dates."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{''.join(file.path.suffixes[-2:])} {file.size} {of_files[str(file.path)][1]}\n".encode())
    return total.hexdigest()


def _digest(path: Path, known: Digests) -> tuple[list[int], str]:
    try:
        status = path.stat()
        # The kernel sets ctime at every change of content, however it is dated afterwards.
        unchanged = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if str(path) in known and known[str(path)][0] == unchanged:
            return unchanged, known[str(path)][1]
        with path.open("rb") as stream:
            return unchanged, hashlib.file_digest(stream, "blake2b").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


def _file(path: Path, source: str) -> SourceFile:
    try:
        return SourceFile(path, path.stat().st_size, source)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


def _paths(source: str) -> list[Path]:
    """The files one source means."""
    if source == STDLIB:
        return _stdlib()
    if "://" in source:
        raise UserError(f"data.prepare.sources: {source} is not on this machine's disk; copy it here first.")
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        visible = (file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts))
        paths = sorted(file for file in visible if file.is_file())
        problem = "is a folder without files"
    elif glob.has_magic(source):
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        paths = sorted(file for name in names if (file := Path(name)).is_file())
        problem = "matches no file"
    else:
        paths, problem = [], "does not exist"
    if not paths:
        raise UserError(f"data.prepare.sources: {source} {problem}; give a file, a folder, a glob or {STDLIB}.")
    return paths


def _stdlib() -> list[Path]:
    """The running interpreter's own modules: no tests, nothing installed, nothing that is not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    own: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - NOT_STDLIB)  # what is installed there may be far larger than the library
        own += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in own if _is_text(path))


def _is_text(path: Path) -> bool:
    try:
        text_of(path.read_bytes(), str(path))
    except UserError:
        return False
    return True
