"""Quality rules on whole documents: length, Gopher and FineWeb."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

import numpy as np
from pydantic import Field, model_validator

from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.language_tags import primary_language
from maxlm.corpus.filters.protocol import Fraction, removed
from maxlm.corpus.filters.statistics import Hashes, TextStatistics, statistics_of, word_hashes

Broken = tuple[str, float, float]  # reason, value, limit
Rule = tuple[bool, str, float, float]  # True where it is broken, and then why
UNSPACED_LANGUAGES = ("ja", "zh")  # languages with stop words of one character and no spaces


@lru_cache(1)
def shipped_stop_words() -> dict[str, tuple[str, ...]]:
    """Stop words by language, from stop_words.txt."""
    lines = files(__package__).joinpath("stop_words.txt").read_text("utf-8").splitlines()
    return {words[0]: tuple(words[1:]) for words in map(str.split, lines) if words[0] != "#"}


class LengthSettings(Section):
    """Bounds of a document's length."""

    min_characters: int = Field(1, ge=0)
    """Fewest characters of a document. Unit: characters."""
    max_characters: int | None = Field(None, ge=1)
    """Most characters of a document; null: no limit. Unit: characters."""
    min_words: int = Field(0, ge=0)
    """Fewest words of a document; in scripts without spaces a character counts as a word. Unit: words."""
    max_words: int | None = Field(None, ge=1)
    """Most words of a document; null: no limit. Unit: words."""

    @model_validator(mode="after")
    def _ordered(self) -> "LengthSettings":
        for least, most in ((self.min_characters, self.max_characters), (self.min_words, self.max_words)):
            if most is not None and most < least:
                raise ValueError(f"the most, {most}, is less than the least, {least}; raise it, or lower the least")
        return self


class LengthFilter:
    """Documents that are too short or too long."""

    name = "length"

    def __init__(self, settings: LengthSettings) -> None:
        self.settings = settings

    def __call__(self, document: Document) -> Document | Removed:
        settings = self.settings
        sizes = [("characters", len(document.text), settings.min_characters, settings.max_characters)]
        if settings.min_words or settings.max_words is not None:
            sizes.append(("words", statistics_of(document.text).n_words, settings.min_words, settings.max_words))
        for unit, size, least, most in sizes:
            if size < least:
                return verdict(self.name, document, (f"length_too_few_{unit}", size, least))
            if most is not None and size > most:
                return verdict(self.name, document, (f"length_too_many_{unit}", size, most))
        return document


class GopherQualitySettings(Section):
    """Gopher's quality rules (arXiv 2112.11446, A.1.1). A word stands between white space; in scripts without spaces, a character does."""

    min_words: int = Field(50, ge=0)
    """Fewest words of a document. Unit: words."""
    max_words: int = Field(100_000, ge=1)
    """Most words of a document. Unit: words."""
    min_mean_word_length: float = Field(3.0, ge=0)
    """Smallest mean length of a document's words. Unit: characters."""
    max_mean_word_length: float = Field(10.0, gt=0)
    """Largest mean length of a document's words. Unit: characters."""
    max_hash_ratio: float = Field(0.1, ge=0)
    """Most hash signs in relation to the number of words. Unit: hash signs a word."""
    max_ellipsis_ratio: float = Field(0.1, ge=0)
    """Most ellipses in relation to the number of words. Unit: ellipses a word."""
    max_bullet_lines: Fraction = 0.9
    """Largest share of lines that begin with a bullet. Unit: share."""
    max_ellipsis_lines: Fraction = 0.3
    """Largest share of lines that end with an ellipsis. Unit: share."""
    min_alphabetic_words: Fraction = 0.8
    """Smallest share of words that hold a letter. Unit: share."""
    min_stop_words: int = Field(2, ge=0)
    """Fewest different stop words in a document. Unit: words."""
    stop_words: dict[str, tuple[str, ...]] = Field({"en": ("the", "be", "to", "of", "and", "that", "have", "with")})
    """Stop words by language (ISO 639-1; en-us and eng in the metadata are en), in addition to the lists of stop_words.txt for 36 more
    languages. A document in a language without a list is not judged by this rule; one without a language is judged by all lists given here
    together.
    """


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
        n, mean, is_spaced = max(words, 1), characters / max(spaced, 1), 0 < words <= 2 * spaced
        alphabetic = with_letter / n
        return first_broken(
            (words < settings.min_words, "gopher_too_few_words", words, settings.min_words),
            (words > settings.max_words, "gopher_too_many_words", words, settings.max_words),
            (is_spaced and mean < settings.min_mean_word_length, "gopher_mean_word_length", mean, settings.min_mean_word_length),
            (is_spaced and mean > settings.max_mean_word_length, "gopher_mean_word_length", mean, settings.max_mean_word_length),
            (hash_signs / n > settings.max_hash_ratio, "gopher_hash_signs", hash_signs / n, settings.max_hash_ratio),
            (ellipses / n > settings.max_ellipsis_ratio, "gopher_ellipses", ellipses / n, settings.max_ellipsis_ratio),
            (
                words > 0 and alphabetic < settings.min_alphabetic_words,
                "gopher_alphabetic_words",
                alphabetic,
                settings.min_alphabetic_words,
            ),
        )

    def _lines(self, statistics: TextStatistics) -> Broken | None:
        flags = statistics.flags
        bullets, ellipses = (int(np.count_nonzero(flags & flag)) for flag in (scan.BEGINS_WITH_BULLET, scan.ENDS_WITH_ELLIPSIS))
        return self.broken_lines(bullets, ellipses, max(flags.size, 1))

    def broken_lines(self, bullets: int, ellipses: int, n: int) -> Broken | None:
        """The rule that `n` lines break, of which some begin with a bullet and some end with an ellipsis."""
        most_bullets, most_ellipses = self.settings.max_bullet_lines, self.settings.max_ellipsis_lines
        return first_broken(
            (bullets / n > most_bullets, "gopher_bullet_lines", bullets / n, most_bullets),
            (ellipses / n > most_ellipses, "gopher_ellipsis_lines", ellipses / n, most_ellipses),
        )

    def _stop_words(self, statistics: TextStatistics, language: object) -> Broken | None:
        wanted: Hashes | None = self.all_stop_words
        if language is not None:  # the list of the very tag, or else of its language without region and script
            exact = self.stop_words.get(str(language))
            wanted = exact if exact is not None else self.primary_stop_words.get(primary_language(str(language)))
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


