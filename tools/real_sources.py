"""Sources of raw text from packages: a file goes to a source by its path; each source is a folder of WARC, JSONL or plain files."""

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from real_packages import Package

PART_BYTES = 64 * 2**20  # of raw text in one packed file
MAN = re.compile(r"usr/share/man/(?:([a-z]{2,3}(?:_[A-Z]{2})?)(?:\.[^/@]+)?(?:@[a-z]+)?/)?man\d[a-z]*/[^/]+\.\d[^/]*")
CHANGES = re.compile(r"(?:^|/)(?:changelog|changes|news|history|releases?)(?:[._-][^/]*)?$", re.IGNORECASE)
DICTIONARY = re.compile(r"usr/share/dictd/[^/]+\.dict(?:\.dz)?")
FORTUNES = re.compile(r"usr/share/games/fortunes/(?!.*\boff\b).*(?<!\.dat)(?<!\.u8)$")
HTML = re.compile(r"\.x?html?$", re.IGNORECASE)
TEXT = re.compile(
    r"\.(?:txt|text|md|markdown|rst|pod|adoc|asciidoc|asc|info(?:-\d+)?)$|(?:^|/)(?:README|FAQ|INSTALL|HACKING|TODO|COPYING|LICEN[CS]E|THANKS)"
    r"(?:[._-][^/]*)?$|(?:^|/)copyright$",
    re.IGNORECASE,
)
DOC_FOLDERS = re.compile(r"(?:^|/)(?:docs?|documentation|man)(?:/|$)", re.IGNORECASE)
LANGUAGES = (
    re.compile(r"usr/share/libreoffice/help/([A-Za-z]{2,3}(?:-[A-Za-z]{2})?)/"),
    re.compile(r"\.([a-z]{2}(?:[-_][A-Za-z]{2})?)\.(?:html|txt)$"),
    re.compile(r"/(?:help|html|manual|Documentation)/([a-z]{2}(?:[-_][A-Z]{2})?)/"),
    re.compile(r"usr/share/doc/debian-handbook/html/([a-z]{2,3}(?:-[A-Z]{2,4})?)/"),
    re.compile(r"usr/share/doc/[a-z-]+(?:-doc|faq|reference|guide|html)-([a-z]{2}(?:-[a-z]{2})?)/"),
)


def language(path: str) -> str | None:
    """The language that a path states, as its ISO 639 code."""
    for pattern in (MAN, *LANGUAGES):
        if (found := pattern.search(path)) and found[1]:
            return re.split("[-_]", found[1])[0].lower()
    return "en" if MAN.fullmatch(path) else None


class Part:
    """A file of a source that takes records up to PART_BYTES."""

    def __init__(self, folder: Path, ending: str) -> None:
        self.folder, self.ending, self.number, self.size = folder, ending, 0, 0
        self.file: BinaryIO | None = None

    def room(self, size: int) -> BinaryIO:
        if self.file is not None and self.size + size > PART_BYTES:
            self.close()
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / f"{self.number:04}{self.ending}").open("wb")
            if self.ending.endswith(".zst"):
                self.file = zstd.ZstdFile(self.file, "w", level=3)  # type: ignore[assignment]
            self.number, self.size = self.number + 1, 0
        self.size += size
        assert self.file is not None
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class Sources:
    """Writes files of packages to the folders of their sources. `counts`: (source, package) -> files and bytes of raw text."""

    def __init__(self, folder: Path, mandoc: Path) -> None:
        self.folder, self.mandoc = folder, mandoc
        self.parts: dict[str, Part] = {}
        self.files: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[str] = Counter()

    def add(self, package: Package, path: str, content: bytes, group: dict[str, str], licence: str | None) -> None:
        """Take one file, or leave it out if it is no text."""
        plain = path[:-3] if path.endswith(".gz") else path
        if not content:
            return
        if MAN.fullmatch(path):
            self._manual_page(package, path, content, licence)
        elif DICTIONARY.fullmatch(path):
            self._plain("dictionaries", package, path.removesuffix(".dz") + (".gz" if path.endswith(".dz") else ""), content)
        elif FORTUNES.fullmatch(path):
            self._plain(group["text"], package, path, content)
        elif CHANGES.search(re.sub(r"\.(?:txt|md|rst)$", "", plain)):
            self._plain("changelogs", package, path, content)
        elif HTML.search(plain):
            self._page(group["html"], package, path, _unpacked(path, content))
        elif TEXT.search(plain):
            self._text(group["text"], package, path, _unpacked(path, content), licence)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()

    def _part(self, source: str, ending: str) -> Part:
        key = source + ending
        if key not in self.parts:
            self.parts[key] = Part(self.folder / source, ending)
        return self.parts[key]

    def _count(self, source: str, package: Package, size: int) -> None:
        self.files[source, package.url] += 1
        self.bytes[source, package.url] += size

    def _plain(self, source: str, package: Package, path: str, content: bytes) -> None:
        target = self.folder / source / f"{package.kind}-{package.name.replace('/', '_')}" / path.strip("/").replace("/", "__")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        self._count(source, package, len(_unpacked(path, content)))

    def _page(self, source: str, package: Package, path: str, content: bytes) -> None:
        name = f"{package.url}/{path}"
        record = (
            f"WARC/1.0\r\nWARC-Type: resource\r\nWARC-Target-URI: {name}\r\nWARC-Date: 2000-01-01T00:00:00Z\r\n"
            f"WARC-Record-ID: <urn:sha256:{hashlib.sha256(name.encode()).hexdigest()}>\r\nContent-Type: text/html\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode("utf-8", "replace")
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=4, mtime=0) as member:
            member.write(record + content + b"\r\n\r\n")
        self._part(source, ".warc.gz").room(len(content)).write(packed.getvalue())
        self._count(source, package, len(content))

    def _text(self, source: str, package: Package, path: str, content: bytes, licence: str | None) -> None:
        try:
            text = content.decode()
        except UnicodeDecodeError:  # of another encoding: as it is, for the reader to tell
            self._plain(source, package, path, content)
            return
        record: dict[str, Any] = {"text": text, "url": f"{package.url}/{path}", "package": package.name}
        if (found := language(path)) is not None:
            record["path_language"] = found
        if licence is not None:
            record["license"] = licence
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._part(source, ".jsonl.zst").room(len(content)).write(line)
        self._count(source, package, len(content))

    def _manual_page(self, package: Package, path: str, content: bytes, licence: str | None) -> None:
        """A manual page as mandoc shows it on a terminal, bold and underlined words overstruck."""
        roff = _unpacked(path, content)
        if roff.startswith(b".so "):  # another name of a page
            return
        command = [str(self.mandoc), "-T", "utf8", "-O", "width=100"]
        done = subprocess.run(command, input=roff, capture_output=True, timeout=120)
        if not done.stdout.strip():
            self.failed["mandoc"] += 1
            return
        self._text("manpages", package, path, done.stdout, licence)


def _unpacked(path: str, content: bytes) -> bytes:
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError):
        print(f"{path}: is no whole gzip file", flush=True)
        return content
