"""What is compiled, or looked for in a faster way, gives what a plain program gives."""

import json
import random
from dataclasses import asdict
from urllib.parse import urlsplit

import numpy as np
import pytest
from filter_texts import sentence

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.files import line_of
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.language import sample_text
from maxlm.corpus.filters.lines import MAX_UPPERCASE, BoilerplateFilter, BoilerplateSettings, Phrases, is_pattern, keep_lines
from maxlm.corpus.filters.statistics import TextStatistics
from maxlm.corpus.urls import split_url

LINES = """
Sign in|READ MORE|read  more…|SIGN\tUP|12|3.4.5|1,2 likes|12k Likes|12 k  Likes|(3)|- 5 -|½ %|share this page now|x Items In  Cart y
ΣΑΣ ΣΑΣ|σας σας|Log\u00a0in here|clİck here İ|bac\u212a to top|add  to cart|ALL RIGHTS RESERVED.|All rights reserved here|Home|home page
Contact  Us|一 二 三|-|1 2 3|٣ ٤|_ _|a 1|1 a|i̇ i|İ i|今天天气很好。|上一页 read more|天||  """


@pytest.mark.parametrize("patterns", [True, False])
def test_boilerplate_lines_are_those_of_the_rule(patterns, tmp_path):
    (tmp_path / "listed.txt").write_text("home page\nΣας σας\ncontact us\n1 a\nİ i\n", encoding="utf-8")
    settings = BoilerplateSettings(files=(str(tmp_path / "listed.txt"),), patterns=patterns)
    judge, rng = BoilerplateFilter(settings), random.Random(0)
    pieces = [*LINES.replace("\n", "|").split("|"), *(sentence(rng) for _ in range(20)), *(sentence(rng).upper() for _ in range(5))]
    for _ in range(120):
        statistics = TextStatistics("\n".join(rng.choices(pieces, k=rng.randrange(1, 40))))
        wanted = []
        for raw in statistics.text.split("\n"):
            line, letters = " ".join(raw.lower().split()), sum(map(str.isalpha, raw))
            upper = sum(char.isupper() for char in raw if char.isalpha()) > MAX_UPPERCASE * letters
            wanted.append(not line or not (line in judge.listed or (patterns and (upper or is_pattern(line)))))
        found = judge._kept(statistics).tolist()
        assert [line for line, *kept in zip(statistics.text.split("\n"), found, wanted, strict=True) if kept[0] != kept[1]] == []


def test_lines_that_stay_are_joined_with_one_empty_line_at_most():
    rng = random.Random(1)
    for _ in range(300):
        lines = rng.choices(["", "", " ", "a", "b c"], k=rng.randrange(1, 30))
        kept = np.array([rng.random() < 0.7 for _ in lines])
        plain = "\n".join(line for line, keep in zip(lines, kept, strict=True) if keep)
        while "\n\n\n" in plain:
            plain = plain.replace("\n\n\n", "\n\n")
        assert keep_lines(TextStatistics("\n".join(lines)), kept) == plain.strip("\n")


def test_phrases_are_found_wherever_they_are():
    rng = random.Random(2)
    for _ in range(500):
        phrases = ["".join(rng.choices("abé", k=rng.randrange(1, 5))).encode() for _ in range(rng.randrange(4))]
        data = "".join(rng.choices("abcé", k=rng.randrange(12))).encode()
        assert Phrases(phrases).any_in(data) == any(phrase in data for phrase in phrases)


def test_plain_urls_are_split_as_pythons_library_does():
    rng, parts = random.Random(3), [*'aB1.-:/?#;@[]%\\ \t\n"|~!$&=,', "www.", "ü", "//", "x.org"]
    for _ in range(20_000):
        url = rng.choice(["http://", "https://", "https://www.", "HTTP://", ""]) + "".join(rng.choices(parts, k=rng.randrange(10)))
        stripped = url.strip()
        try:
            split = urlsplit(stripped if "://" in stripped else f"//{stripped.removeprefix('//')}")
            wanted = (split.hostname or "").rstrip(".").lower().removeprefix("www."), split.path.rstrip("/")
        except ValueError:
            wanted = "", stripped
        assert not wanted[0].isascii() or split_url(url) == wanted, url


def test_repeated_ngrams_are_those_of_a_program_that_looks_at_all():
    rng = random.Random(4)
    for _ in range(120):
        words = rng.choices("abcdefgh"[: rng.randrange(1, 9)], k=rng.randrange(60))
        statistics, total = TextStatistics(" ".join(words)), max(len(words), 1)
        for n in range(5, 11):
            seen, repeated, free = set(), 0, 0
            for start in range(len(words) - n + 1):
                if start >= free:
                    gram = tuple(words[start : start + n])
                    repeated, free = (repeated + n, start + n) if gram in seen else (repeated, free)
                    seen.add(gram)
            assert statistics.repetition[n] == repeated / total
            if not repeated:
                break


def test_languages_are_those_of_py3langid():
    langid = pytest.importorskip("py3langid.langid")
    from maxlm.corpus.filters.language import NaiveBayes

    theirs = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    ours, rng = NaiveBayes(theirs), random.Random(5)
    words = [*"der die und the of and le la что это не 的 一 是 の は هذا που është og å ñandú ÜBER 12 +".split(), "\U0001f600"]  # noqa: SIM905
    texts = ["", "+", "\ud800", "A", *(sample_text(" ".join(rng.choices(words, k=rng.randrange(1, 80))), 600) for _ in range(80))]
    for text in [*texts, *(text.upper() for text in texts)]:
        (language, score), (name, share) = theirs.classify(text), ours(text)[0]
        assert abs(score - share) < 1e-4 and (language == name or score < 0.1), text


def test_a_line_of_a_shard_is_that_of_pythons_json():
    values = {"x": 1e16, "é": float("nan"), "b": True, "i": 2**62, "s": "\u2028\x7f"}
    for code in [*range(0x300), *range(0xD7F0, 0xE010), 0x2028, 0xFFFE, 0xFFFF, 0x1F600, 0x10FFFF]:
        text = f'a{chr(code)}\\"'
        for record in (Document(text, text, {**values, text: text}), Removed(text, "s", "r", text, values)):
            fields = {key: value for key, value in asdict(record).items() if key != "cuts"}  # which are counted, and not written
            plain = json.dumps(fields, ensure_ascii=0xD800 <= code < 0xE000, sort_keys=True)
            assert line_of(record) == plain.encode() + b"\n"


def test_case_and_space_do_not_change_the_hash_of_a_listed_line():
    def hashed(text):
        codes = TextStatistics(text).codes
        return scan.hash_without_space(codes, 0, len(codes), *scan.tables())

    assert hashed("Σας ΣΑΣ") == hashed("σασ\u00a0 ςας") != hashed("σας σα")
