"""Settings of the filters. A section that is absent is off; defaults are the published thresholds (`thresholds.py`)."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from maxlm.corpus.filters import thresholds as published
from maxlm.corpus.filters.language_tags import covered

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """One filter's settings: no other fields, and not changed once read."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LengthSettings(Section):
    """Bounds of a document's length."""

    min_characters: int = Field(1, ge=0, description="Characters that a document has at least.")
    max_characters: int | None = Field(None, ge=1, description="Characters that a document has at most; null: no limit.")
    min_words: int = Field(0, ge=0, description="Words that a document has at least; in scripts without spaces, characters.")
    max_words: int | None = Field(None, ge=1, description="Words that a document has at most; null: no limit.")

    @model_validator(mode="after")
    def _ordered(self) -> "LengthSettings":
        for least, most in ((self.min_characters, self.max_characters), (self.min_words, self.max_words)):
            if most is not None and most < least:
                raise ValueError(f"the most, {most}, is less than the least, {least}; raise it, or lower the least")
        return self


class LanguageSettings(Section):
    """Language identification."""

    keep: tuple[str, ...] = Field(
        (),
        description="Codes of ISO 639 of the languages that stay, perhaps with a script (zh-Hant, sr-Latn); empty: all stay and are only "
        "labelled. A macrolanguage covers its members: zh yue and wuu, no nb and nn, sh sr, hr and bs.",
    )
    min_score: Fraction = Field(published.LANGUAGE_MIN_SCORE, description="Probability that the language must have.")
    backend: Literal["fasttext", "py3langid"] = Field("py3langid", description="fasttext needs `model`; py3langid brings its own.")
    model: str | None = Field(None, description="Path of a fastText model, for example lid.176.ftz.")
    sample_characters: int = Field(600, ge=100, description="Characters that are looked at: from the beginning, the middle and the end.")

    @model_validator(mode="after")
    def _tags_and_model(self) -> "LanguageSettings":
        for tag in self.keep:
            covered(tag)
        if (self.backend == "fasttext") != (self.model is not None):
            raise ValueError("`model` is the path of a fastText model; give it with backend: fasttext, and only there")
        return self


class GopherQualitySettings(Section):
    """Gopher's quality rules (arXiv 2112.11446, A.1.1). A word stands between white space; in scripts without spaces, a character does."""

    min_words: int = Field(published.GOPHER_MIN_WORDS, ge=0, description="Words that a document has at least.")
    max_words: int = Field(published.GOPHER_MAX_WORDS, ge=1, description="Words that a document has at most.")
    min_mean_word_length: float = Field(published.GOPHER_MIN_MEAN_WORD_LENGTH, ge=0, description="Characters of a word, mean, at least.")
    max_mean_word_length: float = Field(published.GOPHER_MAX_MEAN_WORD_LENGTH, gt=0, description="Characters of a word, mean, at most.")
    max_hash_ratio: float = Field(published.GOPHER_MAX_HASH_TO_WORD_RATIO, ge=0, description="Hash signs for each word, at most.")
    max_ellipsis_ratio: float = Field(published.GOPHER_MAX_ELLIPSIS_TO_WORD_RATIO, ge=0, description="Ellipses for each word, at most.")
    max_bullet_lines: Fraction = Field(
        published.GOPHER_MAX_BULLET_LINES, description="Fraction of lines that begin with a bullet, at most."
    )
    max_ellipsis_lines: Fraction = Field(
        published.GOPHER_MAX_ELLIPSIS_LINES, description="Fraction of lines that end with an ellipsis, at most."
    )
    min_alphabetic_words: Fraction = Field(published.GOPHER_MIN_ALPHABETIC_WORDS, description="Fraction of words with a letter, at least.")
    min_stop_words: int = Field(published.GOPHER_MIN_STOP_WORDS, ge=0, description="Different stop words that a document has at least.")
    stop_words: dict[str, tuple[str, ...]] = Field(
        {"en": published.GOPHER_STOP_WORDS},
        description="Stop words by language, as ISO 639-1 (en-us and eng in metadata are en), with those of stop_words.txt for 36 more. "
        "A document whose metadata name a language without a list is not judged by this rule; one without a language is judged by all "
        "lists given here together.",
    )


