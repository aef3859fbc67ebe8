"""Rules that remove lines: C4, and boilerplate."""

import re
from itertools import compress

import numpy as np
from pydantic import Field

from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed, cut_text
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.lists import read_entries
from maxlm.corpus.filters.protocol import Fraction, removed, replace_text
from maxlm.corpus.filters.statistics import TextStatistics, statistics_of

CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed)\]")
# RefinedWeb, line-wise corrections (Penedo et al. 2023, arXiv 2306.01116, section 3.2 and appendix G.2).
COUNTERS = ("like", "share", "comment", "retweet", "repost", "quote", "bookmark", "upvote", "downvote", "download", "view", "follower")
SHORT_WORDS = 10  # a line of at most so many words is removed where it matches one of the three lists below
LINE_STARTS = ("sign-in", "sign in", "log in", "subscribe to", "skip to content", "share this", "click here")
LINE_ENDS = ("read more...", "read more", "read more…", "sign up", "all rights reserved.", "all rights reserved")
LINE_PARTS = ("items in cart", "add to cart", "back to top")
MAX_UPPERCASE = 0.5  # "mainly composed of uppercase characters": fraction of letters
COUNTER = re.compile(rf"[\d.,]{{1,12}}\s?[kKmM]?\s{{0,3}}(?:{'|'.join(COUNTERS)})s?")
NUMERICAL_SIGNS = ".,:;%€$£+/()#-"
NUMERICAL = re.compile(rf"[\d\s{re.escape(NUMERICAL_SIGNS)}]+")


class Phrases:
    """Strings of bytes that are looked for together: three times as fast as one after the other."""

    def __init__(self, phrases: list[bytes]) -> None:
        self.short = [phrase for phrase in phrases if len(phrase) < 2]
        longer = [phrase for phrase in phrases if len(phrase) > 1]
        self.lengths = np.array([len(phrase) for phrase in longer], np.int64)
        self.rows = np.zeros((len(longer), max(map(len, longer), default=2)), np.uint8)
        for row, phrase in zip(self.rows, longer, strict=True):
            row[: len(phrase)] = np.frombuffer(phrase, np.uint8)

    def any_in(self, data: bytes) -> bool:
        """True if one of them is in `data`."""
        return scan.has_any(np.frombuffer(data, np.uint8), self.rows, self.lengths) or any(phrase in data for phrase in self.short)


class C4Settings(Section):
    """C4's rules for lines and pages (arXiv 1910.10683, section 2.2). Bad words are a filter of their own."""

    terminal_punctuation: bool = True
    """Remove lines that do not end with a terminal mark; FineWeb leaves this rule out."""
    min_words_in_line: int = Field(5, ge=0)
    """Remove lines with fewer words. Unit: words."""
    max_word_length: int = Field(1000, ge=1)
    """Remove lines that hold a longer word. Unit: characters."""
    line_phrases: tuple[str, ...] = Field(
        ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
    )
    """Remove lines that contain one of these phrases, in any case of ASCII letters."""
    page_phrases: tuple[str, ...] = ("lorem ipsum",)
    """Remove documents that contain one of these phrases, in any case of ASCII letters."""
    curly_bracket: bool = True
    """Remove documents that contain a curly bracket."""
    citations: bool = True
    """Remove Wikipedia's citation marks, such as [3] and [citation needed]."""
    min_sentences: int = Field(3, ge=0)
    """Remove documents of which fewer sentences are left. Unit: sentences."""


class C4Filter:
    """C4's rules for lines and pages (Raffel et al. 2020, arXiv 1910.10683, section 2.2).

    A sentence ends with a mark before white space; the paper used a trained splitter. Metadata `c4_lines_removed`: lines.
    """

    name = "c4"

    def __init__(self, settings: C4Settings) -> None:
        self.settings = settings
        self.line_phrases = [phrase.encode().lower() for phrase in settings.line_phrases]
        reasons = {"lorem ipsum": "c4_lorem_ipsum"}
        self.page_phrases = [(phrase.encode().lower(), reasons.get(phrase, "c4_page_phrase")) for phrase in settings.page_phrases]
        self.phrases = Phrases([*self.line_phrases, *(phrase for phrase, _ in self.page_phrases)])

    def __call__(self, document: Document) -> Document | Removed:
        settings, statistics = self.settings, statistics_of(document.text)
        lower = statistics.lower_bytes
        has_phrase = self.phrases.any_in(lower)
        for phrase, reason in self.page_phrases if has_phrase else ():
            if phrase in lower:
                return removed(document, self.name, reason)
        if settings.curly_bracket and "{" in document.text:
            return removed(document, self.name, "c4_curly_bracket")
        kept_L = self._kept(statistics, has_phrase)
        sentences = int(statistics.lines[kept_L, scan.SENTENCES].sum())
        if sentences < settings.min_sentences:
            return removed(document, self.name, "c4_too_few_sentences", sentences=sentences, limit=settings.min_sentences)
        n_removed = int(np.count_nonzero(~kept_L & (statistics.lines[:, scan.END] > 0)))
        text = document.text if n_removed == 0 else keep_lines(statistics, kept_L)
        if settings.citations and "[" in text:
            text = CITATION.sub("", text)
        if n_removed:
            gone = beginning(statistics, ~kept_L)
            return replace_text(cut_text(document, text, self.name, "lines", gone), text, c4_lines_removed=n_removed)
        return document if text == document.text else replace_text(document, text)

    def _kept(self, statistics: TextStatistics, has_phrase: bool) -> np.ndarray:
        """Choose the lines that stay. Lines without text do: they separate paragraphs."""
        settings, lines = self.settings, statistics.lines
        kept_L = (lines[:, scan.WORDS] >= settings.min_words_in_line) & (lines[:, scan.LONGEST] <= settings.max_word_length)
        if settings.terminal_punctuation:
            kept_L &= lines[:, scan.FLAGS] & (scan.ENDS_WITH_MARK | scan.ENDS_WITH_ELLIPSIS) == scan.ENDS_WITH_MARK
        if has_phrase:
            for number, line in enumerate(statistics.lower_bytes.split(b"\n")):
                kept_L[number] &= not any(phrase in line for phrase in self.line_phrases)
        kept_L |= lines[:, scan.END] == 0
        return kept_L


