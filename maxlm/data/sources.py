"""Source files of `data prepare`, and their documents.

Files are found by `documents.files` and Python's standard library; their digests, and text in UTF-8. Documents are the records of
`documents.reader`, where the first defect is an error that names it.
"""

import contextlib
import hashlib
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.base.errors import UserError, shorten
from maxlm.config.choices import blamed, implementation, parts
from maxlm.data.metadata import About, about
from maxlm.documents.files import SourceFile, each_once, find, open_input, reading
from maxlm.documents.reader import records
from maxlm.documents.records import DEFAULTS, REASONS, Defect, Record, Wanted
from maxlm.documents.text import problem_of

__all__ = ["Digests", "SourceFile", "combined", "digests", "find_files", "text_of"]

FIELD = "data.prepare.sources"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Digests = dict[str, tuple[list[int | str], str]]  # path -> state of the file, digest of its content in hex


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """The files of `sources`, source after source, each file once. Raises as `documents.files.find` does, naming the setting."""
    found: list[SourceFile] = []
    for source in sources:
        try:
            found += _named(source) or find(source)
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


def _named(entry: str) -> list[SourceFile]:
    """The files of an entry that begins with the name of a part; [] for any other, which is a path. Raises UserError."""
    name, _, argument = entry.partition(":")
    for part in parts("source") if "://" not in entry else ():
        if part.name == name:
            with blamed(part, f"place {part.place}"):
                files = [replace(file, source=entry) for file in implementation(part)(argument)]
            if not files:
                raise UserError(f"{entry} has no file of documents; name another source.")
            return files
    return []


def standard_library(argument: str) -> list[SourceFile]:
    """Modules of the running interpreter: no tests, nothing installed, nothing that is not UTF-8."""
    if argument:
        raise UserError(f"python-stdlib takes nothing after a colon, and here it is {shorten(argument)}: write python-stdlib.")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - NOT_STDLIB)  # what is installed there may be far larger than the library
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(UnicodeDecodeError):
                path.read_bytes().decode()
                paths.append(path)
    return [SourceFile(str(path), path.stat().st_size, "", path.relative_to(root).as_posix()) for path in sorted(paths)]


_log = logging.getLogger(__name__)
# Message for each reason, with the defect's `detail` filled in. Reasons without an entry use the text of REASONS.
SAID = {
    "ambiguous_field": "has more than one column of the name {example}; rename or drop the others",
    "binary": "is not text ({format}); leave it out of data.prepare.sources, or convert it",
    "bomb": "decompresses to more than the limits allow ({example}); decompress it, if it is right",
    "damaged": "is damaged ({example}); make or download it again",
    "empty": "is empty",
    "encoding": "is not UTF-8 text; convert it, or clean it by `maxlm corpus run`, which finds the encoding",
    "foreign_value": "holds a value that cannot be read here ({example}); convert or drop the column",
    "missing_field": "has no field {field}; set data.prepare.text_field to one of its fields: {example}",
    "no_fields": "holds {format}; conversations are records of JSON (.jsonl, .json), CSV, Parquet or ArrayRecord: convert or leave it out",
    "not_a_file": "is a folder, a pipe or a device, and a file is read; give a file",
    "not_json": "is not JSON: {error}",
    "not_object": "is a JSON {type}, not an object",
    "not_text": "the field {field} is a {type}, not text; set data.prepare.text_field",
    "null_text": "the field {field} is null; take such rows out of the file, or give them an empty text",
    "too_large": "is longer than {limit:,} bytes, the limit of one document; split it into documents, one a line of JSON or one a file",
    "truncated": "is not whole, it ends in the middle ({example}); make or download it again",
    "unknown_format": "the suffix {suffix} states no format that is read (.jsonl, .json, .csv, .parquet, .arrayrecord, .txt, .md, .html, "
    "source code ...); rename or convert the file, or name those to read by a glob such as folder/**/*.jsonl",
    "unreadable": "cannot be read: {example}",
}
DETAIL = {"format": "control characters", "error": "", "type": "value", "field": "", "suffix": "", "limit": DEFAULTS.max_record_bytes}
BAD_RECORDS = ("not_json", "not_object", "malformed")  # cost one record, and the next one is read