class GopherRepetitionSettings(Section):
    """Gopher's repetition rules (arXiv 2112.11446, table A1): fractions above which a document is removed."""

    max_duplicate_lines: Fraction = Field(published.GOPHER_MAX_DUPLICATE_LINES, description="Lines that repeat an earlier one.")
    max_duplicate_paragraphs: Fraction = Field(
        published.GOPHER_MAX_DUPLICATE_PARAGRAPHS, description="Paragraphs that repeat an earlier one."
    )
    max_duplicate_line_characters: Fraction = Field(published.GOPHER_MAX_DUPLICATE_LINE_CHARACTERS, description="Characters in such lines.")
    max_duplicate_paragraph_characters: Fraction = Field(
        published.GOPHER_MAX_DUPLICATE_PARAGRAPH_CHARACTERS, description="Characters in such paragraphs."
    )
    max_top_ngram: dict[int, Fraction] = Field(
        published.GOPHER_MAX_TOP_NGRAM, description="By length in words (2 to 4): characters in the most frequent n-gram."
    )
    max_duplicate_ngram: dict[int, Fraction] = Field(
        published.GOPHER_MAX_DUPLICATE_NGRAM, description="By length in words (5 to 10): characters in n-grams that repeat an earlier one."
    )

    @model_validator(mode="after")
    def _lengths(self) -> "GopherRepetitionSettings":
        if not set(self.max_top_ngram) <= {2, 3, 4} or not set(self.max_duplicate_ngram) <= {5, 6, 7, 8, 9, 10}:
            raise ValueError("n-grams have 2 to 4 words in max_top_ngram and 5 to 10 in max_duplicate_ngram; give no other length")
        return self


class C4Settings(Section):
    """C4's rules for lines and pages (arXiv 1910.10683, section 2.2). Bad words are a filter of their own."""

    terminal_punctuation: bool = Field(
        True, description="Remove lines that do not end with a terminal mark (FineWeb leaves this rule out)."
    )
    min_words_in_line: int = Field(published.C4_MIN_WORDS_IN_LINE, ge=0, description="Remove lines with fewer words.")
    max_word_length: int = Field(published.C4_MAX_WORD_LENGTH, ge=1, description="Remove lines with a word of more characters.")
    line_phrases: tuple[str, ...] = Field(
        published.C4_LINE_PHRASES, description="Remove lines that contain one of these (case of ASCII letters does not count)."
    )
    page_phrases: tuple[str, ...] = Field(
        published.C4_PAGE_PHRASES, description="Remove documents that contain one of these (case of ASCII letters does not count)."
    )
    curly_bracket: bool = Field(True, description="Remove documents that contain a curly bracket.")
    citations: bool = Field(True, description="Remove Wikipedia's citation marks, such as [3] and [citation needed].")
    min_sentences: int = Field(published.C4_MIN_SENTENCES, ge=0, description="Sentences that what is left has at least.")


class FineWebSettings(Section):
    """FineWeb's three rules (arXiv 2406.17557, section 3.6)."""

    max_unpunctuated: Fraction = Field(
        published.FINEWEB_MAX_UNPUNCTUATED, description="Removed where this fraction of lines or less ends with punctuation."
    )
    min_short_lines: Fraction = Field(
        published.FINEWEB_MIN_SHORT_LINES, description="Removed where this fraction of lines or more is short."
    )
    short_line: int = Field(published.FINEWEB_SHORT_LINE, ge=1, description="Characters below which a line is short.")
    min_duplicate_line_characters: Fraction = Field(
        published.FINEWEB_MIN_DUPLICATE_LINE_CHARACTERS,
        description="Removed where this fraction of characters or more is in duplicate lines.",
    )
    max_newlines_per_word: float | None = Field(
        None, ge=0, description="Newlines for each word, at most: lists. rules: fineweb has 0.3, the paper has no such rule; null: off."
    )


class BadWordsSettings(Section):
    """Documents with listed words are removed."""

    files: tuple[str, ...] = Field(min_length=1, description="UTF-8 files, a word or phrase in each line; # begins a comment.")
    max_matches: int = Field(0, ge=0, description="Occurrences that a document may have.")


class UrlSettings(Section):
    """Documents whose metadata `url` is listed are removed."""

    domain_files: tuple[str, ...] = Field((), description="UTF-8 files, a domain in each line; its subdomains are meant, too.")
    url_files: tuple[str, ...] = Field(
        (), description="UTF-8 files, a URL in each line, without regard to scheme, www., query and fragment."
    )


class BoilerplateSettings(Section):
    """Lines that are not part of the text are removed (RefinedWeb, arXiv 2306.01116, G.2)."""

    files: tuple[str, ...] = Field((), description="UTF-8 files of lines that are removed wherever they are a whole line, in any case.")
    patterns: bool = Field(True, description="Remove lines that RefinedWeb's patterns describe: counters, menus, mostly uppercase.")
    max_removed_words: Fraction = Field(
        published.REFINEDWEB_MAX_REMOVED_WORDS, description="Fraction of words in removed lines above which the document is removed."
    )


