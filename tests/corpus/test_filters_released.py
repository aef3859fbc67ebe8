"""Rules of FineWeb as released: the verdicts of datatrove, as against_datatrove_filters.py records them; stop words by language."""

import json
import random
import re
from pathlib import Path

import pytest

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import FilterSettings, build_filters, run_filters
from maxlm.corpus.filters.quality import shipped_stop_words
from maxlm.corpus.filters.statistics import TextStatistics

RECORDED = [json.loads(line) for line in (Path(__file__).parents[1] / "cases/corpus/datatrove_verdicts.jsonl").read_text().splitlines()]
SECTIONS = {name: {name: {}} for name in ("gopher_repetition", "gopher_quality", "c4", "fineweb")}
SECTIONS["c4 with terminal marks"] = {"c4": {"terminal_punctuation": True}}


def keeps(sections, text, rules, **metadata):
    filters = build_filters(FilterSettings.model_validate({"rules": rules, **sections}))
    return not isinstance(run_filters(filters, Document("file#0", text, metadata)), Removed)


@pytest.mark.parametrize("name", SECTIONS)
def test_verdicts_are_those_of_datatrove(name):
    """On the same words all are equal; by the papers' rules many are not, so that the texts tell the rules apart."""
    released, papers = (
        sum(keeps(SECTIONS[name], one["text"], rules) == one["kept"][name] for one in RECORDED) for rules in ("fineweb", "papers")
    )
    assert released == len(RECORDED)
    assert papers < 0.95 * len(RECORDED)


def test_words_are_runs_of_letters_and_digits_or_single_signs():
    rng = random.Random(3)
    for _ in range(100):
        text = "".join(rng.choice("ab Zé\n\t .,!?…'-#19_ß\u00a0\u3000\U0001f600\U0001d400\ud800") for _ in range(rng.randint(0, 80)))
        _, starts_W, lengths_W, _ = TextStatistics(text).pieces
        expected = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
        assert [(start, start + length) for start, length in zip(starts_W.tolist(), lengths_W.tolist(), strict=True)] == expected


def test_a_rule_set_chooses_thresholds_that_a_setting_overrides():
    released = FilterSettings.model_validate({"rules": "fineweb", "c4": {"min_sentences": 2}, "fineweb": {}})
    assert (released.c4.min_sentences, released.c4.min_words_in_line, released.c4.terminal_punctuation) == (2, 3, False)
    assert (released.fineweb.min_duplicate_line_characters, released.fineweb.max_newlines_per_word) == (0.01, 0.3)
    assert released.gopher_quality is None
    assert FilterSettings.model_validate(released.model_dump(mode="json")) == released
    assert FilterSettings.model_validate({"c4": {}}).c4.min_words_in_line == 5
    lines = "\n".join(["a fairly long line with a comma, a mark and many more words.", "yes, of course it does, or so it seems to me."])
    for rules in ("papers", "fineweb"):
        assert keeps({"fineweb": {"max_newlines_per_word": 0.1}}, lines, rules)
        assert not keeps({"fineweb": {"max_newlines_per_word": 0.01}}, lines, rules)


@pytest.mark.parametrize("rules", ["papers", "fineweb"])
@pytest.mark.parametrize("language", sorted(shipped_stop_words()))
def test_stop_words_of_a_language_are_looked_for_in_its_documents(language, rules):
    """Two of its words keep a text of that language, one does not, and those of another language do not."""
    section = {"gopher_quality": {"min_words": 1, "min_mean_word_length": 0, "max_mean_word_length": 1000, "min_alphabetic_words": 0}}
    first, second = shipped_stop_words()[language][:2]
    between = "" if language in ("ja", "zh") else " "
    rest = between.join(f"q{number}x" for number in range(20))
    assert keeps(section, between.join((rest, first, rest, second, rest)), rules, language=language)
    assert not keeps(section, between.join((rest, first, rest)), rules, language=language)
