"""The published quality rules: each is broken alone by a document made for it, and ordinary prose breaks none."""

import random
import re
import time
from pydoc_data.topics import topics

import pytest
from filter_texts import ADJECTIVES, NOUNS, paragraph, prose, sentence

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import FilterSettings, build_filters, run_filters, scan, statistics
from maxlm.corpus.filters.language_tags import primary_language
from maxlm.corpus.filters.statistics import TextStatistics

ALL = FilterSettings.model_validate(
    {name: {} for name in ("length", "boilerplate", "c4", "gopher_quality", "gopher_repetition", "fineweb", "personal_data")}
)
QUALITY = ("gopher_quality", "gopher_repetition", "fineweb")


def judge(text, settings=ALL, **metadata):
    return run_filters(build_filters(settings), Document("file#0", text, metadata))


def reasons(text, *names):
    """The reason of each filter alone, for the text as it is."""
    results = [judge(text, FilterSettings.model_validate({name: {}})) for name in names]
    return [result.reason for result in results if isinstance(result, Removed)]


def lines_of(rng, n, make=sentence):
    return [make(rng) for _ in range(n)]


def words(rng, n):
    return [w for _ in range(n) for w in sentence(rng).split()][:n]


RNG = random.Random(7)
LONG = ["internationalisation", "counterrevolutionary", "uncharacteristically", "electroencephalogram", "incomprehensibility"]
VARIED = [f"{word}{chr(97 + i)}{chr(97 + j)}" for i in range(12) for j in range(2) for word in LONG]
NO_STOP = re.compile(r"\b(the|be|to|of|and|that|have|with)\b", re.IGNORECASE)
SHORT = [f"{a}{b}" for a in "bcdfghjklmnp" for b in "aeiou"]
MANY = [f"{w}{i}" for i in range(900) for w in ("the", "of", "tree")]
BROKEN = {  # reason -> a text that breaks this rule and no other one of the three filters
    "gopher_too_few_words": " ".join(words(RNG, 49)) + ".",
    "gopher_too_many_words": "\n".join(" ".join(RNG.choices(MANY, k=101)) + "." for _ in range(1000)),
    "gopher_mean_word_length": "the of " + " ".join(VARIED) + ".",
    "gopher_hash_signs": "\n".join(" ".join(f"#{w}" if i % 7 == 0 else w for i, w in enumerate(s.split())) for s in lines_of(RNG, 15)),
    "gopher_ellipses": "\n".join(" ".join(f"{w}…" if i % 6 == 1 else w for i, w in enumerate(s.split())) for s in lines_of(RNG, 15)),
    "gopher_alphabetic_words": "\n".join(
        s[:-1] + "".join(f" {RNG.randint(100, 99999)}" for _ in range(6)) + "." for s in lines_of(RNG, 15)
    ),
    "gopher_bullet_lines": "\n".join(f"• {s}" for s in lines_of(RNG, 15)),
    "gopher_ellipsis_lines": "\n".join(s[:-1] + ("..." if i % 3 == 0 else ".") for i, s in enumerate(lines_of(RNG, 18))),
    "gopher_stop_words": NO_STOP.sub("no", "\n".join(lines_of(RNG, 1)))
    + "\n"
    + " ".join(f"word{w}{i}" for w in "abcd" for i in range(20))
    + ".",
    "fineweb_line_punctuation": "\n".join(s[:-1] for s in lines_of(RNG, 15)),
    "fineweb_short_lines": "\n".join(
        [*(f"{w.title()} and the {v}." for w, v in zip(ADJECTIVES[:40], NOUNS, strict=False)), *lines_of(RNG, 15)]
    ),
}
LINES = lines_of(random.Random(8), 40)
PARAGRAPHS = [paragraph(random.Random(seed), 3).replace(". ", ".\n") for seed in range(30)]


@pytest.mark.parametrize("reason", BROKEN)
def test_a_document_that_breaks_one_rule_is_removed_for_it(reason):
    assert reasons(BROKEN[reason], *QUALITY) == [reason]