class GopherRepetitionSettings(Section):
    """Gopher's repetition rules (arXiv 2112.11446, table A1): fractions above which a document is removed."""

    max_duplicate_lines: Fraction = 0.3
    """Largest share of lines that repeat an earlier line. Unit: share."""
    max_duplicate_paragraphs: Fraction = 0.3
    """Largest share of paragraphs that repeat an earlier paragraph. Unit: share."""
    max_duplicate_line_characters: Fraction = 0.2
    """Largest share of characters in lines that repeat an earlier line. Unit: share."""
    max_duplicate_paragraph_characters: Fraction = 0.2
    """Largest share of characters in paragraphs that repeat an earlier paragraph. Unit: share."""
    max_top_ngram: dict[int, Fraction] = Field({2: 0.2, 3: 0.18, 4: 0.16})
    """Largest share of characters in the most frequent n-gram, by its length of 2 to 4 words. Unit: share."""
    max_duplicate_ngram: dict[int, Fraction] = Field({5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1})
    """Largest share of characters in n-grams that repeat an earlier one, by their length of 5 to 10 words. Unit: share."""

    @model_validator(mode="after")
    def _lengths(self) -> "GopherRepetitionSettings":
        if not set(self.max_top_ngram) <= {2, 3, 4} or not set(self.max_duplicate_ngram) <= {5, 6, 7, 8, 9, 10}:
            raise ValueError("n-grams have 2 to 4 words in max_top_ngram and 5 to 10 in max_duplicate_ngram; give no other length")
        return self


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


class FineWebSettings(Section):
    """FineWeb's three rules (arXiv 2406.17557, section 3.6)."""

    max_unpunctuated: Fraction = 0.12
    """Remove documents of which this share of the lines, or less, ends with punctuation. Unit: share."""
    min_short_lines: Fraction = 0.67
    """Remove documents of which this share of the lines, or more, is short. Unit: share."""
    short_line: int = Field(30, ge=1)
    """Length below which a line is short. Unit: characters."""
    min_duplicate_line_characters: Fraction = 0.1
    """Remove documents of which this share of the characters, or more, is in duplicate lines. Unit: share."""
    max_newlines_per_word: float | None = Field(None, ge=0)
    """Most newlines in relation to the number of words, which finds lists; `rules: fineweb` has 0.3, and the paper has no such rule. null:
    off. Unit: newlines a word.
    """


class FineWebFilter:
    """FineWeb's rules (Penedo et al. 2024, arXiv 2406.17557, section 3.6), on lines with text."""

    name = "fineweb"

    def __init__(self, settings: FineWebSettings) -> None:
        self.settings = settings

    def __call__(self, document: Document) -> Document | Removed:
        settings, statistics = self.settings, statistics_of(document.text)
        flags, lines, duplicates = statistics.flags, statistics.lines, statistics.duplicates
        n = max(flags.size, 1)
        punctuated = int(np.count_nonzero(flags & scan.ENDS_WITH_MARK)) / n
        lengths = lines[:, scan.END] - lines[:, scan.START]
        short = int(np.count_nonzero((lengths > 0) & (lengths < settings.short_line))) / n
        repeated = duplicates[scan.REPEATED_LINE_CHARACTERS] / max(duplicates[scan.LINE_CHARACTERS], 1)
        newlines, least = document.text.count("\n") / max(statistics.n_words, 1), settings.min_duplicate_line_characters
        rules = (
            (punctuated <= settings.max_unpunctuated, "fineweb_line_punctuation", punctuated, settings.max_unpunctuated),
            (short >= settings.min_short_lines, "fineweb_short_lines", short, settings.min_short_lines),
            (repeated >= least, "fineweb_duplicate_line_characters", repeated, least),
            too_many_newlines(newlines, settings),
        )
        return verdict(self.name, document, first_broken(*rules))


def too_many_newlines(share: float, settings: FineWebSettings) -> Rule:
    """The rule of newlines for each word, which is off without a limit."""
    most = settings.max_newlines_per_word
    return most is not None and share > most, "fineweb_newlines", share, most or 0.0


def first_broken(*rules: Rule) -> Broken | None:
    """Reason, value and limit of the first of `rules` that is broken."""
    return next((rule[1:] for rule in rules if rule[0]), None)


def verdict(stage: str, document: Document, broken: Broken | None) -> Document | Removed:
    """The document, or its removal with the rule that it breaks."""
    if broken is None:
        return document
    reason, value, limit = broken
    return removed(document, stage, reason, value=round(value, 4), limit=limit)