class BoilerplateSettings(Section):
    """Lines that are not part of the text are removed (RefinedWeb, arXiv 2306.01116, G.2)."""

    files: tuple[str, ...] = ()
    """UTF-8 files of lines that are removed wherever they are a whole line, in any case."""
    patterns: bool = True
    """Remove lines that RefinedWeb's patterns describe: counters, menus, lines mostly in upper case."""
    max_removed_words: Fraction = 0.05
    """Remove the document where removed lines hold a larger share of its words. Unit: share."""


class BoilerplateFilter:
    """Lines that are not part of the text: listed ones, and RefinedWeb's patterns (Penedo et al. 2023, arXiv 2306.01116, G.2).

    Metadata `boilerplate_lines_removed`: lines.
    """

    name = "boilerplate"

    def __init__(self, settings: BoilerplateSettings) -> None:
        self.settings = settings
        self.listed = frozenset(" ".join(entry.lower().split()) for path in settings.files for entry in read_entries(path))
        phrases = (*LINE_STARTS, *LINE_ENDS, *LINE_PARTS)
        self.phrases = np.zeros((len(phrases) if settings.patterns else 0, 1 + max(map(len, phrases))), np.uint32)
        for row, phrase in zip(self.phrases, phrases, strict=False):
            row[: len(phrase)] = TextStatistics(phrase).codes
        self.signs = TextStatistics(NUMERICAL_SIGNS).codes
        listed = [TextStatistics(entry).codes for entry in sorted(self.listed)]
        hashes = [scan.hash_without_space(codes, 0, len(codes), *scan.tables()) for codes in listed]
        self.table = scan.table_of(np.array(hashes, np.uint64)) if hashes else np.zeros(0, np.uint64)

    def __call__(self, document: Document) -> Document | Removed:
        statistics = statistics_of(document.text)
        kept_L = self._kept(statistics)
        if kept_L.all():
            return document
        share = float(statistics.lines[~kept_L, scan.WORDS].sum()) / max(statistics.n_words, 1)
        if share > self.settings.max_removed_words:
            limit = self.settings.max_removed_words
            return removed(document, self.name, "boilerplate_share", value=round(share, 4), limit=limit)
        text, gone = keep_lines(statistics, kept_L), beginning(statistics, ~kept_L)
        left = cut_text(document, text, self.name, "lines", gone)
        return replace_text(left, text, boilerplate_lines_removed=int(np.count_nonzero(~kept_L)))

    def _kept(self, statistics: TextStatistics) -> np.ndarray:
        lines = statistics.lines
        kept_L = np.ones(len(lines), bool)
        if self.settings.patterns:
            kept_L = lines[:, scan.UPPERCASE] <= MAX_UPPERCASE * lines[:, scan.LETTERS]
            kept_L &= lines[:, scan.WORDS] != 1
        short = SHORT_WORDS
        found_L = scan.find_candidates(statistics.codes, lines, *scan.tables(), self.phrases, self.signs, short, self.table)
        kept_L &= found_L != scan.SURE
        for number, start, end in zip(*_columns(lines, (found_L == scan.MAYBE) & kept_L), strict=True):
            line = " ".join(statistics.text[start:end].lower().split())
            kept_L[number] = not (line in self.listed or (self.settings.patterns and is_pattern(line)))
        return kept_L


def is_pattern(line: str) -> bool:
    """A lower-case line that RefinedWeb's patterns describe: a single word, numbers, a counter, an entry of a menu."""
    words = TextStatistics(line).n_words
    if words == 1 or NUMERICAL.fullmatch(line) or COUNTER.fullmatch(line):
        return True
    return words <= SHORT_WORDS and (line.startswith(LINE_STARTS) or line.endswith(LINE_ENDS) or any(part in line for part in LINE_PARTS))


def keep_lines(statistics: TextStatistics, kept_L: np.ndarray) -> str:
    """The lines that stay, without more than one empty line between two and without any at the ends."""
    text = "\n".join(compress(statistics.text.split("\n"), kept_L.tolist()))
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip("\n")


def beginning(statistics: TextStatistics, chosen_L: np.ndarray) -> str:
    """The first few lines with text among those chosen, for a person to read."""
    _, starts, ends = _columns(statistics.lines, chosen_L & (statistics.lines[:, scan.END] > 0))
    return "\n".join(statistics.text[start : min(end, start + 100)] for start, end in zip(starts[:5], ends[:5], strict=True))


def _columns(lines: np.ndarray, chosen_L: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    numbers = np.flatnonzero(chosen_L)
    return numbers.tolist(), lines[numbers, scan.START].tolist(), lines[numbers, scan.END].tolist()
