"""Dumps of MediaWiki (pages-articles XML): page by page, so that a page that is broken costs no other one."""

import re
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import unescape

from maxlm.documents.records import EXAMPLE, MIB, DamagedError, Found, ReadSettings, Record, defect
from maxlm.documents.stream import ByteStream
from maxlm.documents.text import decode
from maxlm.documents.wikitext import plain_text

UNIT = "page"
HEAD = MIB  # bytes before the first page
_CONTROLS = bytes(set(range(32)) - {9, 10, 13})
_SITE = {name: re.compile(f"<{name}>([^<]{{1,500}})</{name}>") for name in ("dbname", "base")}
_LANGUAGE = re.compile(r"<mediawiki[^>]{0,2000}?xml:lang=\"([A-Za-z0-9-]{1,35})\"")
_NAMESPACE = re.compile(r"<namespace key=\"(?:6|14)\"[^>]{0,200}>([^<]{1,200})</namespace>")


def is_dump(head: bytes) -> bool:
    """True if `head` begins as a dump does, with or without an XML declaration."""
    return re.match(rb"\s*(?:<\?xml[^>]{0,200}>\s*)?<mediawiki[\s>]", head) is not None


def read_wikipedia(stream: ByteStream, limits: ReadSettings) -> Iterator[Found]:
    """The record of every article, counted from 1 with all pages: title, a blank line, text. Redirects and other namespaces are Defects.

    Text inside a dump holds no `<`, so that pages can be told apart before they are parsed.
    """
    head, found = stream.until(b"<page>", HEAD)
    site, namespaces = _site(head.decode("utf-8", "replace"))
    number = 0
    while found:
        number += 1
        page, whole = stream.until(b"</page>", limits.max_record_bytes)
        if not whole and len(page) < limits.max_record_bytes:
            raise DamagedError("truncated", "in a page")
        if whole:
            yield _page(number, b"<page>" + page, site, namespaces)
        else:
            yield defect(number, UNIT, "too_large", page[:EXAMPLE].decode("utf-8", "replace"), limit=limits.max_record_bytes)
            while not whole:
                page, whole = stream.until(b"</page>", limits.max_record_bytes)
                if not page:
                    raise DamagedError("truncated", "in a page")
        between, found = stream.until(b"<page>", HEAD)
        if not found and b"</mediawiki>" not in between:
            raise DamagedError("truncated" if len(between) < HEAD else "damaged", "between two pages")
    if number == 0:
        raise DamagedError("truncated" if b"</mediawiki>" not in head else "empty", "no page")


def _site(head: str) -> tuple[dict[str, Any], list[str]]:
    """Metadata that a dump has of its wiki, and the wiki's names for files and categories."""
    known: dict[str, Any] = {}
    for name, key in (("dbname", "source"), ("base", "url")):
        if match := _SITE[name].search(head):
            known[key] = unescape(match[1])
    if match := _LANGUAGE.search(head):
        known["language"] = match[1]
    return known, [unescape(name) for name in _NAMESPACE.findall(head)]


def _page(number: int, page: bytes, site: dict[str, Any], namespaces: list[str]) -> Found:
    try:
        fields = _parsed(page)
    except expat.ExpatError as error:
        return defect(number, UNIT, "malformed", page[:EXAMPLE].decode("utf-8", "replace"), error=str(error))
    title, text = fields.get("title", ""), fields.get("text", "")
    if fields.get("ns", "0").strip() != "0":
        return defect(number, UNIT, "not_article", title)
    if "redirect" in fields:
        return defect(number, UNIT, "redirect", title)
    metadata = dict(site)
    metadata["title"] = title
    if isinstance(base := site.get("url"), str) and title:
        metadata["url"] = base[: base.rfind("/") + 1] + title.replace(" ", "_")
    for name, key in (("timestamp", "date"), ("id", "page_id")):
        if value := fields.get(name, "").strip():
            metadata[key] = value
    body = plain_text(text, namespaces)
    return Record(number, UNIT, f"{title}\n\n{body}" if body else "", metadata)


def _parsed(page: bytes) -> dict[str, str]:
    """Text of each element of a page by name. The first one counts, as id is of the page before it is of a revision; of text the last."""
    decoded = decode(page)
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    found: dict[str, str] = {}
    pieces: list[str] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        pieces.clear()
        if name == "redirect":
            found["redirect"] = attributes.get("title", "")

    def end(name: str) -> None:
        if name in ("text", "timestamp"):
            found[name] = "".join(pieces)
        else:
            found.setdefault(name, "".join(pieces))
        pieces.clear()

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = pieces.append
    parser.Parse((decoded.text.encode() if decoded else page).translate(None, _CONTROLS), True)
    return found
