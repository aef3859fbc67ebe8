"""Source files of `data prepare`: files found by `documents.files`, and Python's standard library; their digests, and text in UTF-8."""

import contextlib
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxlm.config.errors import UserError, as_user_error
from maxlm.config.paths import is_remote
from maxlm.documents.files import SourceFile, cannot_read, each_once, find, open_input, read_url

__all__ = ["Digests", "SourceFile", "combined", "digests", "find_files", "read_url", "reading", "text_of"]

FIELD = "data.prepare.sources"
STDLIB = "python-stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Digests = dict[str, tuple[list[int | str], str]]  # path -> state of the file, digest of its content in hex


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """The files of `sources`, source after source, each file once. Raises as `documents.files.find` does, naming the setting."""
    found: list[SourceFile] = []
    for source in sources:
        try:
            found += _stdlib_files() if source == STDLIB else find(source)
        except UserError as error:
            raise type(error)(f"{FIELD}: {error}") from error
    return each_once(found)


def digests(files: Sequence[SourceFile], known: Digests) -> Digests:
    """State of every file and digest of its content. A file whose state is in `known` is not read again."""
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
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, a pipe or a device, and a file is read; give a file.") from error
    except Exception as error:
        if is_remote(path):
            raise cannot_read(path, error) from error
        if isinstance(error, OSError):
            raise as_user_error(error) from error
        raise


def text_of(content: bytes, origin: str) -> str:
    """`content` as UTF-8 text. Raises UserError naming `origin` if it is something else."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8 text: byte {error.start} is wrong; convert it or leave it out.") from error


def _digest(file: SourceFile, known: Digests) -> tuple[list[int | str], str]:
    with reading(file.path):
        state = file.state()
        if state and file.path in known and known[file.path][0] == state:
            return state, known[file.path][1]
        with contextlib.closing(open_input(file.path)) as stream:
            return state, hashlib.file_digest(stream, "blake2b").hexdigest()


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [SourceFile(str(path), path.stat().st_size, STDLIB, path.relative_to(root).as_posix()) for path in _stdlib()]


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