def test_repeated_lines_and_paragraphs():
    """Each of the four fractions alone, and exactly at its limit: 0.30 stays, more goes."""
    short = [f"{w.title()}!" for w in SHORT]
    unique = [" ".join(words(random.Random(i), 25)) + "." for i in range(21)]
    assert reasons("\n".join(unique + short[:1] * 9), "gopher_repetition") == []  # 8 of 30 lines repeat
    assert reasons("\n".join(unique[:20] + short[:1] * 10), "gopher_repetition") == []  # 9 of 30: 0.30, not above
    assert reasons("\n".join(unique[:20] + short[:1] * 11), "gopher_repetition") == ["gopher_duplicate_lines"]
    assert reasons("\n".join([*short, unique[0], unique[0]]), "gopher_repetition") == ["gopher_duplicate_line_characters"]
    assert reasons("\n\n".join(unique[:20] + short[:1] * 10), "gopher_repetition") == []
    assert reasons("\n\n".join(unique[:20] + short[:1] * 11), "gopher_repetition") == ["gopher_duplicate_paragraphs"]
    assert reasons("\n\n".join([*short, unique[0], unique[0]]), "gopher_repetition") == ["gopher_duplicate_paragraph_characters"]
    pairs = [f"{a.title()} {b} and {c}." for a, b, c in zip(ADJECTIVES[:6], ADJECTIVES[6:12], NOUNS[:6], strict=True)]
    apart = [line for i in range(12) for line in (LINES[i], pairs[i % 6])]
    assert reasons("\n".join(apart), *QUALITY) == ["fineweb_duplicate_line_characters"]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_frequent_ngram(n):
    """`n` words that come back between others make a frequent n-gram, and no more frequent shorter or longer one."""
    gram = ["quarterly", "statement", "considered", "profitable"][:n]
    rest = iter([f"{w}{i}" for i in range(300) for w in SHORT])
    text = [" ".join([*gram, *(next(rest) for _ in range(n + 9))]) for _ in range(20)]
    assert reasons("\n".join(text), "gopher_repetition")[0] in [f"gopher_top_{k}_gram" for k in range(2, n + 1)]
    shares = TextStatistics("\n".join(text)).repetition
    assert shares[n] == pytest.approx(20 * len("".join(gram)) / sum(len(w) for line in text for w in line.split()))


@pytest.mark.parametrize("n", range(5, 11))
def test_repeated_long_ngrams(n):
    """Runs of n words that come twice count as duplicate n-grams, and as nothing longer."""
    fresh = (f"{w}{i}" for i in range(300) for w in SHORT)
    runs = [[next(fresh) for _ in range(n)] for _ in range(12)]
    text = " ".join(" ".join([*run, next(fresh)]) for run in runs + runs)
    shares = TextStatistics(text).repetition
    characters = sum(len(w) for run in runs for w in run)
    assert shares[n] == pytest.approx(characters / sum(map(len, text.split())))
    assert n == 10 or shares[n + 1] == 0.0
    assert reasons(text, "gopher_repetition")[0].startswith("gopher_duplicate_")


def test_repetition_agrees_with_a_plain_program():
    """The compiled pass against dictionaries and lists, on texts that repeat themselves a lot."""
    for seed in range(30):
        rng = random.Random(seed)
        tokens = [rng.choice(SHORT[: rng.choice((3, 8, 60))]) for _ in range(rng.randint(0, 300))]
        expected, total = [0.0] * 11, max(sum(map(len, tokens)), 1)
        for n in range(2, 11):
            grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            if n < 5:
                top = max(map(grams.count, grams), default=0)
                longest = max((len("".join(g)) for g in grams if grams.count(g) == top), default=0)
                expected[n] = min(1.0, top * longest / total) if top > 1 else 0.0
            else:
                seen, i = set(), 0
                while i < len(grams):
                    expected[n] += len("".join(grams[i])) / total if grams[i] in seen else 0
                    step = n if grams[i] in seen else 1
                    seen.add(grams[i])
                    i += step
        assert TextStatistics(" ".join(tokens)).repetition == pytest.approx(expected)


