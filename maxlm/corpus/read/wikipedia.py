"""Dumps of MediaWiki (pages-articles XML): page by page, so that a page that is broken costs no other one."""

import re
from collections.abc import Iterator
from xml.parsers import expat
from xml.sax.saxutils import unescape

from maxlm.corpus.document import Document, Removed, Value
from maxlm.corpus.read.fields import of_text
from maxlm.corpus.read.problems import EXAMPLE, MIB, DamagedError, ReadSettings, removed
from maxlm.corpus.read.stream import ByteStream
from maxlm.corpus.read.text import decode
from maxlm.corpus.read.wikitext import plain_text

HEAD = MIB  # bytes before the first page
_CONTROLS = bytes(set(range(32)) - {9, 10, 13})
_SITE = {name: re.compile(f"<{name}>([^<]{{1,500}})</{name}>") for name in ("dbname", "base")}
_LANGUAGE = re.compile(r"<mediawiki[^>]{0,2000}?xml:lang=\"([A-Za-z0-9-]{1,35})\"")
_NAMESPACE = re.compile(r"<namespace key=\"(?:6|14)\"[^>]{0,200}>([^<]{1,200})</namespace>")


def is_dump(head: bytes) -> bool:
    """True if `head` begins as a dump does, with or without an XML declaration."""
    return re.match(rb"\s*(?:<\?xml[^>]{0,200}>\s*)?<mediawiki[\s>]", head) is not None


def read_wikipedia(path: str, stream: ByteStream, settings: ReadSettings) -> Iterator[Document | Removed]:
    """The document of every article, counted from 1 with all pages: title, a blank line, text. Redirects and other namespaces are Removed.

    Text inside a dump holds no `<`, so that pages can be told apart before they are parsed.
    """
    head, found = stream.until(b"<page>", HEAD)
    site, namespaces = _site(head.decode("utf-8", "replace"))
    number = 0
    while found:
        number += 1
        id = f"{path}#{number}"
        page, whole = stream.until(b"</page>", settings.max_record_bytes)
        if not whole and len(page) < settings.max_record_bytes:
            raise DamagedError("truncated", "in a page")
        if whole:
            yield _page(id, b"<page>" + page, site, namespaces)
        else:
            yield removed(id, "too_large", page[:EXAMPLE].decode("utf-8", "replace"), limit=settings.max_record_bytes)
            while not whole:
                page, whole = stream.until(b"</page>", settings.max_record_bytes)
                if not page:
                    raise DamagedError("truncated", "in a page")
        between, found = stream.until(b"<page>", HEAD)
        if not found and b"</mediawiki>" not in between:
            raise DamagedError("truncated" if len(between) < HEAD else "damaged", "between two pages")
    if number == 0:
        raise DamagedError("truncated" if b"</mediawiki>" not in head else "empty", "no page")


def _site(head: str) -> tuple[dict[str, Value], list[str]]:
    """Metadata that a dump has of its wiki, and the wiki's names for files and categories."""
    known: dict[str, Value] = {}
    for name, key in (("dbname", "source"), ("base", "url")):
        if match := _SITE[name].search(head):
            known[key] = unescape(match[1])
    if match := _LANGUAGE.search(head):
        known["language"] = match[1]
    return known, [unescape(name) for name in _NAMESPACE.findall(head)]


def _page(id: str, page: bytes, site: dict[str, Value], namespaces: list[str]) -> Document | Removed:
    try:
        fields = _parsed(page)
    except expat.ExpatError as error:
        return removed(id, "malformed", page[:EXAMPLE].decode("utf-8", "replace"), error=str(error))
    title, text = fields.get("title", ""), fields.get("text", "")
    if fields.get("ns", "0").strip() != "0":
        return removed(id, "not_article", title)
    if "redirect" in fields:
        return removed(id, "redirect", title)
    metadata = dict(site)
    metadata["title"] = title
    if isinstance(base := site.get("url"), str) and title:
        metadata["url"] = base[: base.rfind("/") + 1] + title.replace(" ", "_")
    for name, key in (("timestamp", "date"), ("id", "page_id")):
        if value := fields.get(name, "").strip():
            metadata[key] = value
    body = plain_text(text, namespaces)
    return of_text(id, f"{title}\n\n{body}" if body else "", metadata)


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
