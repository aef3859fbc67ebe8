"""Format of a file: by the suffix of its name, and by its first bytes where the suffix leaves it open."""

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import orjson

from maxlm.config.choices import part, parts
from maxlm.config.part import ReaderFacts
from maxlm.documents.html import is_html
from maxlm.documents.wikipedia import is_dump

UNKNOWN = "unknown"  # format of a file that no reader reads
HEAD = 4096  # bytes read to recognise a format
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")
PARQUET = b"PAR1"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"  # first line of a pointer (Git LFS, "The Pointer")
# First bytes of formats that hold text, if at all, in a way that nothing here reads: the file is named with its format, not called text.
FOREIGN = {
    b"PK\x03\x04": "zip",
    b"%PDF-": "pdf",
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"\x7fELF": "elf",
    b"SQLite format 3\0": "sqlite",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
    b"ARROW1\0": "arrow",
    b"ORC\n": "orc",
    b"Obj\x01": "avro",
}
_JSON = re.compile(rb'\s*(?:\[\s*)?\{\s*"')  # an object, or a list of objects


def suffixes_of(path: str) -> list[str]:
    """Suffixes of a file's name in lower case, such as [".jsonl", ".gz"]. The query of an http URL is no part of the name."""
    name = urlsplit(path).path if path.startswith(("http://", "https://")) else path
    return [suffix.lower() for suffix in PurePosixPath(name).suffixes]


def suffix_of(path: str) -> str:
    """The suffix that states a file's format: the last one before suffixes of compression; "" if there is none."""
    suffixes = suffixes_of(path)
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def facts_of(format: str) -> ReaderFacts:
    """Facts about the reader of a format."""
    found: ReaderFacts = part("reader", format).facts if format != UNKNOWN else ReaderFacts()
    return found


def format_by_name(path: str) -> str:
    """The format that the name of a file states; text where it has no suffix, as far as its content states no other format."""
    suffix = suffix_of(path)
    return next((one.name for one in parts("reader") if suffix in one.facts.suffixes), UNKNOWN) if suffix else "text"


def format_of(path: str, head: bytes) -> str:
    """The format of a file named `path` that begins with `head` when it is decompressed.

    First bytes that belong to one format alone decide (Parquet, ArrayRecord, WARC, a dump of MediaWiki), then the suffix. A name without a
    suffix, with one that is not known, or with .txt, .xml or .json leaves it to the content: pages and JSON.
    """
    for one in parts("reader"):
        if one.facts.magic and head.startswith(one.facts.magic):
            return one.name
    if is_dump(head):
        return "wikipedia"
    suffix, stated = suffix_of(path), format_by_name(path)
    if stated == "json":
        return "jsonl" if _begins_with_an_object(head) else "json"
    if suffix in ("", ".txt", ".xml") or stated == UNKNOWN:
        if is_html(head):
            return "html"
        if _JSON.match(head):
            return "jsonl" if _begins_with_an_object(head) else "json"
    return UNKNOWN if stated == "wikipedia" else stated


def foreign_format(head: bytes) -> str | None:
    """Name of a format that nothing here reads, by its first bytes."""
    return next((name for magic, name in FOREIGN.items() if head.startswith(magic)), "tar" if head[257:262] == b"ustar" else None)


def _begins_with_an_object(head: bytes) -> bool:
    """True if the first line is a JSON object, or begins as one longer than `head`; or if it is damaged and the second line is one."""
    line, _, rest = head.lstrip().partition(b"\n")
    if line[:1] == b"[":
        return False
    if not rest and len(head) == HEAD:
        return line[:1] == b"{" and line[1:].lstrip()[:1] == b'"'
    if _is_object(line) or _is_object(line.rstrip().removesuffix(b",")):
        return True
    second, _, more = rest.lstrip().partition(b"\n")
    if line.rstrip()[-1:] in b"[{:":  # of an object over several lines
        return False
    return _is_object(second) or (not more and len(head) == HEAD and second[:1] == b"{" and second[1:].lstrip()[:1] == b'"')


def _is_object(line: bytes) -> bool:
    try:
        return type(orjson.loads(line)) is dict
    except ValueError:
        return False
