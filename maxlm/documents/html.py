"""HTML to text with resiliparse: 30 MB/s a core for main content, where trafilatura takes 2 to 3 MB/s for nearly the same text."""

import re
from html import unescape
from typing import Any

from maxlm.documents.records import EXAMPLE, Found, Record, defect
from maxlm.documents.text import decode, normalise, optional

TITLE = 1000  # characters
PRESCAN = 4096  # bytes in which a page states its encoding; the standard asks for 1024
DEEPEST = 2000  # open elements; browsers stop at 512, and resiliparse takes quadratic time: 2 s for 10,000

_CHARSET = re.compile(
    rb"(?:<meta[^>]{0,200}?charset|\A\s*<\?xml[^>]{0,200}?encoding)\s{0,9}=\s{0,9}[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE
)
_LANGUAGE = re.compile(r"<html[^>]{0,400}?\slang\s*=\s*[\"']?([A-Za-z0-9-]{2,35})", re.IGNORECASE)
# Elements that have no content, or that the next one of their kind closes.
_FLAT = re.compile("area|base|br|col|colgroup|d[dt]|embed|hr|img|input|li|link|meta|option|p|param|source|t[dhr]|tbody|thead|track|wbr")
# A tag with its attributes, since text in quotes may look like tags; possessive, so that quotes left open cost no second look.
_TAG = re.compile(
    r"<(/?)([a-z][a-z0-9-]{0,30})"
    r"(?:[^<>=/\"']|=\s{0,9}+\"[^\"]{0,2000}+\"|=\s{0,9}+'[^']{0,2000}+'|=(?!\s{0,9}+[\"'])|/(?!>))*+(/?)",
    re.IGNORECASE,
)
# Elements inside which a drawing goes on; any other tag may end it (HTML Living Standard, 13.2.6.5).
_SVG = re.compile(
    "a|circle|clippath|defs|ellipse|filter|g|image|line|lineargradient|marker|mask|path|pattern|polygon|polyline|radialgradient|rect|stop|"
    "svg|symbol|text|textpath|tspan|use"
)
_TAGS = re.compile(r"<(script|style)\b[^>]{0,1000}>.*?</\1\s{0,9}>?|<[^<>]{0,2000}>", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{1,2000})</title", re.IGNORECASE)


def is_html(head: bytes) -> bool:
    """True if `head` begins as a page does."""
    start = head[:1024].lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or (start.startswith(b"<?xml") and b"<html" in start)


def of_html(number: int, unit: str, data: bytes, metadata: dict[str, Any], declared: str | None = None) -> Found:
    """The record of the main content of a page in any encoding. Adds title, language and encoding to `metadata`."""
    decoded = decode(data, declared, *(stated[1].decode() for stated in _CHARSET.finditer(data[:PRESCAN])))
    if decoded is None:
        return defect(number, unit, "encoding", data[:EXAMPLE].decode("latin-1"))
    if decoded.encoding != "utf-8":
        metadata["encoding"] = decoded.encoding
    page = decoded.text
    if _depth(page) > DEEPEST:
        return defect(number, unit, "malformed", page[:EXAMPLE], depth=_depth(page))
    if language := _LANGUAGE.search(page[:PRESCAN]):
        metadata.setdefault("language", language[1].lower())
    if title := _TITLE.search(page[: 16 * PRESCAN]):
        metadata["title"] = normalise(" ".join(unescape(title[1]).split()))[:TITLE]
    extract = optional("resiliparse.extract.html2text", "the text of a page of HTML").extract_plain_text
    try:
        text = extract(page, main_content=True, preserve_formatting=True, list_bullets=True, alt_texts=False)
    except Exception as error:  # whatever the parser stumbles over costs one page
        return defect(number, unit, "malformed", page[:EXAMPLE], error=str(error)[:EXAMPLE])
    if not text or text.isspace():
        shown = " ".join(_TAGS.sub(" ", page[max(0, page.find("<body")) :][: 64 * EXAMPLE]).split())  # menus included
        return defect(number, unit, "no_main_content" if shown else "empty", shown)
    return Record(number, unit, str(text), metadata)


def _depth(page: str) -> int:
    """Most elements open at once; an upper bound of them, by the number of tags in each piece of the page, where that is low enough.

    Elements of a drawing that are closed where they are opened count as such inside <svg> alone: HTML ignores the slash.
    """
    opened = bound = 0
    for start in range(0, len(page), PRESCAN):
        tags, closing = page.count("<", start, start + PRESCAN), page.count("</", start, start + PRESCAN)
        bound = max(bound, opened + tags - closing)
        opened += tags - 2 * closing
    if bound <= DEEPEST:
        return bound
    opened = deepest = 0
    drawing = False
    for tag in _TAG.finditer(page):
        name = tag[2].lower()
        if _FLAT.fullmatch(name):
            continue
        drawing = not tag[1] if name == "svg" else drawing and _SVG.fullmatch(name) is not None
        if not (drawing and tag[3]):
            opened = max(0, opened + (-1 if tag[1] else 1))
            deepest = max(deepest, opened)
    return deepest
