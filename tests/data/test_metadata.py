"""Metadata go along with their documents into the store, whatever their files are, and select and group exactly those they should."""

import json
import shutil
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from data_cases import END, prepare_config, some_texts, write_store
from pyarrow import parquet

from maxlm.base.errors import ConfigError, UserError
from maxlm.data.manifest import SPLITS
from maxlm.data.metadata import About, about
from maxlm.data.prepare import prepare
from maxlm.data.selection import Metadata
from maxlm.data.storage import DamagedStoreError
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import load_tokenizer

TEXTS = some_texts(90)
LANGUAGES = ["en", "de", "fr", None]


def record(number: int) -> dict:
    """A document as `maxlm corpus run` writes it."""
    language = LANGUAGES[number % 4]
    known = {"source": "web" if number % 3 else "books", "score": number / 90, "year": 1990 + number % 5, "checked": number % 2 == 0}
    if language is not None:
        known["language"] = language
    return {"id": f"crawl.warc#{number}", "text": TEXTS[number], "metadata": {**known, "url": f"https://example.org/{number}"}}


_prepared: list[Path] = []  # the store of all tests, once one has asked for it: the shards of a fixture of the module would not be small


@pytest.fixture
def store(tmp_path: Path, tmp_path_factory) -> str:
    """A copy of the store that the first test prepares."""
    if not _prepared:
        folder = tmp_path_factory.mktemp("metadata")
        source = folder / "documents.jsonl"
        source.write_text("\n".join(json.dumps(record(number)) for number in range(90)))
        prepare(prepare_config(folder / "store", source), progress=False)
        _prepared.append(folder / "store")
    shutil.copytree(_prepared[0], tmp_path / "store")
    return str(tmp_path / "store")


def rows(store: str, split: str) -> list[dict]:
    opened = TokenStore(store, split)
    found = Metadata(opened)
    return [found.row(document) for document in range(opened.size.documents)]


def test_metadata_are_those_of_the_document_they_stand_beside(store):
    tokenizer, seen = load_tokenizer(f"{store}/tokenizer.json", "<|endoftext|>"), 0
    for split in SPLITS:
        opened = TokenStore(store, split)
        for document, row in enumerate(rows(store, split)):
            start, stop = opened.read_documents(document, document + 2).tolist()
            expected = record(int(row["id"].partition("#")[2]))
            assert tokenizer.decode(opened.read(start, stop)) == expected["text"]
            assert row == {"id": expected["id"], **expected["metadata"], "tokens": stop - start}
            seen += 1
    assert seen == 90


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        (["language == en"], lambda r: r.get("language") == "en"),
        (["language != en"], lambda r: r.get("language", "en") != "en"),  # a document without the field meets no condition
        (["language in de | fr"], lambda r: r.get("language") in ("de", "fr")),
        (["score >= 0.5"], lambda r: r["score"] >= 0.5),
        (["year > 1991.5"], lambda r: r["year"] > 1991.5),
        (["year in 1990 | 1994"], lambda r: r["year"] in (1990, 1994)),
        (["checked == true"], lambda r: r["checked"]),
        (["tokens < 60", "source == web"], lambda r: r["tokens"] < 60 and r["source"] == "web"),
        (["id == crawl.warc#7"], lambda r: r["id"] == "crawl.warc#7"),
    ],
)
def test_conditions_choose_exactly_the_documents_that_meet_them(store, where, holds):
    some = 0
    for split in SPLITS:
        chosen = Metadata(TokenStore(store, split)).chosen(where, "where")
        assert chosen.tolist() == [holds(row) for row in rows(store, split)]
        some += chosen.sum()
    assert some


def test_groups_are_the_values_of_a_field(store):
    codes, names = Metadata(TokenStore(store)).groups("language", "by")
    assert names == ["", "de", "en", "fr"] and [names[code] for code in codes] == [row.get("language", "") for row in rows(store, "train")]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("langage == en", "no field langage; the nearest is language"),
        ("zzz == en", r"no field zzz; they have .*language, score"),
        ("score == high", "the field is a number"),
        ("checked > true", "true or false"),
    ],
)
def test_a_condition_that_cannot_be_is_one_line(store, where, says):
    with pytest.raises(ConfigError, match=rf"x\.where = .*{says}"):
        Metadata(TokenStore(store)).chosen([where], "x.where")


def test_a_field_of_too_many_values_does_not_split_a_store(store, monkeypatch):
    monkeypatch.setattr("maxlm.data.selection.MOST_GROUPS", 3)
    with pytest.raises(ConfigError, match="more than 3 values"):
        Metadata(TokenStore(store)).groups("url", "by")


