"""Quality rules on whole documents: length, Gopher and FineWeb."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

import numpy as np

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.language_tags import primary_language
from maxlm.corpus.filters.protocol import removed
from maxlm.corpus.filters.settings import FineWebSettings, GopherQualitySettings, GopherRepetitionSettings, LengthSettings
from maxlm.corpus.filters.statistics import Hashes, TextStatistics, statistics_of, word_hashes

Broken = tuple[str, float, float]  # reason, value, limit
UNSPACED_LANGUAGES = ("ja", "zh")  # languages with stop words of one character and no spaces


@lru_cache(1)
def shipped_stop_words() -> dict[str, tuple[str, ...]]:
    """Stop words by language, from stop_words.txt."""
    lines = files(__package__).joinpath("stop_words.txt").read_text("utf-8").splitlines()
    return {words[0]: tuple(words[1:]) for words in map(str.split, lines) if words[0] != "#"}


class LengthFilter:
    """Documents that are too short or too long."""

    name = "length"

    def __init__(self, settings: LengthSettings) -> None:
        self.settings = settings

    def __call__(self, document: Document) -> Document | Removed:
        settings, characters = self.settings, len(document.text)
        broken: Broken | None = None
        if characters < settings.min_characters:
            broken = "length_too_few_characters", characters, settings.min_characters
        elif settings.max_characters is not None and characters > settings.max_characters:
            broken = "length_too_many_characters", characters, settings.max_characters
        elif settings.min_words or settings.max_words is not None:
            words = statistics_of(document.text).n_words
            if words < settings.min_words:
                broken = "length_too_few_words", words, settings.min_words
            elif settings.max_words is not None and words > settings.max_words:
                broken = "length_too_many_words", words, settings.max_words
        return verdict(self.name, document, broken)


class GopherQualityFilter:
    """Gopher's quality rules (Rae et al. 2021, arXiv 2112.11446, A.1.1).

    The paper's words stand between spaces. In scripts without spaces each character counts as a word, and texts mostly in such scripts are
    not judged by the mean length of words.
    """

    name = "gopher_quality"

    def __init__(self, settings: GopherQualitySettings) -> None:
        self.settings = settings
        self.stop_words = {language: self.hashes(words) for language, words in settings.stop_words.items()}
        shipped = {language: self.hashes(words) for language, words in shipped_stop_words().items()}
        self.primary_stop_words = shipped | {primary_language(language): hashes for language, hashes in self.stop_words.items()}
        self.all_stop_words = np.unique(np.concatenate([np.empty(0, np.uint64), *self.stop_words.values()]))

    def __call__(self, document: Document) -> Document | Removed:
        statistics = statistics_of(document.text)
        broken = self._counts(statistics) or self._lines(statistics) or self._stop_words(statistics, document.metadata.get("language"))
        return verdict(self.name, document, broken)

    def _counts(self, statistics: TextStatistics) -> Broken | None:
        settings = self.settings
        words, characters, with_letter, hash_signs, ellipses, spaced = statistics.counts
        if words < settings.min_words:
            return "gopher_too_few_words", words, settings.min_words
        if words > settings.max_words:
            return "gopher_too_many_words", words, settings.max_words
        n = max(words, 1)
        if 0 < words <= 2 * spaced and not settings.min_mean_word_length <= characters / spaced <= settings.max_mean_word_length:
            low = characters / spaced < settings.min_mean_word_length
            return "gopher_mean_word_length", characters / spaced, settings.min_mean_word_length if low else settings.max_mean_word_length
        if hash_signs / n > settings.max_hash_ratio:
            return "gopher_hash_signs", hash_signs / n, settings.max_hash_ratio
        if ellipses / n > settings.max_ellipsis_ratio:
            return "gopher_ellipses", ellipses / n, settings.max_ellipsis_ratio
        if words and with_letter / n < settings.min_alphabetic_words:
            return "gopher_alphabetic_words", with_letter / n, settings.min_alphabetic_words
        return None

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        flags, settings = statistics.flags, self.settings
        n = max(flags.size, 1)
        bullets = int(np.count_nonzero(flags & scan.BEGINS_WITH_BULLET)) / n
        if bullets > settings.max_bullet_lines:
            return "gopher_bullet_lines", bullets, settings.max_bullet_lines
        ellipses = int(np.count_nonzero(flags & scan.ENDS_WITH_ELLIPSIS)) / n
        if ellipses > settings.max_ellipsis_lines:
            return "gopher_ellipsis_lines", ellipses, settings.max_ellipsis_lines
        return None

    def _stop_words(self, statistics: TextStatistics, language: object) -> Broken | None:
        wanted = self.all_stop_words if language is None else self._of_language(str(language))
        if wanted is None or not self.settings.min_stop_words:
            return None
        unspaced = language is not None and primary_language(str(language)) in UNSPACED_LANGUAGES
        found = scan.count_present(statistics.hashes_T if unspaced else self.words(statistics), wanted, self.settings.min_stop_words)
        return ("gopher_stop_words", found, self.settings.min_stop_words) if found < self.settings.min_stop_words else None

    def hashes(self, words: tuple[str, ...]) -> Hashes:
        """Hashes of stop words, sorted."""
        return word_hashes(words)

    def words(self, statistics: TextStatistics) -> Hashes:
        """Hashes of the words that stop words are compared with."""
        return statistics.hashes_W

    def _of_language(self, tag: str) -> Hashes | None:
        """Stop words of a document's language: of the very tag, or else of its language without region and script."""
        exact = self.stop_words.get(tag)
        return exact if exact is not None else self.primary_stop_words.get(primary_language(tag))


