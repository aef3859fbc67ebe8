"""Repeated lines and paragraphs: removed from all documents but the first in keep order, whatever the shards."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxlm.corpus.document import Document

pytest.importorskip("duckdb")
import pyarrow.parquet as pq

from maxlm.corpus.dedup import lines, words
from maxlm.corpus.dedup.settings import RepeatSettings

SETTINGS = RepeatSettings(min_length=5, max_documents=2)


def corpus(unit: lines.Unit) -> list[Document]:
    rng, separator = random.Random(1), "\n" if unit == "lines" else "\n \n\n"
    common = [f"shared line {i}" for i in range(15)] + ["tiny", "", "Shared  LINE 1!"]
    return [
        Document(
            f"{rng.randrange(10**6)}",
            separator.join(rng.choice([f"own line {i} {rng.randrange(9)}", *common]) for _ in range(rng.randrange(1, 9))),
        )
        for i in range(60)
    ]


def cleaned(documents: Sequence[Document], folder: Path, unit: lines.Unit, shards: int) -> dict[str, str]:
    folder.mkdir()
    files, outputs = [folder / f"{i}" for i in range(shards)], [folder / f"{i}.out" for i in range(shards)]
    out = {}
    for shard, path in enumerate(files):
        lines.write_occurrences(documents[shard::shards], path, SETTINGS, unit)
    lines.find_repeated(files, outputs, SETTINGS, work=folder / "work")
    for shard, path in enumerate(outputs):
        gone = {row["id"]: row["positions"] for row in pq.read_table(path).to_pylist()}
        out.update({one.id: lines.without(one.text, gone.get(one.id, ()), unit) for one in documents[shard::shards]})
    return out


def oracle(documents: Sequence[Document], unit: lines.Unit) -> dict[str, str]:
    parts = {one.id: lines.split(one.text, unit) for one in documents}
    counts = Counter(key for one in parts.values() for key in {words.normalise(part) for part in one if len(part.strip()) >= 5})
    seen, out = set(), {}
    for one in sorted(documents, key=lambda one: (-len(one.text), one.id.encode())):
        kept = []
        for part in parts[one.id]:
            key = words.normalise(part)
            if len(part.strip()) < 5 or counts[key] <= 2 or key not in seen:
                kept.append(part)
            if len(part.strip()) >= 5:
                seen.add(key)
        out[one.id] = "".join(kept)
    return out


@pytest.mark.parametrize("unit", ["lines", "paragraphs"])
def test_repeated_lines_stay_once_for_any_shards(unit: lines.Unit, tmp_path: Path):
    documents = corpus(unit)
    expected = oracle(documents, unit)
    assert expected != {one.id: one.text for one in documents}
    assert cleaned(documents, tmp_path / "a", unit, 1) == expected
    documents.reverse()
    assert cleaned(documents, tmp_path / "b", unit, 7) == expected


@pytest.mark.parametrize("unit", ["lines", "paragraphs"])
@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "\n\na\n\n\nb\n", "a\r\n\r\nb", " \n \n", "a\n\nb\n\n"])
def test_parts_joined_are_the_text(text: str, unit: lines.Unit):
    assert "".join(lines.split(text, unit)) == text
    assert lines.without(text, (), unit) == text
