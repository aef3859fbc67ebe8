"""Rules of FineWeb as released, in datatrove 0.10.1. Its filters differ from the papers in definitions and thresholds.

The word tokenizer is `scan.scan_pieces`, where datatrove has spaCy's; a test compares the verdicts with datatrove's on the same words.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from maxlm.corpus.document import Document, Removed, cut_text
from maxlm.corpus.filters import scan, thresholds
from maxlm.corpus.filters.lines import C4Filter
from maxlm.corpus.filters.protocol import Filter, removed, replace_text
from maxlm.corpus.filters.quality import Broken, FineWebFilter, GopherQualityFilter, GopherRepetitionFilter, verdict
from maxlm.corpus.filters.statistics import Hashes, TextStatistics, statistics_of

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_ENDS = re.escape(thresholds.SENTENCE_ENDS)
_WIDE_ENDS = re.escape("".join(mark for mark in thresholds.SENTENCE_ENDS if ord(mark) > 0x7F and mark != "…"))
SENTENCE = re.compile(rf"\S.*?(?:[{_WIDE_ENDS}][^\w\s]*|[{_ENDS}][^\w\s]*(?=\s)|$)")  # of a line


class ReleasedGopherQuality(GopherQualityFilter):
    """Signs count as words, but for the number and length of words; bullets are "•" and "-"; stop words are compared with case."""

    def hashes(self, words: tuple[str, ...]) -> Hashes:
        return np.unique(TextStatistics(" ".join(words)).pieces[0])

    def words(self, statistics: TextStatistics) -> Hashes:
        return statistics.pieces[0]

    def _counts(self, statistics: TextStatistics) -> Broken | None:
        settings, text = self.settings, statistics.text
        n, (words, characters, with_letter) = max(statistics.pieces[0].size, 1), statistics.pieces[3].tolist()
        if words < settings.min_words:
            return "gopher_too_few_words", words, settings.min_words
        if words > settings.max_words:
            return "gopher_too_many_words", words, settings.max_words
        mean = characters / max(words, 1)
        if mean < settings.min_mean_word_length:
            return "gopher_mean_word_length", mean, settings.min_mean_word_length
        if mean > settings.max_mean_word_length:
            return "gopher_mean_word_length", mean, settings.max_mean_word_length
        if text.count("#") / n > settings.max_hash_ratio:
            return "gopher_hash_signs", text.count("#") / n, settings.max_hash_ratio
        ellipses = (text.count("...") + text.count("…")) / n
        if ellipses > settings.max_ellipsis_ratio:
            return "gopher_ellipses", ellipses, settings.max_ellipsis_ratio
        return self._lines(statistics) or (
            ("gopher_alphabetic_words", with_letter / n, settings.min_alphabetic_words)
            if with_letter / n < settings.min_alphabetic_words
            else None
        )

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        settings, lines = self.settings, statistics.text.splitlines()
        n = max(len(lines), 1)
        bullets = sum(line.lstrip().startswith(thresholds.RELEASED_BULLETS) for line in lines) / n
        if bullets > settings.max_bullet_lines:
            return "gopher_bullet_lines", bullets, settings.max_bullet_lines
        ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / n
        if ellipses > settings.max_ellipsis_lines:
            return "gopher_ellipsis_lines", ellipses, settings.max_ellipsis_lines
        return None


class ReleasedGopherRepetition(GopherRepetitionFilter):
    """Paragraphs stand between empty lines, lines and words are compared with white space, case and signs; all characters are counted."""

    def __call__(self, document: Document) -> Document | Removed:
        if not document.text:
            return removed(document, self.name, "gopher_duplicate_lines", value=0, limit=0)
        return super().__call__(document)

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        settings, text = self.settings, statistics.text
        for name, parts, most, most_characters in (
            (
                "paragraph",
                re.split(r"\n{2,}", text.strip()),
                settings.max_duplicate_paragraphs,
                settings.max_duplicate_paragraph_characters,
            ),
            ("line", re.split(r"\n+", text), settings.max_duplicate_lines, settings.max_duplicate_line_characters),
        ):
            repeated, characters = _duplicates(parts)
            if repeated / len(parts) > most:
                return f"gopher_duplicate_{name}s", repeated / len(parts), most
            if characters / len(text) > most_characters:
                return f"gopher_duplicate_{name}_characters", characters / len(text), most_characters
        return None

    def shares(self, statistics: TextStatistics) -> Sequence[float]:
        hashes_W, _, lengths_W, _ = statistics.pieces
        return scan.find_repetition(hashes_W, lengths_W, len(statistics.text)).tolist()


class ReleasedFineWeb(FineWebFilter):
    """Lines are compared with white space; a short line has `short_line` characters or fewer; newlines for each word are counted."""

    def __call__(self, document: Document) -> Document | Removed:
        settings, text = self.settings, document.text
        lines = [line for line in text.split("\n") if line.strip()]
        n, marks = max(len(lines), 1), scan.released_terminals()
        punctuated = sum(line[-1] in marks for line in lines) / n
        if punctuated < settings.max_unpunctuated or not lines:
            return verdict(self.name, document, ("fineweb_line_punctuation", punctuated, settings.max_unpunctuated))
        short = sum(len(line) <= settings.short_line for line in lines) / n
        if short > settings.min_short_lines:
            return verdict(self.name, document, ("fineweb_short_lines", short, settings.min_short_lines))
        repeated = _duplicates(lines)[1] / (len(text) - text.count("\n"))
        if repeated > settings.min_duplicate_line_characters:
            return verdict(self.name, document, ("fineweb_duplicate_line_characters", repeated, settings.min_duplicate_line_characters))
        newlines = text.count("\n") / max(statistics_of(text).pieces[0].size, 1)
        if settings.max_newlines_per_word is not None and newlines > settings.max_newlines_per_word:
            return verdict(self.name, document, ("fineweb_newlines", newlines, settings.max_newlines_per_word))
        return document


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
            unpunctuated = settings.terminal_punctuation and (not line.endswith(thresholds.RELEASED_LINE_ENDS) or line.endswith("..."))
            if unpunctuated or len(words) < settings.min_words_in_line or max(map(len, words), default=0) > settings.max_word_length:
                gone.append(original)
                continue
            lower = line.lower()
            for phrase, reason in page_phrases:
                if phrase in lower:
                    return removed(document, self.name, reason)
            if settings.curly_bracket and thresholds.C4_CURLY_BRACKET in line and "javascript" not in lower:
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
    "c4": ReleasedC4,
    "gopher_quality": ReleasedGopherQuality,
    "gopher_repetition": ReleasedGopherRepetition,
    "fineweb": ReleasedFineWeb,
}