class GopherRepetitionFilter:
    """Gopher's repetition rules (Rae et al. 2021, arXiv 2112.11446, table A1).

    A duplicate is an occurrence after the first one. N-grams are of words between spaces (in scripts without spaces:
    phrases), without case and without punctuation at their ends.
    """

    name = "gopher_repetition"

    def __init__(self, settings: GopherRepetitionSettings) -> None:
        self.settings = settings
        self.ngrams = [(n, f"gopher_top_{n}_gram", limit) for n, limit in sorted(settings.max_top_ngram.items())]
        self.ngrams += [(n, f"gopher_duplicate_{n}_gram", limit) for n, limit in sorted(settings.max_duplicate_ngram.items())]

    def __call__(self, document: Document) -> Document | Removed:
        statistics = statistics_of(document.text)
        return verdict(self.name, document, self._lines(statistics) or self._ngrams(statistics))

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        settings = self.settings
        lines, characters, repeated, repeated_characters, paragraphs, repeated_paragraphs, paragraph_characters = statistics.duplicates
        for reason, part, whole, limit in (
            ("gopher_duplicate_paragraphs", repeated_paragraphs, paragraphs, settings.max_duplicate_paragraphs),
            ("gopher_duplicate_paragraph_characters", paragraph_characters, characters, settings.max_duplicate_paragraph_characters),
            ("gopher_duplicate_lines", repeated, lines, settings.max_duplicate_lines),
            ("gopher_duplicate_line_characters", repeated_characters, characters, settings.max_duplicate_line_characters),
        ):
            if part > limit * whole:
                return reason, part / whole, limit
        return None

    def _ngrams(self, statistics: TextStatistics) -> Broken | None:
        shares = self.shares(statistics)
        for n, reason, limit in self.ngrams:
            if shares[n] > limit:
                return reason, shares[n], limit
        return None

    def shares(self, statistics: TextStatistics) -> Sequence[float]:
        """Fraction of characters, by the n-gram's length in words."""
        return statistics.repetition


class FineWebFilter:
    """FineWeb's rules (Penedo et al. 2024, arXiv 2406.17557, section 3.6), on lines with text."""

    name = "fineweb"

    def __init__(self, settings: FineWebSettings) -> None:
        self.settings = settings

    def __call__(self, document: Document) -> Document | Removed:
        settings, statistics = self.settings, statistics_of(document.text)
        flags, lines = statistics.flags, statistics.lines
        n = max(flags.size, 1)
        broken: Broken | None = None
        punctuated = int(np.count_nonzero(flags & scan.ENDS_WITH_MARK)) / n
        lengths = lines[:, scan.END] - lines[:, scan.START]
        short = int(np.count_nonzero((lengths > 0) & (lengths < settings.short_line))) / n
        repeated = statistics.duplicates[scan.REPEATED_LINE_CHARACTERS] / max(statistics.duplicates[scan.LINE_CHARACTERS], 1)
        if punctuated <= settings.max_unpunctuated:
            broken = "fineweb_line_punctuation", punctuated, settings.max_unpunctuated
        elif short >= settings.min_short_lines:
            broken = "fineweb_short_lines", short, settings.min_short_lines
        elif repeated >= settings.min_duplicate_line_characters:
            broken = "fineweb_duplicate_line_characters", repeated, settings.min_duplicate_line_characters
        elif settings.max_newlines_per_word is not None:
            newlines = document.text.count("\n") / max(statistics.n_words, 1)
            if newlines > settings.max_newlines_per_word:
                broken = "fineweb_newlines", newlines, settings.max_newlines_per_word
        return verdict(self.name, document, broken)


def verdict(stage: str, document: Document, broken: Broken | None) -> Document | Removed:
    """The document, or its removal with the rule that it breaks."""
    if broken is None:
        return document
    reason, value, limit = broken
    return removed(document, stage, reason, value=round(value, 4), limit=limit)
