"""Rules of FineWeb as released, in datatrove 0.10.1. Its filters differ from the papers in definitions and thresholds.

The word tokenizer is `scan.scan_pieces`, where datatrove has spaCy's; a test compares the verdicts with datatrove's on the same words.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from maxlm.corpus.document import Document, Removed, cut_text
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.lines import C4Filter
from maxlm.corpus.filters.protocol import Filter, removed, replace_text
from maxlm.corpus.filters.quality import (
    Broken,
    FineWebFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    first_broken,
    too_many_newlines,
    verdict,
)
from maxlm.corpus.filters.statistics import Hashes, TextStatistics, statistics_of

THRESHOLDS: dict[str, dict[str, object]] = scan.RELEASED["thresholds"]  # fields of settings, where the papers differ

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_ENDS = re.escape(scan.SENTENCE_ENDS)
_WIDE_ENDS = re.escape("".join(mark for mark in scan.SENTENCE_ENDS if ord(mark) > 0x7F and mark != "…"))
SENTENCE = re.compile(rf"\S.*?(?:[{_WIDE_ENDS}][^\w\s]*|[{_ENDS}][^\w\s]*(?=\s)|$)")  # of a line


class ReleasedGopherQuality(GopherQualityFilter):
    """Signs count as words, but for the number and length of words; bullets are "•" and "-"; stop words are compared with case."""

    def hashes(self, words: tuple[str, ...]) -> Hashes:
        """Hashes of stop words with case, sorted."""
        return np.unique(TextStatistics(" ".join(words)).pieces[0])

    def words(self, statistics: TextStatistics) -> Hashes:
        """Hashes of words and signs with case."""
        return statistics.pieces[0]

    def _counts(self, statistics: TextStatistics) -> Broken | None:
        settings, text = self.settings, statistics.text
        n, (words, characters, with_letter) = max(statistics.pieces[0].size, 1), statistics.pieces[3].tolist()
        mean, hash_signs, ellipses = characters / max(words, 1), text.count("#") / n, (text.count("...") + text.count("…")) / n
        broken = first_broken(
            (words < settings.min_words, "gopher_too_few_words", words, settings.min_words),
            (words > settings.max_words, "gopher_too_many_words", words, settings.max_words),
            (mean < settings.min_mean_word_length, "gopher_mean_word_length", mean, settings.min_mean_word_length),
            (mean > settings.max_mean_word_length, "gopher_mean_word_length", mean, settings.max_mean_word_length),
            (hash_signs > settings.max_hash_ratio, "gopher_hash_signs", hash_signs, settings.max_hash_ratio),
            (ellipses > settings.max_ellipsis_ratio, "gopher_ellipses", ellipses, settings.max_ellipsis_ratio),
        )
        least, alphabetic = settings.min_alphabetic_words, with_letter / n
        return broken or self._lines(statistics) or first_broken((alphabetic < least, "gopher_alphabetic_words", alphabetic, least))

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        lines = statistics.text.splitlines()
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        return self.broken_lines(bullets, sum(line.rstrip().endswith(("...", "…")) for line in lines), max(len(lines), 1))


class ReleasedGopherRepetition(GopherRepetitionFilter):
    """Paragraphs stand between empty lines, lines and words are compared with white space, case and signs; all characters are counted."""

    def __call__(self, document: Document) -> Document | Removed:
        if not document.text:
            return removed(document, self.name, "gopher_duplicate_lines", value=0, limit=0)
        return super().__call__(document)

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        settings, text = self.settings, statistics.text
        paragraphs = settings.max_duplicate_paragraphs, settings.max_duplicate_paragraph_characters
        lines = settings.max_duplicate_lines, settings.max_duplicate_line_characters
        for name, parts, (most, most_characters) in (
            ("paragraph", re.split(r"\n{2,}", text.strip()), paragraphs),
            ("line", re.split(r"\n+", text), lines),
        ):
            repeated, characters = _duplicates(parts)
            if repeated / len(parts) > most:
                return f"gopher_duplicate_{name}s", repeated / len(parts), most
            if characters / len(text) > most_characters:
                return f"gopher_duplicate_{name}_characters", characters / len(text), most_characters
        return None

    def shares(self, statistics: TextStatistics) -> Sequence[float]:
        """Fraction of all characters of the text, by the n-gram's length in words."""
        hashes_W, _, lengths_W, _ = statistics.pieces
        return scan.find_repetition(hashes_W, lengths_W, len(statistics.text)).tolist()


