"""WARC and WET (ISO 28500): pages and texts of a crawl.

The framing is read here. FastWARC 2.0 needs streams that can seek and panics on others, and warcio unpacks the compression itself, so that
neither can be given the limits of `stream`; neither reports what it skips between two records.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any

from maxlm.documents.html import is_html, of_html
from maxlm.documents.records import EXAMPLE, MIB, DamagedError, Found, ReadSettings, Record, defect
from maxlm.documents.stream import ByteStream

UNIT = "record"
LONGEST_LINE = 65536  # bytes of a header line
MOST_HEADERS = MIB  # bytes of all headers of a record
TYPES = ("response", "resource", "conversion", "revisit")  # records of documents; warcinfo, request and metadata are about them
HTML = ("text/html", "application/xhtml+xml")
TEXT = ("text/plain",)
END_OF_HEADERS = re.compile(rb"\r?\n\r?\n")  # bare line feeds, too (RFC 9112, 2.2)
LANGUAGE = "warc-identified-content-language"
Headers = dict[str, str]


def read_warc(stream: ByteStream, limits: ReadSettings) -> Iterator[Found]:
    """The record of each document, of TYPES; records are counted from 1. What lies between two records is one Defect."""
    number = 0
    while line := stream.line(LONGEST_LINE):
        if not line.strip():
            continue
        if not line.startswith(b"WARC/"):
            number += 1
            yield defect(number, UNIT, "malformed", line.decode("latin-1"), skipped_bytes=len(line) + _to_next_record(stream))
            continue
        headers = _headers(stream)
        if headers.get("warc-type", "").lower() not in TYPES and _length(headers) is not None:
            _take(stream, headers, 0)
            continue
        number += 1
        length = _length(headers)
        if length is None:
            yield defect(number, UNIT, "malformed", str(headers)[:EXAMPLE], skipped_bytes=_to_next_record(stream))
            continue
        body = _take(stream, headers, limits.max_record_bytes)
        if body is None:
            yield defect(number, UNIT, "too_large", headers.get("warc-target-uri", ""), limit=limits.max_record_bytes)
        elif stream.peek(4)[:4] not in (b"\r\n\r\n", b"\n\nWA", b"\n\n", b""):
            _, begin, rest = body.partition(b"\nWARC/1.")
            stream.push_back(begin[1:] + rest)  # a length that is wrong: what the body swallowed is read again
            yield defect(number, UNIT, "malformed", headers.get("warc-target-uri", ""), content_length=length)
        else:
            yield _document(number, headers, body, limits)


def _to_next_record(stream: ByteStream) -> int:
    """Skip to the next line that starts a record; the number of bytes skipped."""
    skipped = 0
    while stream.peek(1) and stream.peek(7) not in (b"WARC/1.", b"WARC/0."):
        skipped += len(stream.line(LONGEST_LINE))
    return skipped


def _headers(stream: ByteStream) -> Headers:
    """Header lines up to a blank one; names in lower case, lines that continue another one joined. The first of a name counts."""
    found: Headers = {}
    size, name = 0, ""
    while size < MOST_HEADERS:
        line = stream.line(LONGEST_LINE)
        size += len(line)
        if not line:
            raise DamagedError("truncated", "in the headers of a record")
        if not line.strip():
            return found
        name = _add_header(found, line, name)
    raise DamagedError("damaged", f"more than {MOST_HEADERS} bytes of headers")


def _add_header(found: Headers, line: bytes, previous: str) -> str:
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    if text[:1] in " \t" and previous:
        found[previous] = f"{found[previous]} {text.strip()}"
        return previous
    name, _, value = text.partition(":")
    name = name.strip().lower()
    found.setdefault(name, value.strip())
    return name


def _length(headers: Headers) -> int | None:
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def _take(stream: ByteStream, headers: Headers, limit: int) -> bytes | None:
    """The content of a record; None, with the content skipped, if it is longer than `limit`."""
    length = _length(headers) or 0
    body = stream.take(length) if length <= limit else None
    if (len(body) if body is not None else stream.skip(length)) < length:
        raise DamagedError("truncated", "in the content of a record")
    return body


def _document(number: int, headers: Headers, body: bytes, limits: ReadSettings) -> Found:
    metadata: dict[str, Any] = {}
    url = headers.get("warc-target-uri", "").strip("<>")
    for name, value in (("url", url), ("date", headers.get("warc-date", "")), ("truncated", headers.get("warc-truncated", ""))):
        if value:
            metadata[name] = value
    if language := headers.get(LANGUAGE):
        metadata["language"] = language.split(",")[0].strip()
    if headers["warc-type"].lower() == "revisit":
        return defect(number, UNIT, "no_content", url)
    kind = headers.get("content-type", "")
    if headers["warc-type"].lower() == "response" and (kind.startswith("application/http") or body.startswith(b"HTTP/")):
        head, body = (*END_OF_HEADERS.split(body, 1), b"")[:2]
        status, *lines = head.split(b"\n")
        if status.split()[1:2] != [b"200"]:
            return defect(number, UNIT, "http_status", url, status=status.decode("latin-1").strip()[:EXAMPLE])
        answer: Headers = {}
        name = ""
        for line in lines:
            name = _add_header(answer, line, name)
        content = _decoded_content(body, answer, limits.max_record_bytes)
        if isinstance(content, str):
            return defect(number, UNIT, content, url, encoding=answer.get("content-encoding", ""))
        body, kind = content, answer.get("content-type", "")
    return _by_type(number, kind, body, metadata, url)


def _by_type(number: int, kind: str, body: bytes, metadata: dict[str, Any], url: str) -> Found:
    media, _, rest = kind.lower().partition(";")
    media = media.strip()
    declared = rest.partition("charset=")[2].split(";")[0].strip(" \"'") or None
    if media in HTML or (not media and is_html(body)):
        return of_html(number, UNIT, body, metadata, declared)
    if media in TEXT:
        return Record(number, UNIT, body, metadata, declared)
    return defect(number, UNIT, "content_type", url, type=media[:EXAMPLE])


def _decoded_content(body: bytes, answer: Headers, limit: int) -> bytes | str:
    """`body` without chunks and compression; a reason where that fails. Crawls often store the content decoded and the headers as sent."""
    if "chunked" in answer.get("transfer-encoding", "").lower():
        body = _joined(body)
    encoding = answer.get("content-encoding", "").lower()
    packed = body.startswith(b"\x1f\x8b") if "gzip" in encoding else body[:1] == b"\x78" if encoding == "deflate" else False
    if encoding in ("br", "zstd") and not (is_html(body) or body.isascii()):
        return "malformed"
    if not packed:
        return body
    try:
        content = zlib.decompressobj(47).decompress(body, limit + 1)  # 47: gzip or zlib by its header
    except zlib.error:
        return "malformed"
    return content if len(content) <= limit else "too_large"


def _joined(body: bytes) -> bytes:
    """The content of chunks (RFC 9112, 7.1); `body` itself if it holds none."""
    pieces: list[bytes] = []
    at = 0
    while (end := body.find(b"\r\n", at, at + 64)) >= 0:
        try:
            size = int(body[at:end].split(b";")[0].strip(), 16)
        except ValueError:
            return body if not pieces else b"".join(pieces)
        if size <= 0:
            break
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces) if pieces else body