def test_fields_of_changing_kinds_are_kept_as_the_kind_that_holds_both(tmp_path):
    """Also where they change from file to file: 16 documents are in one here."""
    values = (
        [number if number < 40 else number + 0.5 for number in range(60)],
        [number if number < 5 else f"v{number}" for number in range(60)],
    )
    about_them = [About(str(n), {"number": values[0][n], "mixed": values[1][n]}) for n in range(60)]
    found = Metadata(TokenStore(write_store(tmp_path / "s", [np.array([END])] * 60, about=about_them)))
    assert (found.kinds["number"], found.kinds["mixed"]) == ("float", "text")
    assert found.chosen(["number >= 39.5"], "").sum() == 20 and found.chosen(["mixed in 3 | v7 | v50"], "").sum() == 3


def test_odd_numbers_are_kept_and_compared_as_numbers_or_refused(tmp_path):
    """Whole numbers beyond 2^53 beside others, and beyond 64 bits; a number is not compared with texts in the order of letters."""
    fields = [{"a": 2**60 + 1, "b": 7, "c": "n/a"}, {"a": 0.5, "b": 2**64, "c": 10}, {"a": 1, "b": 3, "c": 9}]
    about = [About(str(n), dict(about_fields(one))) for n, one in enumerate(fields)]
    found = Metadata(TokenStore(write_store(tmp_path / "s", [np.array([END])] * 3, about=about)))
    assert found.chosen(["a >= 1"], "").tolist() == [True, False, True]
    assert found.chosen(["a <= 99999999999999999999"], "").all()
    assert found.chosen([f"b in 7 | {2**64}"], "").tolist() == [True, True, False]
    with pytest.raises(ConfigError, match=r"text and numbers, and text comes in the order of its letters .*`c >= 5`"):
        found.chosen(["c >= 5"], "where")


def about_fields(record):
    return about("x", {"text": "", **record}, frozenset({"text"})).fields


def test_a_column_that_python_has_no_values_for_is_left_out_and_named(tmp_path, caplog):
    far = pyarrow.array([10**13, 0], pyarrow.timestamp("s"))
    file = tmp_path / "texts" / "c.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.table({"text": TEXTS[:2], "language": ["en", "de"], "time": far}), file)
    prepare(prepare_config(tmp_path / "store", file.parent), progress=False)
    assert "the column time is left out of the metadata of 2 documents" in caplog.text
    assert sorted(row["language"] for split in SPLITS for row in rows(str(tmp_path / "store"), split)) == ["de", "en"]


def test_a_record_gives_its_scalars_and_those_of_its_metadata():
    fields = {"text": "t", "id": 7, "url": "u", "list": [1], "none": None, "nan": float("nan"), "huge": 2**70, "long": "x" * 5000}
    fields |= {"metadata": {"url": "inner", "language": "de", "tokens": 3, "deep": {"a": 1}}, "day": date(2024, 2, 3), "half": "\ud800"}
    fields["at"] = datetime(2024, 2, 3, 4, 5)
    fields |= {"price": Decimal("2.50")}
    known = {
        "huge": str(2**70),
        "price": 2.5,
        "url": "u",
        "language": "de",
        "day": "2024-02-03",
        "at": "2024-02-03T04:05:00",
        "half": "\\ud800",
    }
    assert about("file#1", fields, frozenset({"text"})) == About("7", known)
    assert about("file#1", {"text": "t"}, frozenset({"text"})) == About("file#1", {})


def test_documents_without_a_name_are_named_by_file_and_number(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[1:30]))
    times = pyarrow.array([1_700_000_000_123_456_789], pyarrow.timestamp("ns", "UTC"))
    columns = {"text": [TEXTS[31]], "language": ["en"], "vector": [[1.0, 2.0]], "metadata": [{"licence": "mit"}], "time": times}
    parquet.write_table(pyarrow.table(columns), folder / "c.parquet")
    prepare(prepare_config(tmp_path / "store", folder), progress=False)
    found = {row["id"]: row for split in SPLITS for row in rows(str(tmp_path / "store"), split)}
    assert set(found) == {"texts/a.txt", *(f"texts/b.jsonl#{n}" for n in range(1, 30)), "texts/c.parquet#1"}
    last = found["texts/c.parquet#1"]
    assert (last["language"], last["licence"], last["time"]) == ("en", "mit", "2023-11-14T22:13:20.123456+00:00") and "vector" not in last


def test_damage_is_named(store):
    file = Path(store) / "train/metadata/0.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedStoreError, match=r"train/metadata/0.parquet does not match"):
        Metadata(TokenStore(store)).row(0)
    file.unlink()
    with pytest.raises(DamagedStoreError, match=r"0.parquet is missing"):
        Metadata(TokenStore(store)).chosen(["year == 1990"], "")
    (Path(store) / "metadata.json").write_text("{}")
    with pytest.raises(DamagedStoreError, match=r"metadata.json does not match"):
        Metadata(TokenStore(store))


def test_a_store_without_metadata_says_so(tmp_path):
    with pytest.raises(UserError, match=r"has no metadata.*prepare it again"):
        Metadata(TokenStore(write_store(tmp_path / "s", [np.array([1, END])])))
