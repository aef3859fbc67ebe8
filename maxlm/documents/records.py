"""Records of raw files as readers give them, why a record or a file gives none, and the limits on one file."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from maxlm.config.fields import Section

EXAMPLE = 300  # characters of an example
NESTED = ("metadata", "meta")  # fields that hold metadata of a document, as Dolma and RedPajama have them
MIB = 2**20

# Of one record, or of a file or the rest of it (number 0).
REASONS = {
    "ambiguous_field": "more than one column has the name of a field; a table counts with all its rows",
    "bomb": "decompresses to more than the limits allow; the rest of the file is left out",
    "binary": "is no text: control characters, or a foreign format by its first bytes",
    "content_type": "a WARC record that is neither HTML nor plain text",
    "damaged": "breaks the rules of its format; the rest of the file is left out",
    "empty": "has no text in it, or the file has no bytes",
    "encoding": "is not UTF-8, and no other encoding fits",
    "foreign_value": "a column holds a value that cannot be read here, such as a date after year 9999; the rest of the file is left out",
    "http_status": "a WARC record of an answer other than 200",
    "malformed": "one record breaks the rules of its format; the next one is read",
    "missing_field": "has no text field; a table without it counts with all its rows",
    "no_content": "a WARC record that stands for the content of another one (revisit)",
    "no_main_content": "a page of menus, links and hidden elements only",
    "not_a_file": "a folder, a pipe or a device",
    "no_fields": "holds text without fields, and fields are asked for",
    "not_article": "a page of a wiki outside the namespace of its articles",
    "not_json": "a line that is not JSON",
    "not_object": "JSON, but not an object",
    "not_text": "the text field holds something else than text",
    "null_text": "the text field is null",
    "redirect": "a page of a wiki that only points to another one",
    "too_large": "longer than max_record_bytes",
    "too_much_memory": "its compression needs a window larger than this reader allows",
    "trailing_garbage": "bytes after the end of the compressed data, which are left out",
    "truncated": "ends in the middle; whole records before the end were read",
    "unknown_format": "has a suffix that states no format, and its first bytes state none either",
    "unreadable": "could not be opened or read",
    "vanished": "is there no more",
}

Positive = Annotated[int, Field(ge=1)]


class ReadSettings(Section):
    """Limits on one file, in bytes, and the field of the text."""

    text_field: str = "text"
    """Field of JSON objects and column of Parquet tables that holds the text."""
    max_record_bytes: Positive = 16 * MIB
    """Longest record that is read; Common Crawl cuts pages at 1 MiB (5 MiB since 2025), MediaWiki at 2 MiB. Unit: bytes."""
    max_ratio: Positive = 250
    """Largest ratio of decompressed to compressed bytes, once a file has given `ratio_from_bytes`; text has 3 to 10, repetitive logs 100.
    Unit: factor.
    """
    ratio_from_bytes: Positive = 64 * MIB
    """Decompressed bytes from which on max_ratio is checked. Unit: bytes."""
    max_file_bytes: Positive = 2**40
    """Most decompressed bytes of one file. Unit: bytes."""


DEFAULTS = ReadSettings()


class DamagedError(Exception):
    """The rest of a file cannot be read. `reason`: a key of REASONS."""

    def __init__(self, reason: str, cause: object = "") -> None:
        super().__init__(f"{reason}: {cause}")
        self.reason = reason
        self.cause = " ".join(str(cause).split())[:EXAMPLE]


# Reasons that are no defect: records that hold no document by the rules of their format, and texts without a letter.
LEFT_OUT = frozenset(("content_type", "empty", "http_status", "no_content", "no_main_content", "not_article", "redirect"))


class Wanted(NamedTuple):
    """Request to a reader. `text_field`: field of the text; None for whole records, such as conversations. `any_encoding`: decode JSON
    that is not UTF-8, where the encoding has to be detected.
    """

    text_field: str | None = "text"
    limits: ReadSettings = DEFAULTS
    any_encoding: bool = True


class Record(NamedTuple):
    """One record: its text as stored, and all of its fields, the text included.

    `number`: from 1, in units of `unit`: "line", "row", "record" or "page", "" for a file that is one record. `text`: bytes are not
    decoded yet, and None where whole records are asked for. `encoding`: declared for a text in bytes, or found of JSON that is not UTF-8.
    `place`: bytes of a table read so far, of its size as stored; None where the position in the file tells.
    """

    number: int
    unit: str
    text: str | bytes | None
    fields: Mapping[str, Any]
    encoding: str | None = None
    place: int | None = None


class Defect(NamedTuple):
    """A record that gives no document, or with number 0 a file or the rest of it. `reason`: a key of REASONS; `example`: text for a person,
    at most EXAMPLE printable characters; `detail`: figures or names behind the reason; `place`: as of a Record.
    """

    number: int
    unit: str
    reason: str
    example: str = ""
    detail: Mapping[str, str | int] = {}
    place: int | None = None

    @property
    def is_fault(self) -> bool:
        """False for what holds no document by the rules of its format. A file of no bytes holds none only in the formats of text."""
        return self.reason not in LEFT_OUT or "bytes" in self.detail


Found = Record | Defect


def defect(number: int, unit: str, reason: str, example: str = "", **detail: str | int) -> Defect:
    """A Defect with control characters and lone surrogates of `example` escaped."""
    shown = "".join(char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in example[:EXAMPLE])
    return Defect(number, unit, reason, shown[:EXAMPLE], detail)


def record_of(number: int, unit: str, fields: Mapping[str, Any], wanted: Wanted, encoding: str | None = None) -> Found:
    """The record of a JSON object or of a row of a table: its text is looked up and must be text or bytes."""
    name = wanted.text_field
    if name is None:
        return Record(number, unit, None, fields, encoding)
    text = fields.get(name)
    if type(text) is str or type(text) is bytes:
        if len(text) > wanted.limits.max_record_bytes:
            return defect(number, unit, "too_large", limit=wanted.limits.max_record_bytes)
        return Record(number, unit, text, fields, encoding)
    if name not in fields:
        return defect(number, unit, "missing_field", ", ".join(fields), field=name)
    if text is None:
        return defect(number, unit, "null_text", field=name)
    return defect(number, unit, "not_text", repr(text)[:EXAMPLE], field=name, type=type(text).__name__)
