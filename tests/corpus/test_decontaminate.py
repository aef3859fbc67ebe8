"""Decontamination: what must hold for any corpus, and recall and precision on a made one."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from decontaminate_corpus import INSTRUCTION, LICENCE, NEGATIVES, PLANTS, QUOTES, Writer, make, write_set
from pyarrow import parquet
from pydantic import ValidationError

from maxlm.base.errors import UserError
from maxlm.corpus.decontaminate import DecontaminateSettings, Decontaminator, EvalIndex, EvalSet, Frequencies
from maxlm.corpus.decontaminate.decontaminator import EXAMPLE
from maxlm.corpus.decontaminate.frequencies import PIECE
from maxlm.corpus.decontaminate.items import read_items
from maxlm.corpus.decontaminate.tokens import clean, words
from maxlm.corpus.document import Document, Removed

QUESTION = "A plano-convex lens of focal length 20 cm is silvered at its plane face. Which mirror is it equivalent to?"
FILLER = "The harbour was quiet in the morning, and nobody had yet seen the boat that left before dawn. "


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    corpus = make(seed=7)
    path = tmp_path_factory.mktemp("made") / "set.jsonl"
    write_set(path, corpus.items)
    settings = DecontaminateSettings(sets={"made": EvalSet(path=str(path), fields=("question",), options=("choices.text",))})
    frequencies = Frequencies.learn(settings, corpus.documents)
    return corpus, settings, frequencies, list(Decontaminator(EvalIndex.build(settings, frequencies)).run(corpus.documents))


def build(folder: Path, *questions: str, name: str = "lenses", **others) -> EvalIndex:
    """Index of one plain text set, with no frequencies."""
    (folder / "plain.txt").write_text("".join(question.replace("\n", " ") + "\n" for question in questions))
    settings = DecontaminateSettings(sets={name: EvalSet(path=str(folder / "plain.txt"))}, **others)
    return EvalIndex.build(settings, Frequencies.none(settings))


def holds(index: EvalIndex, text: str) -> bool:
    return isinstance(Decontaminator(index)(Document("a#0", text)), Removed)


def test_made_corpus_recall_and_precision(made, capsys):
    """Recall >= 99% and precision >= 95% over all documents; each kind of plant by itself, too, but reworded ones, of which 95%."""
    corpus, _, _, results = made
    assert len(corpus.documents) >= 2000
    assert [one.id for one in results] == [one.id for one in corpus.documents]
    removed = {one.id for one in results if isinstance(one, Removed)}
    found = len(removed & set(corpus.planted))
    assert found / len(corpus.planted) >= 0.99
    assert found / len(removed) >= 0.95
    for kind in PLANTS + NEGATIVES:
        ids = {id for id, one in corpus.kinds.items() if one == kind}
        share = len(ids & removed) / len(ids)
        with capsys.disabled():
            print(f"{kind}: {len(ids & removed)} of {len(ids)} removed")
        assert share >= (0.95 if kind == "reworded" else 0.99) if kind in PLANTS else share <= 0.01


def test_removed_says_which_item_and_shows_both_texts(made):
    corpus, _, _, results = made
    for one in results:
        if isinstance(one, Removed) and one.id in corpus.planted:
            assert (one.stage, one.reason, one.detail["set"]) == ("decontaminate", "contaminated", "made")
            assert one.detail["item"] == corpus.planted[one.id]
            assert 0.5 <= one.detail["score"] <= 1
            item, document = one.example.removeprefix("item: ").split(" | document: ")
            assert item and document and len(one.example) <= EXAMPLE and "\n" not in one.example


def test_results_do_not_depend_on_order_or_shards(made):
    corpus, settings, frequencies, results = made
    expected = {one.id: one for one in results}
    documents = random.Random(1).sample(corpus.documents, len(corpus.documents))
    parts = [documents[shard::7] for shard in range(7)]
    learned = [Frequencies.learn(settings, part) for part in parts]
    merged = Frequencies.merge(reversed(learned))
    assert merged.documents == frequencies.documents and np.array_equal(merged.counts, frequencies.counts)
    decontaminate = Decontaminator(EvalIndex.build(settings, merged))
    assert {one.id: one for part in parts[:3] for one in decontaminate.run(part)} == {
        one.id: expected[one.id] for p in parts[:3] for one in p
    }
    assert all(decontaminate(document) == expected[document.id] for document in parts[3][:100])


def test_results_do_not_depend_on_the_order_of_items(made, tmp_path):
    corpus, _, frequencies, results = made
    order = random.Random(2).sample(range(len(corpus.items)), len(corpus.items))
    write_set(tmp_path / "set.jsonl", [corpus.items[number] for number in order])
    settings = DecontaminateSettings(
        sets={"made": EvalSet(path=str(tmp_path / "set.jsonl"), fields=("question",), options=("choices.text",))}
    )
    again = Frequencies.learn(settings, corpus.documents)
    assert np.array_equal(again.keys, frequencies.keys) and np.array_equal(again.counts, frequencies.counts)
    decontaminate = Decontaminator(EvalIndex.build(settings, again))
    for one, before in zip(decontaminate.run(corpus.documents), results, strict=True):
        assert type(one) is type(before)
        if isinstance(one, Removed):
            assert order[one.detail["item"]] == before.detail["item"] or one.detail["items"] > 1


def test_the_saved_index_is_the_same(made, tmp_path):
    corpus, settings, frequencies, results = made
    frequencies.save(tmp_path / "frequencies.npz")
    index = EvalIndex.build(settings, Frequencies.load(tmp_path / "frequencies.npz"))
    for name in ("a", "b"):
        index.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = EvalIndex.load(tmp_path / "a")
    assert loaded.report() == index.report()
    assert list(Decontaminator(loaded).run(corpus.documents[:300])) == results[:300]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_are_stable(seed):
    """Across processes and PYTHONHASHSEED; the figure is part of saved files, so a change of it needs another VERSION."""
    code = "from maxlm.corpus.decontaminate.tokens import words; w = words(['What is na\\u00efve?']); print(*w.hash_T, *w.grams(3)[0])"
    answer = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    ).stdout
    assert answer.split() == STABLE


def test_an_item_anywhere_in_a_long_document_is_found(tmp_path):
    """At both ends, and across the places where a long document is cut."""
    decontaminate = Decontaminator(build(tmp_path, QUESTION))
    text = FILLER * (3 * PIECE // len(FILLER))
    assert decontaminate(Document("a#0", text)).text == text
    for place in (0, 1000, PIECE - 150, PIECE - 50, PIECE - 1, PIECE, PIECE + 5, 2 * PIECE - 2000, len(text)):
        assert isinstance(decontaminate(Document("a#0", text[:place] + " " + QUESTION + " " + text[place:])), Removed), place


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text.replace(" ", "\n\t "),
        lambda text: "".join(char if char.isalnum() else " -- " for char in text),
        lambda text: text.replace(" ", "\u00a0").replace(".", "\u2026"),
        lambda text: text.replace("length", "le\u00adng\u200bth").replace("fo", "\uff46\uff4f"),
        lambda text: text.replace("e", "e\u0301"),
    ],
)
def test_case_punctuation_and_whitespace_do_not_count(change, tmp_path):
    index = build(tmp_path, QUESTION)
    assert Decontaminator(index)(Document("a#0", f"{FILLER}\u201c{change(QUESTION)}\u201d {FILLER}")).detail["score"] == 1


def test_words_have_their_places_in_the_text():
    texts = ["", "Don't stop; it\u2019s 3.5 km", "\u6771\u4eac\u306b cafe\u0301 \U0001f600 \U00020000x", "end"]
    found = words([clean(text) for text in texts])
    shown = [found.text[start:end] for start, end in zip(found.start_T, found.end_T, strict=True)]
    assert shown == ["Don", "t", "stop", "it", "s", "3", "5", "km", "\u6771", "\u4eac", "\u306b", "caf\u00e9", "\U00020000", "x", "end"]
    assert found.owner_T.tolist() == [1] * 8 + [2] * 6 + [3]
    assert words(["cafe"]).hash_T == words([clean("CAFE\u0301")]).hash_T
    assert [len(words([text]).hash_T) for text in ("", " ", "a", "a b", "\u00e9", "\ud800 a")] == [0, 0, 1, 2, 1, 1]


def test_hashes_of_words_and_grams_differ():
    writer = Writer(3)
    text = writer.text(0, 2000)
    found = words([text])
    shown = [found.text[start:end].lower() for start, end in zip(found.start_T, found.end_T, strict=True)]
    assert len(set(shown)) == len(set(found.hash_T.tolist()))
    grams = found.grams(3)[0].tolist()
    assert len({*zip(shown, shown[1:], shown[2:], strict=False)}) == len(set(grams)) and not set(grams) & set(found.hash_T.tolist())


def test_grams_do_not_cross_documents(tmp_path):
    """Halves of an item in neighbouring documents of a batch are no item."""
    index = build(tmp_path, QUESTION)
    halves = [Document("a#0", QUESTION[:30]), Document("a#1", QUESTION[30:60]), Document("a#2", QUESTION)]
    assert [type(one) for one in Decontaminator(index).batch(halves)] == [Document, Document, Removed]


def test_short_items(tmp_path):
    """Fewer words than an n-gram: not searched, and said. Fewer than `shortest`: all words must be there, in runs."""
    index = build(tmp_path, "Paris", "Two words", "Who painted the sunken cathedral?", "", "  ?! ")
    assert index.left_out == {"lenses": {"empty": [3, 4], "short": [0, 1]}}
    assert index.report() == {"lenses": {"searched": 1, "empty": 2, "short": 2}}
    assert holds(index, "Q: who painted THE sunken cathedral?")
    assert not holds(index, "Nobody painted the sunken cathedral.")
    assert not holds(index, "Paris, and two words")


def test_options_count_where_the_question_says_too_little(tmp_path):
    options = ["copper melts at a lower temperature than iron", "basalt cools more slowly than granite", "zinc is lighter than helium"]
    (tmp_path / "set.jsonl").write_text(json.dumps({"q": "Which is correct?", "o": options}) + "\n")
    settings = DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "set.jsonl"), fields=("q",), options=("o",))})
    index = EvalIndex.build(settings, Frequencies.none(settings))
    assert holds(index, f"Which is correct?\n(a) {options[2]}\n(b) {options[0]}\n(c) {options[1]}")
    assert not holds(index, f"Which is correct? The sky is blue. {options[0]}")


@pytest.mark.parametrize("common", [INSTRUCTION, LICENCE, QUOTES[0]])
def test_what_many_documents_share_does_not_count(common, tmp_path):
    """An item with a long common part is found by the rest of it; an item that is all common is left out, and named."""
    writer = Writer(4)
    documents = [Document(f"a#{number}", f"{writer.text(number % 9, 3)}\n{common}") for number in range(300)]
    (tmp_path / "plain.txt").write_text(f"{common} {QUESTION}\n{common}\n")
    settings = DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "plain.txt"))})
    index = EvalIndex.build(settings, Frequencies.learn(settings, documents))
    assert index.left_out == {"s": {"common": [1]}}
    decontaminate = Decontaminator(index)
    assert all(one is document for one, document in zip(decontaminate.run(documents), documents, strict=True))
    assert isinstance(decontaminate(Document("a#0", f"{FILLER}{common} {QUESTION}{FILLER}")), Removed)


def test_words_scattered_over_a_document_are_no_item(tmp_path):
    parts = QUESTION.split()
    runs = [" ".join(parts[start : start + 4]) for start in range(0, len(parts), 4)]
    assert not holds(build(tmp_path, QUESTION), (FILLER * 4).join(runs))


def test_duplicates_are_one_item(tmp_path):
    index = build(tmp_path, QUESTION, QUESTION.upper(), "Which gas do green plants take in while they grow by day?", QUESTION)
    assert index.left_out == {"lenses": {"duplicate": [1, 3]}}
    removed = Decontaminator(index)(Document("a#0", QUESTION))
    assert (removed.detail["item"], removed.detail["items"]) == (0, 1)


def test_no_sets_and_empty_sets_remove_nothing(tmp_path):
    for settings in (DecontaminateSettings(), None):
        index = build(tmp_path) if settings is None else EvalIndex.build(settings, Frequencies.none(settings))
        index.save(tmp_path / "index")
        document = Document("a#0", QUESTION, {"source": "x"})
        assert Decontaminator(EvalIndex.load(tmp_path / "index"))(document) is document
    learned = Frequencies.learn(DecontaminateSettings(), [Document("a#0", QUESTION)])
    assert learned.documents == 1


def test_empty_and_odd_documents(tmp_path):
    decontaminate = Decontaminator(build(tmp_path, QUESTION))
    texts = ["", " ", "\n" * 1000, "\0" * 100, "a" * 100_000, "\ud800", "\U0010ffff" * 10, "!?" * 1000, "\u0301", "a b"]
    assert [one.text for one in decontaminate.run(Document("a#0", text) for text in texts)] == texts
    assert list(decontaminate.run([])) == []
    assert holds(decontaminate.index, f"\0\ud800 {QUESTION} \U0001f600")


def test_a_document_of_repeated_runs_takes_little_time(tmp_path):
    decontaminate = Decontaminator(build(tmp_path, QUESTION))
    assert isinstance(decontaminate(Document("a#0", "focal length 20 cm is silvered " * 20_000)), Document)


def test_gzip_and_plain_files_are_the_same(tmp_path):
    (tmp_path / "plain.txt").write_text(QUESTION)
    with gzip.open(tmp_path / "plain.txt.gz", "wt") as file:
        file.write(QUESTION)
    pair = [DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / name))}) for name in ("plain.txt", "plain.txt.gz")]
    plain, packed = (EvalIndex.build(settings, Frequencies.none(settings)) for settings in pair)
    assert plain.texts == packed.texts and np.array_equal(plain.hash_W, packed.hash_W)


def test_a_sample_is_chosen_by_id(tmp_path):
    (tmp_path / "plain.txt").write_text(QUESTION)
    settings = DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "plain.txt"))}, sample_share=0.3)
    documents = [Document(f"a#{number}", "a lens") for number in range(1000)]
    learned = Frequencies.learn(settings, documents)
    assert 250 < learned.documents < 350
    again = Frequencies.learn(settings, documents[::-1])
    assert again.documents == learned.documents and np.array_equal(again.counts, learned.counts)


@pytest.mark.parametrize(
    ("content", "fields", "options", "says"),
    [
        (b'{"q": "a"}\n{"q": \n', ("q",), (), "line 2: not JSON"),
        (b'{"q": "a"}\n{"p": "a"}\n', ("q",), (), "line 2: no field q"),
        (b'{"q": "a"}\n', ("q",), ("choices.text",), "no field choices.text"),
        (b'["q"]\n', ("q",), (), "JSON, but not an object"),
        (b'{"q": {"text": "a"}}\n', ("q",), (), "no text and no list"),
        (b'{"q": "\xff"}\n', ("q",), (), "line 1: not UTF-8 at byte 7"),
        (b"[" * 100_000, ("q",), (), "not JSON"),
        (b"a", (), ("q",), "options without fields"),
        (None, ("q",), (), "does not exist"),
    ],
)
def test_bad_sets_are_one_line(content, fields, options, says, tmp_path):
    if content is not None:
        (tmp_path / "set.jsonl").write_bytes(content)
    settings = DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "set.jsonl"), fields=fields, options=options)})
    with pytest.raises(UserError, match=says) as error:
        Frequencies.none(settings)
    assert "\n" not in str(error.value)


def test_bad_files_are_one_line(tmp_path):
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    with pytest.raises(UserError, match="cannot be read"):
        Frequencies.none(DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "bad.gz"))}))
    index = build(tmp_path, QUESTION)
    index.save(tmp_path / "index")
    whole = (tmp_path / "index").read_bytes()
    for number, content in enumerate((b"", b"text", whole[:-100], whole[: len(whole) // 2], whole.replace(b"lenses", b"lensos"))):
        (tmp_path / f"{number}").write_bytes(content)
        for load in (EvalIndex.load, Frequencies.load):
            with pytest.raises(UserError, match="damaged"):
                load(tmp_path / f"{number}")
    with pytest.raises(UserError, match="cannot be read"):
        EvalIndex.load(tmp_path / "missing")


def test_frequencies_of_other_sets_are_refused(tmp_path):
    (tmp_path / "plain.txt").write_text(QUESTION)
    settings = DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "plain.txt"))})
    other = settings.model_copy(update={"ngram": 4})
    with pytest.raises(UserError, match="learn them again"):
        EvalIndex.build(other, Frequencies.none(settings))
    with pytest.raises(UserError, match="learn them again"):
        Frequencies.merge([Frequencies.none(settings), Frequencies.none(other)])


@pytest.mark.parametrize(
    "wrong", [{"ngram": 1}, {"threshold": 0}, {"threshold": float("nan")}, {"unknown": 1}, {"sets": {"a": {"path": ""}}}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        DecontaminateSettings.model_validate(wrong)


def test_documents_are_returned_as_they_came(made):
    corpus, *_, results = made
    assert all(one is document for document, one in zip(corpus.documents, results, strict=True) if isinstance(one, Document))


STABLE = ["16800969437987559801", "7389545076920531537", "12776584700617222812", "18285885382406849639"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "packed", "a.jsonl.zst", "a.jsonl.xz", "a.jsonl.bz2", "a.parquet"])
def test_items_are_read_from_every_format_of_records(tmp_path, name):
    from maxlm.documents.stream import zstd

    rows = [{"q": QUESTION, "c": {"text": ["one", "two"]}}, {"q": "Why?", "c": {"text": ["three"]}}]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packs = {".gz": gzip.compress, "": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    if name == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(json.dumps(rows).encode() if name == "a.json" else packs.get(Path(name).suffix, bytes)(data))
    items, _ = read_items(DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / name), fields=("q",), options=("c.text",))}))
    assert [(one.number, one.question, one.options) for one in items] == [
        (0, (clean(QUESTION),), ("one", "two")),
        (1, (clean("Why?"),), ("three",)),
    ]


@pytest.mark.parametrize("fields", [(), ("q",)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pointer_is_no_set(tmp_path, fields, pack):
    """A pointer of Git LFS passed as a set of three lines."""
    (tmp_path / "set.jsonl").write_bytes(pack(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"))
    with pytest.raises(UserError, match=r"evaluation set s: .*git lfs pull"):
        read_items(DecontaminateSettings(sets={"s": EvalSet(path=str(tmp_path / "set.jsonl"), fields=fields)}))


CASES = Path(__file__).parents[1] / "cases" / "corpus"
NAMES = [
    "Ada",
    "Bruno",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hiro",
    "Ingrid",
    "Jamal",
    "Katya",
    "Luis",
    "Mina",
    "Nadia",
    "Omar",
    "Priya",
    "Rosa",
    "Sven",
    "Tomas",
    "Ursula",
]
PROBLEMS = (
    "{a} picked {m} apples in the morning and {n} in the afternoon, and gave {k} of them to {b}. How many apples does {a} have left?",
    "A train leaves {b} at {k} o'clock and travels at {m} km per hour for {n} hours before it stops. How far has the train gone by then?",
    "There are {m} students in {a}'s class, and each of them brings {k} pencils. If {n} pencils are lost, how many pencils are left?",
    "Who wrote the report on the {m} trees of {a} that {b} planted between {n} and {k}?",
)


def build_choices(folder: Path, items: list[dict], documents: list[str]) -> EvalIndex:
    """Index of multiple-choice items, with the frequencies of `documents`."""
    (folder / "set.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    settings = DecontaminateSettings(sets={"exam": EvalSet(path=str(folder / "set.jsonl"), fields=("question",), options=("choices",))})
    return EvalIndex.build(settings, Frequencies.learn(settings, [Document(f"{n}", text) for n, text in enumerate(documents)]))


def test_short_items_with_short_options(tmp_path):
    """Options of a word or two are part of no run of words: their weight is no reason to look past a question that stands verbatim."""
    items = [json.loads(line) for line in (CASES / "short_items.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in (CASES / "short_items_documents.jsonl").read_text().splitlines()]
    index = build_choices(tmp_path, items, texts)
    assert index.report() == {"exam": {"searched": 5}}
    assert [holds(index, text) for text in texts] == [any(item["question"] in text for item in items) for text in texts]


@pytest.mark.parametrize(
    "layout",
    [
        lambda question, options: "\n".join([*(f"- {one}" for one in options), f"These are the answers to: {question}"]),
        lambda question, options: "\n".join([question, *(f"Answer choice {n}: {one}" for n, one in enumerate(reversed(options)))]),
        lambda question, options: "> " + "\n> ".join(" ".join([question, *options]).split()),
        lambda question, options: question.replace("?", "？").replace(" ", "\u00a0") + "".join(f"（{one}）、" for one in options),
    ],
    ids=["answers first", "labels of words", "a word in each line", "other punctuation"],
)
@pytest.mark.parametrize("count", [4, 10])
def test_layouts_of_short_items(layout, count, tmp_path):
    """An item is found in each layout however many short options it has, and not where only its options stand."""
    options = [
        f"{one} {NAMES[n]}" for n, one in enumerate(("New", "Old", "Upper", "Lower", "Great", "Port", "Saint", "Fort", "Lake", "Mount"))
    ]
    item = {"question": "What is the capital of Peru?", "choices": options[:count]}
    index = build_choices(tmp_path, [item], [FILLER, FILLER * 2])
    assert holds(index, FILLER * 5 + layout(item["question"], item["choices"]) + FILLER * 5)
    assert not holds(index, FILLER * 5 + layout("Where did they go?", item["choices"]) + FILLER * 5)
    assert not holds(index, FILLER * 5 + layout("What is the capital of Fiji?", [f"{one} Suva" for one in "abcdefghij"[:count]]) + FILLER)


@pytest.mark.parametrize("stem", ["Which of the following is the right answer?", "Choose the correct option."])
def test_items_that_only_short_options_tell_apart(stem, tmp_path):
    """Each is found where a report says that it is searched, no other one of the same stem is; many of them take little time."""
    words = str.split("photon lepton quark boson gluon meson hadron baryon neutrino muon tau electron")

    def options(draw: random.Random, number: int) -> list[str]:
        return [f"{draw.choice(words)}{number} {draw.choice(words)}{number}" for _ in range(4)]

    draw = random.Random(5)
    items = [{"question": stem, "choices": options(draw, number)} for number in range(100)]
    others = [{"question": stem, "choices": options(draw, number)} for number in range(100, 130)]
    texts = ["\n".join([FILLER, one["question"], *(f"- {choice}" for choice in one["choices"]), FILLER]) for one in (*items, *others)]
    index = build_choices(tmp_path, items, texts)
    assert index.report() == {"exam": {"searched": 100}}
    decontaminate = Decontaminator(index)
    found = [getattr(one, "detail", {}).get("item") for one in decontaminate.run(Document(f"a#{n}", one) for n, one in enumerate(texts))]
    assert found == [*range(100), *[None] * 30]
    assert isinstance(decontaminate(Document("a#0", f"{stem} " * 2000)), Document)


def test_other_numbers_and_names_are_another_item(tmp_path):
    """Items of one template are told by their numbers and names, in digits or spelled out; the item itself, also reworded, is found."""
    draw = random.Random(3)

    def fill(template: str, numbers: list) -> str:
        a, b = draw.sample(NAMES, 2)
        m, n, k = draw.sample(numbers, 3)
        return template.format(a=a, b=b, m=m, n=n, k=k)

    kinds = (list(range(11, 400)), ["three", "four", "five", "six", "seven", "eight", "nine", "eleven", "twelve", "fifteen", "twenty"])
    items = [fill(template, numbers) for template in PROBLEMS for numbers in kinds for _ in range(4)]
    others = [fill(template, numbers) for template in PROBLEMS for numbers in kinds for _ in range(13)]
    index = build(tmp_path, *items)
    reworded = [item.replace("How", "Tell me: how").replace(" in the ", " during the ").replace("that it", "it") for item in items]
    assert all(holds(index, FILLER + item + FILLER) for item in (*items, *reworded))
    false = [one for one in others if holds(index, FILLER + one + FILLER)]
    assert len(false) <= 0.02 * len(others), false