UNSPACED = set("中ก\U00020000\u0e48")  # of the alphabet below


def number_of_words(text):
    """Those between white space; of one with characters of scripts without spaces, these."""
    return sum(sum(char in UNSPACED for char in word) or 1 for word in text.split())


def test_words_and_lines_agree_with_python():
    """Counts of the compiled pass against str.split, on text of many scripts."""
    rng = random.Random(3)
    alphabet = "ab Zé\n\t .,!?…'-#19ßЖ中。\u00a0\u2003\u3000ก́\U0001f600\U00020000\ud800"
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 120)))
        result, lines = TextStatistics(text), text.split("\n")
        spaced = [word for word in text.split() if not UNSPACED & set(word)]
        assert result.counts[scan.SPACED_WORDS] == len(spaced) and result.n_words == number_of_words(text)
        assert len(result.lines) == len(lines)
        for row, line in zip(result.lines.tolist(), lines, strict=True):
            assert text[row[0] : row[1]] == line.strip()
            assert row[2] == number_of_words(line)
            assert row[3] == max((len(word) for word in line.split() if not UNSPACED & set(word)), default=0)
            assert row[5] == sum(char.isalpha() for char in line)


C4_BROKEN = {
    "c4_lorem_ipsum": prose(1) + "\n\nHere we say Lorem Ipsum and no more of it.",
    "c4_curly_bracket": prose(2) + "\n\nThe function is written as f { x } in the old book.",
    "c4_too_few_sentences": sentence(random.Random(1)) + "\n" + "\n".join(s[:-1] for s in lines_of(RNG, 9)),
}


@pytest.mark.parametrize("reason", C4_BROKEN)
def test_c4_removes_pages(reason):
    assert reasons(C4_BROKEN[reason], "c4") == [reason]


def test_c4_keeps_the_lines_that_it_should():
    good = [s for s in lines_of(random.Random(5), 12) if len(s.split()) >= 5]
    bad = [
        "Home | About us",
        "Too short.",
        "Please enable JavaScript to see the comments of others.",
        "We have changed our privacy policy for you.",
    ]
    bad += ["It goes on and on and on...", "One word is " + "x" * 1001 + " long here."]
    result = judge("\n".join([*bad[:3], *good, *bad[3:]]), FilterSettings.model_validate({"c4": {}}))
    assert result.text == "\n".join(good)
    assert result.metadata["c4_lines_removed"] == len(bad)
    cited = judge(good[0][:-1] + "[12][citation needed].\n" + "\n".join(good[1:]), FilterSettings.model_validate({"c4": {}}))
    assert cited.text.split("\n")[0] == good[0][:-1] + "."


def test_boilerplate_lines(tmp_path):
    listed = tmp_path / "lines.txt"
    listed.write_text("# lines of our site\nThe  Daily Example, founded in 1900\n")
    section = {"boilerplate": {"files": [str(listed)]}}
    noise = [
        "the daily example, founded in 1900",
        "3 likes",
        "2021",
        "Home",
        "Subscribe to our list",
        "Go on and read more...",
        "A BIG HEADLINE",
    ]
    body = prose(4, 40)
    result = judge("\n".join([*noise, body]), FilterSettings.model_validate(section))
    assert result.text == body
    assert result.metadata["boilerplate_lines_removed"] == len(noise)
    assert judge("\n".join([*noise * 40, body]), FilterSettings.model_validate(section)).reason == "boilerplate_share"


def test_ordinary_prose_stays():
    kept = [judge(prose(seed)) for seed in range(200)]
    assert sum(isinstance(result, Removed) for result in kept) <= 10


def test_pythons_own_manual_stays():
    """Real English: the paragraphs of prose of Python's reference manual, in documents of 12."""
    paragraphs = [
        " ".join(p.split()) for text in topics.values() for p in text.split("\n\n") if not p.startswith((" ", "*")) and len(p) > 200
    ]
    texts = [p for p in dict.fromkeys(paragraphs) if p[-1] == "." and "{" not in p and "==" not in p and "::" not in p]
    documents = ["\n\n".join(texts[i : i + 12]) for i in range(0, len(texts) - 11, 12)]
    gone = [result.reason for result in map(judge, documents) if isinstance(result, Removed)]
    assert len(documents) >= 20
    assert len(gone) <= 0.05 * len(documents), gone


