"""Rows of the table of tools/corpus_quality.py, and the real text that its measures use."""

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from real_packages import fetch, members


class Row(NamedTuple):
    """Count of one kind of case. `planted`: cases that should be found; `found`: of these, found; `false`: found and not planted.

    `other`: cases that should not be found, of which `false` were (0: not counted apart). `asked`: least precision and recall; None where
    nothing is asked.
    """

    kind: str
    planted: int
    found: int
    false: int
    other: int = 0
    asked: float | None = None
    note: str = ""

    @property
    def recall(self) -> float:
        return self.found / self.planted if self.planted else 1.0

    @property
    def precision(self) -> float:
        return self.found / (self.found + self.false) if self.found + self.false else 1.0

    @property
    def good(self) -> bool:
        return self.asked is None or min(self.recall, self.precision) >= self.asked


def table(name: str, rows: Sequence[Row]) -> str:
    """Rows in Markdown."""
    lines = [f"| {name} | planted | found | false | precision | recall | asked | |", "|---|---:|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        false = f"{row.false:,} of {row.other:,}" if row.other else f"{row.false:,}"
        asked = "" if row.asked is None else f"{'**NO** ' if not row.good else ''}{row.asked:.0%}"
        cells = [row.kind, f"{row.planted:,}", f"{row.found:,}", false, f"{row.precision:.1%}", f"{row.recall:.1%}", asked, row.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def package_files(folder: Path, names: Sequence[str], path: str) -> Iterator[tuple[str, str, bytes]]:
    """Package, path and content, unpacked, of the files of Debian packages with a path that the expression `path` matches whole.

    Packages are downloaded into `folder` once. Raises OSError if the archive does not serve one.
    """
    wanted = re.compile(path)
    fetched = fetch("debian", names, folder / "debian")
    if fetched.missing:
        raise OSError(f"{', '.join(fetched.missing)}: not downloaded; run apt-get update first ({next(iter(fetched.missing.values()))}).")
    for package in fetched.packages:
        for name, content in members(package):
            if wanted.fullmatch(name):
                yield package.name, name, gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


MARKUP = re.compile(r"\{\{[^{}]*\}\}|<[^>]*>|\[\[[^\]]*\]\]|\[?https?://\S+|'{2,3}|\$\d+|[\[\]{}*#=|]")
WIDE = "\u2e80"  # Chinese, Japanese and Korean characters begin here: a third as many make a text


class Messages:
    """Messages of MediaWiki's programs in 500 languages and scripts, without markup; each of 40 characters or more (Chinese: 14)."""

    def __init__(self, folder: Path) -> None:
        self.by_locale: dict[str, list[str]] = {}
        for _, path, content in package_files(folder, ["mediawiki"], r".*/languages/i18n/[a-z-]+\.json"):
            plain = [" ".join(MARKUP.sub(" ", one).split()) for one in json.loads(content).values() if isinstance(one, str)]
            self.by_locale[Path(path).stem] = [one for one in plain if one and len(one) >= (14 if max(one) > WIDE else 40)]

    def text(self, locale: str, size: int, draw: random.Random) -> str:
        """Messages drawn until they have `size` characters, one a line."""
        messages, lines = self.by_locale[locale], list[str]()
        least = size // 3 if max(messages[0]) > WIDE else size
        while sum(map(len, lines)) < least:
            lines.append(draw.choice(messages))
        return "\n".join(lines)