class Document(NamedTuple):
    """One document, never empty. `text`: of conversations the record as JSON."""

    text: str
    origin: str  # its file, with line, row or record: for error messages
    bytes_read: int  # of the sources, up to and including it, about
    about: About


class Fields(NamedTuple):
    """Fields of a record. `text`: None for conversations, which are whole records; `content`: fields that are not metadata.
    `lenient`: records that are no JSON objects are left out and counted.
    """

    text: str | None
    content: frozenset[str]
    lenient: bool = False

    @classmethod
    def of_text(cls, name: str) -> "Fields":
        """Fields for plain text stored under `name`."""
        return cls(name, frozenset({name}))


def documents_in(files: Sequence[SourceFile], fields: Fields) -> Iterator[Document]:
    """Every document of `files`, in order. Records without one, such as empty texts, are counted and logged at the end.

    Raises UserError: a file is missing, foreign or damaged (named, with its line or record), or a source has no document.
    """
    done, count = 0, 0
    left_out: Counter[str] = Counter()
    for number, file in enumerate(files):
        for document in read_documents(file, fields, left_out):
            count += 1
            yield document._replace(bytes_read=done + document.bytes_read)
        done += file.size
        if number + 1 == len(files) or files[number + 1].source != file.source:
            if count == 0:
                why = "".join(f" ({REASONS[reason]}: {some:,})" for reason, some in left_out.items())
                raise UserError(f"{FIELD}: {file.source} has no text in it{why}; give it some or take it out.")
            count = 0
    if left_out:
        said = "; ".join(f"{some:,}: {REASONS[reason]}" for reason, some in sorted(left_out.items()))
        _log.warning("%s: records without a document are left out: %s", FIELD, said)


def read_documents(file: SourceFile, fields: Fields, left_out: Counter[str] | None = None) -> Iterator[Document]:
    """The documents of one file in order. `left_out`: counts, by reason, the records that give none by the rules of their format.

    Raises UserError: the file is not what its name says, is damaged, lacks the field of the text, or has no fields where that is None.
    """
    place = 0

    def tell(position: int) -> None:
        nonlocal place
        place = min(position, file.size)

    for found in records(file.path, Wanted(fields.text, DEFAULTS, any_encoding=False), tell):
        origin = f"{file.path}, {found.unit} {found.number}" if found.unit else file.path
        problem = found if isinstance(found, Defect) else None
        if isinstance(found, Record):
            text = json.dumps(found.fields, default=_plain) if fields.text is None else _checked(found, fields.text, origin)
            reason = problem_of(text)
            if reason is None:
                name = f"{file.name}#{found.number}" if found.unit else file.name
                yield Document(text, origin, place, about(name, found.fields, fields.content))
                continue
            problem = Defect(found.number, found.unit, reason, detail={"format": "control characters"})
        assert problem is not None
        if problem.is_fault and not (fields.lenient and problem.number and problem.reason in BAD_RECORDS):
            raise _error(problem, origin if problem.number else file.path)
        if left_out is not None:
            left_out[problem.reason] += 1


def fields_of(content: bytes | str, origin: str) -> dict[str, Any]:
    """One JSON object. Raises UserError naming `origin` if it is none."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or an integer of thousands of digits
        raise UserError(f"{origin} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise UserError(f"{origin} is a JSON {type(record).__name__}, not an object.")
    return record


def _checked(record: Record, text_field: str, origin: str) -> str:
    """The text of a record if it is text that UTF-8 can encode."""
    if isinstance(record.text, bytes):
        return text_of(record.text, origin)
    assert record.text is not None, "a text is asked for"
    try:
        record.text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: the field {text_field} holds half a surrogate pair at character {error.start}.") from error
    return record.text


def _error(problem: Defect, origin: str) -> UserError:
    """Error for a defect: file and line, fault and fix."""
    said = SAID.get(problem.reason, "{rule} ({example})")
    rule = said.format(**{**DETAIL, **problem.detail, "rule": REASONS[problem.reason], "example": problem.example}).replace(" ()", "")
    joint = ": " if rule.startswith("the ") else " "
    return UserError(f"{origin}{joint}{rule}.")


def _plain(value: Any) -> Any:
    """JSON of a value that Parquet has and JSON has not."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
