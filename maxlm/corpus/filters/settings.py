"""The filters of a corpus in the order in which they run. A filter is one file with its settings and its rules, and is listed here."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

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