class ReleasedFineWeb(FineWebFilter):
    """Lines are compared with white space; a short line has `short_line` characters or fewer; newlines for each word are counted."""

    def __call__(self, document: Document) -> Document | Removed:
        settings, text = self.settings, document.text
        lines = [line for line in text.split("\n") if line.strip()]
        n, marks = max(len(lines), 1), scan.released_terminals()
        punctuated, short = sum(line[-1] in marks for line in lines) / n, sum(len(line) <= settings.short_line for line in lines) / n
        repeated, least = _duplicates(lines)[1] / max(len(text) - text.count("\n"), 1), settings.min_duplicate_line_characters
        newlines = text.count("\n") / max(statistics_of(text).pieces[0].size, 1)
        rules = (
            (punctuated < settings.max_unpunctuated or not lines, "fineweb_line_punctuation", punctuated, settings.max_unpunctuated),
            (short > settings.min_short_lines, "fineweb_short_lines", short, settings.min_short_lines),
            (repeated > least, "fineweb_duplicate_line_characters", repeated, least),
            too_many_newlines(newlines, settings),
        )
        return verdict(self.name, document, first_broken(*rules))


class ReleasedC4(C4Filter):
    """Only kept lines are searched for phrases and brackets; lines without text are removed; end marks are ASCII."""

    def __call__(self, document: Document) -> Document | Removed:
        settings, kept, n_sentences, gone = self.settings, list[str](), 0, list[str]()
        page_phrases = [(phrase.decode(), reason) for phrase, reason in self.page_phrases]
        line_phrases = [phrase.decode() for phrase in self.line_phrases]
        for original in document.text.splitlines():
            line, words = original.strip(), original.split()
            if settings.citations and "[" in line:
                line = CITATION.sub("", line)
            unpunctuated = settings.terminal_punctuation and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("..."))
            if unpunctuated or len(words) < settings.min_words_in_line or max(map(len, words), default=0) > settings.max_word_length:
                gone.append(original)
                continue
            lower = line.lower()
            for phrase, reason in page_phrases:
                if phrase in lower:
                    return removed(document, self.name, reason)
            if settings.curly_bracket and "{" in line and "javascript" not in lower:
                return removed(document, self.name, "c4_curly_bracket")
            if any(phrase in lower for phrase in line_phrases):
                gone.append(original)
                continue
            n_sentences += sum(1 for _ in SENTENCE.finditer(line)) if settings.min_sentences else 0
            kept.append(line)
        if n_sentences < settings.min_sentences:
            return removed(document, self.name, "c4_too_few_sentences", sentences=n_sentences, limit=settings.min_sentences)
        text = "\n".join(kept).strip()
        gone = [line for line in gone if line.strip()]
        if gone:
            example = "\n".join(line[:100] for line in gone[:5])
            return replace_text(cut_text(document, text, self.name, "lines", example), text, c4_lines_removed=len(gone))
        return document if text == document.text else replace_text(document, text)


def _duplicates(parts: list[str]) -> tuple[int, int]:
    """Parts that repeat an earlier one, and their characters."""
    unique = set(parts)
    return len(parts) - len(unique), sum(map(len, parts)) - sum(map(len, unique))


RELEASED: dict[str, Callable[..., Filter]] = {
    one.name: one for one in (ReleasedC4, ReleasedGopherQuality, ReleasedGopherRepetition, ReleasedFineWeb)
}