def test_shuffled_words_pass_the_rules():
    """No published rule looks at the order of words in a line: the perplexity filter has to."""
    kept = 0
    for seed in range(50):
        lines = [line.split() for line in prose(seed).split("\n")]
        shuffled = [" ".join([*random.Random(seed).sample(line[:-1], len(line) - 1), line[-1]]) if line else "" for line in lines]
        kept += isinstance(judge("\n".join(shuffled)), Document)
    assert kept >= 45


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\n",
        "a",
        "今天天气很好。" * 300,
        "\0" * 100,
        "\ud800\udfff lone",
        "e\u0301" * 99,
        "\u2028" * 50,
        "\U0010ffff" * 9,
        "...",
        "#" * 200,
    ],
)
def test_any_text_has_a_verdict(text):
    result = judge(text)
    assert isinstance(result, Document | Removed)
    assert judge(text) == result


CHINESE = (
    "今天天气很好，我们去公园散步。孩子们在湖边放风筝，老人坐在树下下棋。中午大家一起吃饭，下午才慢慢走回家。晚上还要写信给远方的朋友。"
)
JAPANESE = (
    "今日は天気がよいので、公園を散歩しました。子どもたちは池のそばで凧を揚げ、老人は木の下で将棋を指しています。昼には皆で食事をしました。"
)
THAI = "วันนี้อากาศดีมาก เราจึงไปเดินเล่นในสวนสาธารณะ เด็กๆเล่นว่าวริมทะเลสาบ ผู้สูงอายุนั่งเล่นหมากรุกใต้ต้นไม้ ตอนเที่ยงทุกคนกินข้าวด้วยกัน"


@pytest.mark.parametrize(("language", "text"), [("zh", CHINESE), ("ja", JAPANESE), ("th", THAI)], ids=["zh", "ja", "th"])
def test_scripts_without_spaces(language, text):
    """A character counts as a word: prose stays, and what is too short, a table of numbers or a list of hash signs goes."""
    quality = FilterSettings.model_validate({"gopher_quality": {}})
    manual = text.replace("。", "。/etc/systemd/network.conf(5) ")
    for one in (text, manual, text + " See systemd.network(5)."):
        assert isinstance(judge(one, quality, language=language), Document)
        assert isinstance(judge(one, FilterSettings.model_validate({"gopher_repetition": {}, "length": {"min_words": 40}})), Document)
    assert judge(text[:45], quality, language=language).reason == "gopher_too_few_words"
    assert judge(text[:35], FilterSettings.model_validate({"length": {"min_words": 40}})).reason == "length_too_few_words"
    assert judge(text + " 31415 - 27182" * 20, quality, language=language).reason == "gopher_alphabetic_words"
    assert judge(text + " #word #text" * 30, quality, language=language).reason == "gopher_hash_signs"
    lined = FilterSettings.model_validate({"c4": {}, "boilerplate": {}})
    assert language == "th" or judge(text, lined).text == text  # Thai has no mark at the end of a sentence


def test_stop_words_are_those_of_the_language():
    german = "Der Ingenieur beschreibt die schmale Brücke hinter unserem alten Haus, weil das Wetter umschlug. " * 5
    section = FilterSettings.model_validate({"gopher_quality": {}})
    assert judge(german, section).reason == "gopher_stop_words"
    assert judge(german, section, language="de").text == german
    both = FilterSettings.model_validate({"gopher_quality": {"stop_words": {"en": ["the", "of"], "de": ["der", "die", "das"]}}})
    assert judge(german, both, language="de").text == german
    assert judge(german, both, language="en").reason == "gopher_stop_words"


