"""Repeated runs of words are those that a suffix array finds, and go from all places but the first, whatever the shards."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxlm.corpus.document import Document

pytest.importorskip("duckdb")
import pyarrow.parquet as pq

from maxlm.corpus.dedup import substrings, words
from maxlm.corpus.dedup.settings import SubstringSettings

K = 10
SETTINGS = SubstringSettings(min_words=K)
Place = tuple[int, int]


def corpus(seed: int) -> list[Document]:
    """Texts of a small vocabulary with passages in common, of which some overlap, repeat themselves or begin and end a text."""
    rng = random.Random(seed)
    passages = [[f"w{rng.randrange(400)}" for _ in range(rng.randrange(5, 40))] for _ in range(8)]
    passages += [["ha"] * 35, ["one", "two", "three"] * 12, list("東京都は日本の首都であり世界最大級の都市")]
    documents = []
    for number in range(25):
        text: list[str] = []
        for _ in range(rng.randrange(0, 6)):
            one = rng.choice(passages)
            start = rng.randrange(len(one)) if rng.random() < 0.5 else 0
            text += [*one[start : start + rng.randrange(1, 60)], *(f"own{rng.randrange(10**6)}" for _ in range(rng.randrange(0, 8)))]
        documents.append(
            Document(f"{rng.randrange(10**6)}#{number}", "".join(word + rng.choice([" ", ", ", "\n", ".  "]) for word in text))
        )
    return documents


def cleaned(documents: Sequence[Document], folder: Path, shards: int = 1) -> dict[str, str]:
    folder.mkdir()
    files, outputs = [folder / f"{i}" for i in range(shards)], [folder / f"{i}.out" for i in range(shards)]
    for shard, path in enumerate(files):
        substrings.write_windows(documents[shard::shards], path, SETTINGS)
    substrings.find_runs(files, outputs, SETTINGS, work=folder / "work")
    out = {}
    for shard, path in enumerate(outputs):
        rows = {row["row"]: row for row in pq.read_table(path).to_pylist()}
        for number, one in enumerate(documents[shard::shards]):
            row = rows.get(number)
            assert row is None or row["id"] == one.id
            out[one.id] = one.text if row is None else substrings.cut(one.text, row["firsts"], row["ends"])[0]
    return out


def oracle(documents: Sequence[Document]) -> dict[str, list[str]]:
    """Words that stay, by a suffix array: a place goes on as an earlier one for the longest common prefix with any of them."""
    texts = [words.normalise(one.text).split() for one in documents]
    texts = [[char for word in text for char in (word if "\u3000" < word[0] < "\ua000" else [word])] for text in texts]
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].text), documents[i].id.encode()))
    places: list[Place] = [(rank, start) for rank, i in enumerate(order) for start in range(len(texts[i]))]
    suffixes = sorted(places, key=lambda place: texts[order[place[0]]][place[1] :])
    gone: set[Place] = set()
    for group in _groups(suffixes, lambda place: tuple(texts[order[place[0]]][place[1] :][:K])):
        first = min(group)
        for rank, start in set(group) - {first}:
            begin = max(start, first[1] + K) if rank == first[0] else start
            gone |= {(rank, word) for word in range(begin, start + K)}
    return {documents[i].id: [word for start, word in enumerate(texts[i]) if (rank, start) not in gone] for rank, i in enumerate(order)}


def _groups(suffixes, prefix):
    """Neighbours in the suffix array whose first K words are the same."""
    group = suffixes[:1]
    for before, after in itertools.pairwise(suffixes):
        if prefix(before) != prefix(after):
            yield from [group] if len(prefix(group[0])) == K else []
            group = []
        group.append(after)
    yield from [group] if group and len(prefix(group[0])) == K else []


def as_words(text: str) -> list[str]:
    starts = words.locate_words(text)[1].tolist()
    return [text[start:end].strip(" ,.\n") for start, end in itertools.pairwise([*starts, len(text)])]


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_is_what_a_suffix_array_leaves_for_any_shards(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(substrings, "AT_ONCE", (1 << 20, 15, 40, 200)[seed])  # windows of a row: documents in several ones
    documents = corpus(seed)
    expected = oracle(documents)
    found = cleaned(documents, tmp_path / "a")
    assert {id: as_words(text) for id, text in found.items()} == expected
    assert sum(map(len, expected.values())) < sum(len(as_words(one.text)) for one in documents)
    documents.reverse()
    assert cleaned(documents, tmp_path / "b", shards=7) == found
    if seed == 0:
        assert cleaned(documents, tmp_path / "c", shards=30) == found  # some are empty


def test_every_run_of_words_is_still_there_and_none_that_was_whole_is_there_twice(tmp_path: Path):
    """What is lost is nothing: all words of the corpus stay somewhere, and a passage of several documents in one of them."""
    rng = random.Random(5)
    passage = [f"shared{rng.randrange(1000)}" for _ in range(60)]
    documents = [
        Document(f"{i}", " ".join([*(f"a{i}-{rng.random()}" for _ in range(i)), *passage, *(f"b{rng.random()}" for _ in range(20))]))
        for i in range(5)
    ]
    found = cleaned(documents, tmp_path / "a")
    assert found["4"] == documents[4].text  # the longest
    assert all("shared" not in found[f"{i}"] and len(found[f"{i}"].split()) == i + 20 for i in range(4))


def test_a_text_that_repeats_itself_is_left_once(tmp_path: Path):
    (text,) = cleaned([Document("a", "la " * 500)], tmp_path / "a").values()
    assert text.split() == ["la"] * K
    words_ = [f"w{i}" for i in range(25)]
    (text,) = cleaned([Document("a", " ".join(words_ * 4))], tmp_path / "b").values()
    assert text.split() == words_


def test_nothing_is_cut_below_the_length_or_across_documents(tmp_path: Path):
    run = [f"w{i}" for i in range(K)]
    texts = (
        [" ".join([f"x{i}", *run[: K - 1], f"y{i}"]) for i in range(4)]
        + [" ".join(run[:5]), " ".join(run[5:])]
        + ["", " ", "...", "\u00e9"]
    )
    documents = [Document(f"{i}", text) for i, text in enumerate(texts)]
    assert cleaned(documents, tmp_path / "a") == {one.id: one.text for one in documents}
    assert cleaned([], tmp_path / "b") == {}


def test_words_of_a_long_text_are_those_of_its_pieces(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(4)
    text = "".join(rng.choice(["word ", "Wort, ", "ünï\n", "東京", "x" * 9, " ", "\ud800 ", "\0"]) for _ in range(500))
    hashes, starts = words.locate_words(text)
    whole = next(words.hash_words([text]))[1].hashes
    assert hashes.tolist() == whole.tolist()
    windows = substrings.window_hashes(text, K).tolist()
    monkeypatch.setattr(words, "BLOCK_CHARS", 200)
    assert substrings.window_hashes(text, K).tolist() == windows
    again, places = words.locate_words(text)
    assert again.tolist() == hashes.tolist()
    assert places.tolist() == starts.tolist()
