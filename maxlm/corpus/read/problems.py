"""Reasons why `read` sets a record or a file aside, and the limits on what one file may ask for."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from maxlm.corpus.document import Removed

STAGE = "read"
EXAMPLE = 300  # characters of an example
MIB = 2**20

# Of one record (id "FILE#NUMBER"), or of a file or the rest of it (id "FILE").
REASONS = {
    "bomb": "decompresses to more than the limits allow; the rest of the file is left out",
    "binary": "is no text: control characters, or a foreign format by its first bytes",
    "content_type": "a WARC record that is neither HTML nor plain text",
    "damaged": "breaks the rules of its format; the rest of the file is left out",
    "empty": "has no text in it, or the file has no bytes",
    "encoding": "is not UTF-8, and no other encoding fits",
    "http_status": "a WARC record of an answer other than 200",
    "malformed": "one record breaks the rules of its format; the next one is read",
    "missing_field": "has no text field",
    "no_content": "a WARC record that stands for the content of another one (revisit)",
    "no_main_content": "a page of menus, links and hidden elements only",
    "not_a_file": "a folder, a pipe or a device",
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
    "unreadable": "could not be opened or read",
    "vanished": "is there no more",
}

Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ReadSettings:
    """Settings of `read`. Sizes are in bytes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    text_field: str = "text"  # of JSON objects and Parquet columns
    max_record_bytes: Positive = 16 * MIB  # Common Crawl cuts pages at 1 MiB (5 MiB since 2025), MediaWiki at 2 MiB
    max_ratio: Positive = 250  # decompressed / compressed, once a file has given `ratio_from_bytes`; text: 3 to 10, repetitive logs 100
    ratio_from_bytes: Positive = 64 * MIB
    max_file_bytes: Positive = 2**40  # decompressed


DEFAULTS = ReadSettings()


class DamagedError(Exception):
    """The rest of a file cannot be read. `reason`: a key of REASONS."""

    def __init__(self, reason: str, cause: object = "") -> None:
        super().__init__(f"{reason}: {cause}")
        self.reason = reason
        self.cause = " ".join(str(cause).split())[:EXAMPLE]


def removed(id: str, reason: str, example: str = "", **detail: str | int) -> Removed:
    """A Removed of this stage, with control characters and lone surrogates of `example` escaped."""
    shown = "".join(char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in example[:EXAMPLE])
    return Removed(id, STAGE, reason, shown[:EXAMPLE], dict(detail))
