"""The filters of a corpus in the order in which they run. A filter is one file with its settings and its rules, and is listed here."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

from pydantic import model_validator

from maxlm.config.fields import Section
from maxlm.corpus.filters import released
from maxlm.corpus.filters.language import ClassifierFilter, ClassifierSettings, LanguageFilter, LanguageSettings
from maxlm.corpus.filters.lines import BoilerplateFilter, BoilerplateSettings, C4Filter, C4Settings
from maxlm.corpus.filters.lists import BadWordsFilter, BadWordsSettings, UrlFilter, UrlSettings
from maxlm.corpus.filters.perplexity import PerplexityFilter, PerplexitySettings
from maxlm.corpus.filters.personal_data import PersonalDataFilter, PersonalDataSettings
from maxlm.corpus.filters.protocol import Filter, Scorer, TagFilter
from maxlm.corpus.filters.quality import (
    FineWebFilter,
    FineWebSettings,
    GopherQualityFilter,
    GopherQualitySettings,
    GopherRepetitionFilter,
    GopherRepetitionSettings,
    LengthFilter,
    LengthSettings,
)

FILTERS: tuple[Any, ...] = (
    *(UrlFilter, LengthFilter, LanguageFilter, BoilerplateFilter, C4Filter, GopherQualityFilter, GopherRepetitionFilter, FineWebFilter),
    *(BadWordsFilter, ClassifierFilter, PerplexityFilter, PersonalDataFilter),
)


class FilterSettings(Section):
    """The filters, in the order in which they run. A section that is absent is off."""

    rules: Literal["papers", "fineweb"] = "papers"
    """Definitions and default thresholds of c4, gopher_quality, gopher_repetition and fineweb. papers: those in the papers; fineweb: those
    in the release of FineWeb (datatrove's filters).
    """
    urls: UrlSettings | None = None
    """Removal of documents from listed domains and URLs; null: none."""
    length: LengthSettings | None = None
    """Bounds of a document's length; null: none."""
    language: LanguageSettings | None = None
    """Identification of the language, and the languages that stay; null: none."""
    boilerplate: BoilerplateSettings | None = None
    """Removal of lines that are not part of the text; null: none."""
    c4: C4Settings | None = None
    """C4's rules for lines and pages (arXiv 1910.10683); null: off."""
    gopher_quality: GopherQualitySettings | None = None
    """Gopher's quality rules (arXiv 2112.11446, A.1.1); null: off."""
    gopher_repetition: GopherRepetitionSettings | None = None
    """Gopher's repetition rules (arXiv 2112.11446, table A1); null: off."""
    fineweb: FineWebSettings | None = None
    """FineWeb's rules (arXiv 2406.17557, section 3.6); null: off."""
    bad_words: BadWordsSettings | None = None
    """Removal of documents with listed words; null: none."""
    classifier: ClassifierSettings | None = None
    """Removal of documents with a low score of a fastText classifier; null: none."""
    perplexity: PerplexitySettings | None = None
    """Bounds of the bits per byte under a language model; null: none."""
    personal_data: PersonalDataSettings | None = None
    """Masking of personal data by placeholders; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _thresholds_of_the_rules(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("rules") != "fineweb":
            return data
        return data | {name: fields | data[name] for name, fields in released.THRESHOLDS.items() if isinstance(data.get(name), dict)}

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


def build_filters(settings: FilterSettings, scorer: Scorer | None = None, tagging: Collection[str] = ()) -> list[Filter]:
    """Make the filters that `settings` name, in the order of FILTERS. `scorer`: of perplexity.checkpoint; `tagging`: names of filters that
    tag and remove nothing. Raises UserError.
    """
    makers: dict[str, Callable[..., Filter]] = {one.name: one for one in FILTERS}
    makers["perplexity"] = partial(PerplexityFilter, scorer=scorer)
    if settings.rules == "fineweb":
        makers |= released.RELEASED
    sections = ((name, getattr(settings, name)) for name in makers)
    made = [makers[name](section) for name, section in sections if section is not None]
    return [TagFilter(one) if one.name in tagging else one for one in made]