class PersonalDataSettings(Section):
    """Personal data are replaced by placeholders: <EMAIL>, <IP_ADDRESS>, <PHONE>, <IBAN>, <CARD>, <KEY>."""

    email: bool = Field(True, description="E-mail addresses; logins (user@host:path) stay.")
    ip: bool = Field(True, description="Public IPv4 and IPv6 addresses; private, loopback, reserved and documentation addresses stay.")
    phone: bool = Field(
        True, description="Telephone numbers of a numbering plan: international, North American, in national groups, and labelled (Tel.)."
    )
    iban: bool = Field(True, description="Bank account numbers with right check digits (ISO 13616).")
    card: bool = Field(True, description="Payment card numbers with a right check digit, in groups or after a word for a card.")
    key: bool = Field(True, description="Private keys, tokens and passwords of known form, passwords in URLs.")


class ClassifierSettings(Section):
    """A classifier of fastText, as `fasttext supervised` trains it and others publish theirs."""

    model: str = Field(min_length=1, description="Path of a fastText model (.bin or .ftz).")
    label: str = Field(min_length=1, description="The wanted label, without __label__.")
    min_score: Fraction = Field(0.5, description="Probability of this label that a document has at least.")


class PerplexitySettings(Section):
    """Bits per byte under a language model, within bounds."""

    checkpoint: str | None = Field(None, description="A model of ours: folder of a run or of an imported model, or a Hugging Face folder.")
    kenlm: str | None = Field(None, description="Path of a KenLM model instead.")
    tokens: Literal["words", "characters"] = Field("words", description="Units of the KenLM model.")
    max_bits_per_byte: float = Field(gt=0, description="Documents above it are removed: garbage, shuffled text.")
    min_bits_per_byte: float = Field(0.0, ge=0, description="Documents below it are removed: templates, repetition.")
    sample_characters: int = Field(8192, ge=100, description="Characters at the beginning of a document that are scored.")

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.checkpoint is None) == (self.kenlm is None):
            raise ValueError("checkpoint or kenlm names the model that scores; set one of them")
        return self


class FilterSettings(Section):
    """The filters, in the order in which they run. A section that is absent is off."""

    rules: Literal["papers", "fineweb"] = Field(
        "papers",
        description="Definitions and default thresholds of c4, gopher_quality, gopher_repetition and fineweb: of the papers, or "
        "of FineWeb as released (datatrove's filters).",
    )
    urls: UrlSettings | None = Field(None, description="Listed domains and URLs.")
    length: LengthSettings | None = Field(None, description="Bounds of length.")
    language: LanguageSettings | None = Field(None, description="Language identification.")
    boilerplate: BoilerplateSettings | None = Field(None, description="Lines that are not part of the text.")
    c4: C4Settings | None = Field(None, description="C4's rules for lines and pages.")
    gopher_quality: GopherQualitySettings | None = Field(None, description="Gopher's quality rules.")
    gopher_repetition: GopherRepetitionSettings | None = Field(None, description="Gopher's repetition rules.")
    fineweb: FineWebSettings | None = Field(None, description="FineWeb's rules.")
    bad_words: BadWordsSettings | None = Field(None, description="Listed words.")
    classifier: ClassifierSettings | None = Field(None, description="Quality classifier.")
    perplexity: PerplexitySettings | None = Field(None, description="Bits per byte under a language model.")
    personal_data: PersonalDataSettings | None = Field(None, description="Masking of personal data.")

    @model_validator(mode="before")
    @classmethod
    def _thresholds_of_the_rules(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("rules") != "fineweb":
            return data
        released = {name: fields for name, fields in published.FINEWEB_RELEASED.items() if isinstance(data.get(name), dict)}
        return data | {name: fields | data[name] for name, fields in released.items()}

    @property
    def files(self) -> list[str]:
        """Lists and models that the filters read, but for a checkpoint."""
        lists = [section.files for section in (self.boilerplate, self.bad_words) if section is not None]
        lists += [self.urls.domain_files, self.urls.url_files] if self.urls is not None else []
        models = (
            self.language and self.language.model,
            self.classifier and self.classifier.model,
            self.perplexity and self.perplexity.kenlm,
        )
        return [*(file for some in lists for file in some), *(model for model in models if model)]
