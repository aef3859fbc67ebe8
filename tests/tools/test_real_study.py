"""The study of a real corpus: held-out text is on neither side of training, in no copy."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import real_study
from real_study import AFTER, BEFORE, excerpts, read_lines, split

SOURCES = {"first": 600, "second": 300}


def shard(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    with real_study.zstd.open(path, "wb") as file:
        file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))


@pytest.fixture
def study(tmp_path):
    """Documents in two sources, each third one with a copy; cleaning removes the copy, and makes the others lower case."""
    records, copies = [], []
    for source, count in SOURCES.items():
        for number in range(count):
            id = f"raw/{source}/0000.jsonl#{number}"
            first = number - 1 if number % 3 == 1 else number
            records.append({"id": id, "text": f"Text {source} {first}. " * 20, "metadata": {}})
            if first != number:
                copies.append((len(records), len(records) - 1))
    shard(tmp_path / f"corpus/{BEFORE}/documents/000000.jsonl.zst", records)
    gone = {number for number, _ in copies}
    kept = [{**record, "text": record["text"].lower()} for number, record in enumerate(records, 1) if number not in gone]
    shard(tmp_path / f"corpus/{AFTER}/documents/000000.jsonl.zst", kept)
    name = f"corpus/{BEFORE}/documents/000000.jsonl.zst"
    removed = [{"id": f"{name}#{number}", "detail": {"cluster": f"{name}#{stays}"}} for number, stays in copies]
    shard(tmp_path / "corpus/copies/removed/deduplicate/000000.jsonl.zst", removed)
    for state in (BEFORE, AFTER):
        report = {"passes": [{"left": {source: [count, 500 * count] for source, count in SOURCES.items()}}]}
        (tmp_path / f"corpus/{state}/report.json").write_text(json.dumps(report))
    split(tmp_path)
    return tmp_path


def texts(folder, part, source):
    return [json.loads(line)["text"] for line in read_lines(folder / f"text/{part}/{source}.jsonl.zst")]


@pytest.mark.parametrize("source", SOURCES)
def test_no_copy_of_held_out_text_is_trained_on(study, source):
    held = {state: texts(study, f"held-{state}", source) for state in (BEFORE, AFTER)}
    seen = {state: set(texts(study, f"train-{state}", source)) for state in (BEFORE, AFTER)}
    assert len(held[BEFORE]) == len(set(held[BEFORE])) and 0.08 < len(held[BEFORE]) / SOURCES[source] < 0.35
    assert [text.lower() for text in held[BEFORE]] == held[AFTER]  # the same documents, in the same order
    for state in (BEFORE, AFTER):
        assert not seen[state] & set(held[state])
        assert {text.lower() for text in seen[state] | set(held[state])} == {text.lower() for text in seen[BEFORE] | set(held[BEFORE])}


@pytest.mark.parametrize("length", [0, 10, 4000, 4001, 250_000, 3_000_000])
def test_excerpts_are_parts_of_the_text(length):
    """Some of each part of a long text, all of a short one, and the same each time."""
    text = "".join(f"{number} line\n" for number in range(length // 6 + 2))[:length]
    found = excerpts(text, "key")
    assert found == excerpts(text, "key") and all(part in text and len(part) <= 4000 for part in found)
    assert len(found) == max(1, min(length // 100_000, 16)) and (length > 4000 or found == [text])
