"""Rules with lists given as files: bad words, domains, URLs."""

import numpy as np
from pydantic import Field

from maxlm.base.errors import UserError, as_user_error, shorten
from maxlm.base.paths import read_file
from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.protocol import removed
from maxlm.corpus.filters.scan import Hashes
from maxlm.corpus.filters.statistics import TextStatistics, statistics_of
from maxlm.corpus.urls import split_url

MOST_BYTES = 2**30  # of a list


def read_entries(path: str) -> list[str]:
    """Lines of a UTF-8 file without white space at their ends, empty ones and comments (#). Raises UserError."""
    try:
        text = read_file(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{shorten(path)}: is not UTF-8; convert the list.") from None
    except OSError as error:
        raise as_user_error(error) from None
    lines = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


class BadWordsSettings(Section):
    """Documents with listed words are removed."""

    files: tuple[str, ...] = Field(min_length=1)
    """UTF-8 files with a word or phrase in each line; # begins a comment."""
    max_matches: int = Field(0, ge=0)
    """Occurrences of listed words that a document may have. Unit: occurrences."""


class BadWordsFilter:
    """Documents with more listed words or phrases than allowed. Compared token by token, without case: "ass" is not found in "class".
    Between the tokens of a phrase may stand anything that is no letter or digit."""

    name = "bad_words"

    def __init__(self, settings: BadWordsSettings) -> None:
        self.settings = settings
        self.entries: dict[int, list[tuple[int, ...]]] = {}  # first token's hash -> hashes of each entry that begins with it
        for path in settings.files:
            for entry in read_entries(path):
                hashes = tuple(TextStatistics(entry).hashes_T.tolist())
                if not hashes:
                    raise UserError(f"{shorten(path)}: the entry {entry[:40]!r} has no letter or digit; remove it.")
                known = self.entries.setdefault(hashes[0], [])
                if hashes not in known:
                    known.append(hashes)
        self.table: Hashes = scan.table_of(np.array(list(self.entries), np.uint64))

    def __call__(self, document: Document) -> Document | Removed:
        statistics = statistics_of(document.text)
        matches = 0
        for position in scan.find_members(statistics.hashes_T, self.table).tolist():
            entries = self.entries[int(statistics.hashes_T[position])]
            matches += any(tuple(statistics.hashes_T[position : position + len(entry)].tolist()) == entry for entry in entries)
            if matches > self.settings.max_matches:
                return removed(document, self.name, "bad_words", limit=self.settings.max_matches)
        return document


class UrlSettings(Section):
    """Documents from a listed `url` (metadata) are removed."""

    domain_files: tuple[str, ...] = ()
    """UTF-8 files with a domain in each line; its subdomains are listed with it."""
    url_files: tuple[str, ...] = ()
    """UTF-8 files with a URL in each line; scheme, www., query and fragment do not count."""


class UrlFilter:
    """Remove documents from a listed URL, or from a listed domain or a subdomain (metadata `url`). Documents without a URL stay."""

    name = "urls"

    def __init__(self, settings: UrlSettings) -> None:
        self.domains = frozenset(split_url(entry)[0] for path in settings.domain_files for entry in read_entries(path)) - {""}
        self.urls = frozenset(split_url(entry) for path in settings.url_files for entry in read_entries(path))

    def __call__(self, document: Document) -> Document | Removed:
        url = document.metadata.get("url")
        if not isinstance(url, str) or not url:
            return document
        host, path = split_url(url)
        if (host, path) in self.urls:
            return removed(document, self.name, "url_listed", url=url[:300])
        domain = host
        while domain:
            if domain in self.domains:
                return removed(document, self.name, "url_domain", url=url[:300], domain=domain)
            domain = domain.partition(".")[2]
        return document
