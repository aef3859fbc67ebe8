"""Cleaning and filtering: published quality rules, lists, language, personal data, a classifier and perplexity."""

from collections.abc import Callable, Collection
from functools import partial

from maxlm.corpus.filters.classifier import ClassifierFilter
from maxlm.corpus.filters.language import LanguageFilter
from maxlm.corpus.filters.lines import BoilerplateFilter, C4Filter
from maxlm.corpus.filters.lists import BadWordsFilter, UrlFilter
from maxlm.corpus.filters.perplexity import PerplexityFilter
from maxlm.corpus.filters.personal_data import PersonalDataFilter
from maxlm.corpus.filters.protocol import Filter, Scorer, ScorerSource, TagFilter, removed, run_filters, run_together, takes_many
from maxlm.corpus.filters.quality import FineWebFilter, GopherQualityFilter, GopherRepetitionFilter, LengthFilter
from maxlm.corpus.filters.released import RELEASED
from maxlm.corpus.filters.settings import FilterSettings

__all__ = ["Filter", "FilterSettings", "Scorer", "ScorerSource", "build_filters", "removed", "run_filters", "run_together", "takes_many"]


def build_filters(settings: FilterSettings, scorer: Scorer | None = None, tagging: Collection[str] = ()) -> list[Filter]:
    """The filters that `settings` name, in the order of its fields. `scorer`: of perplexity.checkpoint; `tagging`: names of those that tag
    and remove nothing. Raises UserError.
    """
    makers: dict[str, Callable[..., Filter]] = {
        "urls": UrlFilter,
        "length": LengthFilter,
        "language": LanguageFilter,
        "boilerplate": BoilerplateFilter,
        "c4": C4Filter,
        "gopher_quality": GopherQualityFilter,
        "gopher_repetition": GopherRepetitionFilter,
        "fineweb": FineWebFilter,
        "bad_words": BadWordsFilter,
        "classifier": ClassifierFilter,
        "perplexity": partial(PerplexityFilter, scorer=scorer),
        "personal_data": PersonalDataFilter,
    }
    if settings.rules == "fineweb":
        makers |= RELEASED
    sections = ((name, getattr(settings, name)) for name in makers)
    made = [makers[name](section) for name, section in sections if section is not None]
    return [TagFilter(one) if one.name in tagging else one for one in made]
