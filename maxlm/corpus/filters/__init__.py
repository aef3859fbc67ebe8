"""Cleaning and filtering: published quality rules, lists, language, personal data, a classifier and perplexity."""

from maxlm.corpus.filters.protocol import Filter, Scorer, ScorerSource, removed, run_filters, run_together, takes_many
from maxlm.corpus.filters.settings import FilterSettings, build_filters

__all__ = ["Filter", "FilterSettings", "Scorer", "ScorerSource", "build_filters", "removed", "run_filters", "run_together", "takes_many"]