@pytest.mark.parametrize("tag", ["eng", "en-us", "en-GB", "EN", "en_US", "en-Latn-US"])
def test_stop_words_are_found_by_any_tag_of_the_language(tag):
    """WET files have ISO 639-3, pages have BCP 47; a list is by ISO 639-1 or by a tag of its own."""
    without = "Quick brown foxes jump over lazy dogs near green river banks while seven small birds watch them closely. " * 5
    section = FilterSettings.model_validate({"gopher_quality": {}})
    assert judge(without, section, language=tag).reason == "gopher_stop_words"
    assert judge(without, section, language="sco").text == without
    for key, other in ((tag, "en"), ("eng", tag)):
        own = FilterSettings.model_validate({"gopher_quality": {"stop_words": {key: ["while", "near"]}}})
        assert judge(without, own, language=tag).text == without
        assert judge("nothing " + without.replace("while", "as"), own, language=other).reason == "gopher_stop_words"


@pytest.mark.parametrize(("tag", "language"), [("ger", "de"), ("deu", "de"), ("cmn", "zh"), ("zh-Hant-TW", "zh"), ("haw", "haw"), ("", "")])
def test_primary_language(tag, language):
    assert primary_language(tag) == language


@pytest.mark.parametrize(
    "pattern",
    ["a", " ", "\n", ".", "@", "1", "1.", "a@", "+1", "(2", "中", "a\n", "x ", "[1", "...", ":", "2000:", "password=", "AKIA", "eyJ"],
)
def test_ten_megabytes_of_one_pattern_take_bounded_time(pattern):
    """No expression and no table is slower than linear: 1 MB of each, 10 MB of one character below."""
    text, began = pattern * (1_000_000 // len(pattern)), time.process_time()
    for name in ("boilerplate", "c4", *QUALITY, "personal_data"):
        judge(text, FilterSettings.model_validate({name: {}}))
    assert time.process_time() - began < 6.0


def test_ten_megabytes_of_one_character():
    began = time.process_time()
    assert isinstance(judge("a" * 10_000_000), Removed)
    assert time.process_time() - began < 5.0


def test_result_is_a_function_of_the_text():
    """Not of what was judged before, not of the object that holds the text, not of Python's hash."""
    texts = [prose(seed, 2) for seed in range(5)] + list(BROKEN.values())[2:] + list(C4_BROKEN.values())
    filters = build_filters(ALL)
    first = [run_filters(filters, Document(f"f#{i}", text)) for i, text in enumerate(texts)]
    order = list(enumerate(texts))
    random.Random(1).shuffle(order)
    for i, text in order:
        assert run_filters(filters, Document(f"f#{i}", (text + "x")[:-1])) == first[i]
    assert TextStatistics("The quick brown fox").hashes_W.tolist() == statistics.TextStatistics("the QUICK (brown) fox.").hashes_W.tolist()
    assert hex(TextStatistics("the").hashes_W[0]) == "0x56f5c9194461d57c"


def test_the_document_given_is_not_changed():
    document = Document("f#1", "Mail a@b.com now.\nHome\n" + prose(3), {"url": "https://example.org"})
    copy = Document(document.id, document.text, dict(document.metadata))
    run_filters(build_filters(ALL), document)
    assert document == copy


def test_removed_names_stage_reason_and_figures():
    result = judge("Too short.\n\nYes.", FilterSettings.model_validate({"gopher_quality": {}}))
    assert result == Removed("file#0", "gopher_quality", "gopher_too_few_words", "Too short. Yes.", {"value": 3, "limit": 50})
    assert len(judge("word " * 60, FilterSettings.model_validate({"gopher_repetition": {}})).example) <= 300


def test_length_bounds():
    def length(text, **section):
        result = judge(text, FilterSettings.model_validate({"length": section}))
        return result.reason if isinstance(result, Removed) else None

    assert length("") == "length_too_few_characters"
    assert length("abc", max_characters=2) == "length_too_many_characters"
    assert length("a b", min_words=3) == "length_too_few_words"
    assert length("a b", max_words=1) == "length_too_many_words"
    assert length("a b", min_words=2, max_words=2, max_characters=3) is None
    with pytest.raises(ValueError, match="less than the least"):
        FilterSettings.model_validate({"length": {"min_characters": 5, "max_characters": 4}})
