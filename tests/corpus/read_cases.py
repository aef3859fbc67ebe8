"""Files that tests of `read` make: archives, dumps and lines, and what was found in them."""

import bz2
import gzip
import json
import lzma
from collections import Counter
from pathlib import Path

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.files import read
from maxlm.documents.records import REASONS, ReadSettings
from maxlm.documents.stream import zstd

SMALL = ReadSettings(max_record_bytes=10_000, ratio_from_bytes=100_000, max_ratio=100)
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
HTML = "<html lang=en><head><title>A &amp; B</title><script>var x</script></head><body><p>Grüße aus Köln, it is late.</p></body></html>"


def found(path: Path | str, settings: ReadSettings = SMALL) -> tuple[list[Document], list[Removed]]:
    """Documents and removed records of a file. Checks what holds for any input."""
    documents, removed = [], []
    for item in read(str(path), settings):
        (documents if isinstance(item, Document) else removed).append(item)
        assert item.id == str(path) or item.id.startswith(f"{path}#")
        if isinstance(item, Removed):
            assert item.stage == "read" and item.reason in REASONS and len(item.example) <= 300 and item.example.isprintable()
        else:
            assert item.text.strip() and "\0" not in item.text and item.text.encode()
    ids = [item.id for item in (*documents, *removed)]
    assert len(ids) == len(set(ids))
    return documents, removed


def outcome(path: Path | str, settings: ReadSettings = SMALL) -> tuple[int, dict[str, int]]:
    """Number of documents, and of removed records by reason."""
    documents, removed = found(path, settings)
    return len(documents), dict(Counter(item.reason for item in removed))


def lines(count: int, text: str = "Line {} of a text.") -> bytes:
    return b"".join(json.dumps({"text": text.format(number), "n": number}).encode() + b"\n" for number in range(count))


def warc(kind: str, url: str, body: bytes, content: str = "application/http; msgtype=response", length: int | None = None) -> bytes:
    headers = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-01-02T03:04:05Z\r\nContent-Type: {content}\r\n"
    return f"{headers}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body + b"\r\n\r\n"


def answer(body: bytes, kind: str = "text/html", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode() + body


def page(title: str, text: str, ns: int = 0, redirect: str = "") -> str:
    link = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>7</id>{link}<revision><id>9</id><timestamp>2024-01-01T00:00:00Z</timestamp>"
        f"<text>{text}</text></revision></page>\n"
    )


def dump(*pages: str) -> bytes:
    head = '<mediawiki xml:lang="fr"><siteinfo><dbname>frwiki</dbname><base>https://fr.wikipedia.org/wiki/Accueil</base><namespaces>'
    names = '<namespace key="6" case="first-letter">Fichier</namespace><namespace key="14" case="first-letter">Catégorie</namespace>'
    return f"{head}{names}</namespaces></siteinfo>\n{''.join(pages)}</mediawiki>".encode()
