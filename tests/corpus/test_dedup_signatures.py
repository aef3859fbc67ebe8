"""Words, signatures and their files: the rule of normalisation, MinHash's probability, and bytes that depend on the input alone."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.corpus.document import Document

pytest.importorskip("duckdb")
from maxlm.corpus.dedup import signatures as minhash, words
from maxlm.corpus.dedup.settings import DedupSettings, MinHashSettings
from maxlm.corpus.dedup.signatures import signatures as of_documents, write_signatures
from maxlm.corpus.dedup.tables import row_groups

TEXTS = [
    "Don't  STOP,\tnow!",
    "“Don’t stop”… now",
    "a+b=c",
    "中文 字",
    "ไทย",
    "",
    "...",
    "!!",
    "e\u0301te",
    "Éte",
    "Stra\u00dfe",
    "\ud800 x",
    "\x00NUL",
    "ΣΑΣ σας",
]


def signatures(ids, texts, settings):
    return of_documents([Document(id, text) for id, text in zip(ids, texts, strict=True)], settings)


def exact(texts: list[str]) -> list[tuple[int, int]]:
    table = signatures([str(index) for index in range(len(texts))], texts, DedupSettings(minhash=None))
    return list(zip(table["exact_lo"].to_pylist(), table["exact_hi"].to_pylist(), strict=True))


def test_normalised_text_follows_the_rule():
    assert [words.normalise(text) for text in ("Don't  STOP,\tnow!", "«Ça»\u00a0\u200bVA", "a + b", "e\u0301", "")] == [
        "don t stop now",
        "ça va",
        "a + b",
        "é",
        "",
    ]


def test_exact_hash_is_equal_where_the_normalised_text_is_and_nowhere_else():
    hashes = exact(TEXTS)
    for left, one in zip(TEXTS, hashes, strict=True):
        for right, other in zip(TEXTS, hashes, strict=True):
            same = words.normalise(left) == words.normalise(right) and (words.normalise(left) != "" or left == right)
            assert (one == other) == same, (left, right)


def test_hash_does_not_depend_on_the_other_documents_or_on_the_block(monkeypatch: pytest.MonkeyPatch):
    texts = [*TEXTS, "word " * 400 + "é" * 30, "x y z " * 300]
    settings = DedupSettings()
    together = signatures([str(i) for i in range(len(texts))], texts, settings).to_pylist()
    for size in (1, 50, 1000):
        monkeypatch.setattr(words, "BLOCK_CHARS", size)
        assert signatures([str(i) for i in range(len(texts))], texts, settings).to_pylist() == together
    alone = [signatures([str(i)], [text], settings).to_pylist()[0] for i, text in enumerate(texts)]
    assert alone == together


def test_exact_hash_of_a_long_text_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    texts = ["Many, words!  here " * 20 + "..", "mañana 中 文 \u2028 + " * 20, "many words here " * 20]
    whole = exact(texts)
    monkeypatch.setattr(words, "LONGEST", 30)
    for size in (1, 7, 64):
        monkeypatch.setattr(words, "BLOCK_CHARS", size)
        assert exact(texts) == whole
    assert whole[0] == whole[2]


def test_golden_signature():
    """A change of these numbers needs a new `engine.FORMAT`."""
    row = signatures(["a"], ["The quick brown fox jumps over the lazy dog, Ünïcode 中文."], DedupSettings()).to_pylist()[0]
    assert (row["exact_lo"], row["exact_hi"], row["bands"][:2], row["sample"][:2], len(row["sample"])) == GOLDEN


GOLDEN = (6913475846290718465, 14251092092231728957, [10997691696482256036, 14626627113891010786], [776615684, 1078065879], 8)


def spread(values: np.ndarray) -> np.ndarray:
    return np.array([words.scalar_mix(int(value)) for value in values], np.uint64)


@pytest.mark.parametrize("size", [20, 200])
def test_slots_agree_with_the_probability_of_jaccard(size: int):
    pairs, rng = 200, np.random.default_rng(0)
    for shared in (0.5, 0.8, 0.95):
        both = round(2 * size * shared / (1 + shared))
        sets = []
        for _ in range(pairs):
            base = rng.integers(0, 2**63, 2 * size - both).astype(np.uint64)
            sets += [base[:size], np.concatenate((base[:both], base[size:]))]
        flat, offsets = spread(np.concatenate(sets)), np.append(0, np.cumsum([len(one) for one in sets]))
        slots = minhash.sketch(flat, offsets, 160).reshape(pairs, 2, 160)
        truth = both / (2 * size - both)
        assert abs((slots[:, 0] == slots[:, 1]).mean() - truth) < 0.012


def test_similarity_from_samples_is_exact_below_their_size_and_close_above():
    rng = np.random.default_rng(1)
    for size, tolerance in ((4096, 1e-12), (512, 0.1)):
        base = spread(rng.permutation(3000))
        left, right = base[:2000], base[500:]
        one, two = (minhash.samples(side, np.array([0, len(side)]), size) for side in (left, right))
        assert abs(minhash.jaccard(one, two, size)[0] - 1500 / 3000) <= tolerance


def test_file_of_signatures_is_the_same_for_any_hash_seed(tmp_path: Path):
    program = (
        "import sys, pathlib; from maxlm.corpus.document import Document; from maxlm.corpus.dedup.settings import DedupSettings\n"
        "from maxlm.corpus.dedup.signatures import write_signatures\n"
        "write_signatures([Document(str(i), f'text number {i} has some more words é' * 3) for i in range(99)],\n"
        "  pathlib.Path(sys.argv[1]), DedupSettings())"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    documents = [Document(str(i), f"text number {i} has some more words é" * 3) for i in range(99)]
    write_signatures(documents, tmp_path / "here", DedupSettings())
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_damage_and_ids_that_are_no_unicode_are_one_line(tmp_path: Path):
    path, settings = tmp_path / "a.parquet", DedupSettings()
    write_signatures([Document("a", "one two three four five six")], path, settings)
    assert next(row_groups(path, ["id"])).num_rows == 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a whole Parquet file"):
        next(row_groups(path, ["id"]))
    with pytest.raises(UserError, match="not valid Unicode"):
        write_signatures([Document("\ud800", "x")], tmp_path / "b.parquet", settings)
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_near_copies_are_found_at_the_promised_rate():
    """Candidates: >= 95% of pairs at Jaccard 0.8, by the default bands and rows, in texts of known n-gram sets."""
    rng, settings, found, pairs = random.Random(3), MinHashSettings(), 0, 300
    assert 1 - (1 - 0.8**settings.rows) ** settings.bands > 0.97
    for _ in range(pairs):
        left = [f"w{rng.randrange(10**6)}" for _ in range(204)]  # 200 5-grams
        right = left[:182] + [f"v{rng.randrange(10**6)}" for _ in range(22)]  # 178 of 222 are shared: 0.802
        table = signatures(["a", "b"], [" ".join(left), " ".join(right)], DedupSettings())
        bands = np.array(table["bands"].to_pylist())
        found += bool((bands[0] == bands[1]).any())
    assert found / pairs >= 0.95
