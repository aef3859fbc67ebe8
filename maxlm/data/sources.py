"""Source files of `data prepare`: files found by `documents.files`, and Python's standard library; their digests, and text in UTF-8."""

import contextlib
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxlm.base.errors import UserError
from maxlm.documents.files import SourceFile, each_once, find, open_input, reading

__all__ = ["Digests", "SourceFile", "combined", "digests", "find_files", "text_of"]

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
    """State of every file and digest of its content. A file with the same state in `known` is not read again."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([file.path for file in files], pool.map(lambda file: _digest(file, known), files), strict=True))


def combined(files: Sequence[SourceFile], of_files: Digests) -> str:
    """Digest of all files in hex: suffixes, size and content of each, in order, whatever their folder and their dates."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{''.join(file.suffixes[-2:])} {file.size} {of_files[file.path][1]}\n".encode())
    return total.hexdigest()


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
    """Modules of the running interpreter: no tests, nothing installed, nothing that is not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - NOT_STDLIB)  # what is installed there may be far larger than the library
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(UnicodeDecodeError):
                path.read_bytes().decode()
                paths.append(path)
    return [SourceFile(str(path), path.stat().st_size, STDLIB, path.relative_to(root).as_posix()) for path in sorted(paths)]
