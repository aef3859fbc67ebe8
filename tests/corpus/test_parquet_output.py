"""Parquet output: the documents of JSON lines, in typed columns, the same in all files, and the same bytes after kills."""

import json

import pyarrow
import pytest
from pyarrow import parquet
from test_engine import digest, records, run, run_until, settings, write_corpus

from maxlm.base.errors import UserError
from maxlm.corpus import engine
from maxlm.corpus.files import read
from maxlm.corpus.settings import CorpusSettings
from maxlm.data.sources import Fields, documents_in, find_files
from maxlm.documents.files import find_once


def config(folder, output, **changed):
    """Files in which the same field is missing, whole, a fraction, a truth value or a text."""
    raw = folder / "raw"
    if not raw.exists():
        write_corpus(raw)
        fields = [
            {"score": 3, "url": "https://a.b/c", "ok": True},
            {"score": 0.5, "deep": {"a": 1}, "order": "text"},
            {"ok": "yes", "n": 2**70, "order": True, "title": "é\udc80"},
        ]
        for number, more in enumerate(fields):
            lines = [
                {"text": f"text {number} {n} of some words that no other document has, é and 🙂 " + str(hash((number, n))) * 4, **more}
                for n in range(3)
            ]
            (raw / f"{number + 5}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = settings(folder, folder / output).model_dump()
    return CorpusSettings.model_validate(base | {"format": "parquet"} | changed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    run(config(folder, "lines", format="jsonl"))
    run(config(folder, "rows"))
    return folder


def test_rows_are_the_lines_with_one_kind_a_field(made):
    files = sorted((made / "rows" / "documents").iterdir())
    assert [file.name for file in files] == [f"00000{n}.parquet" for n in range(6)]
    (schema,) = {str(parquet.read_schema(file)) for file in files}
    kinds = {field.name: str(field.type) for field in parquet.read_schema(files[0]).field("metadata").type}
    assert kinds == {
        "license": "string", "n": "string", "ok": "string", "order": "string", "score": "double", "source": "string",
        "title": "string", "url": "string",
    }, schema  # fmt: skip
    rows = parquet.read_table(made / "rows" / "documents").to_pylist()
    wanted = records(made / "lines" / "documents")
    assert [(row["id"], row["text"]) for row in rows] == [(one["id"], one["text"]) for one in wanted] and len(rows) > 60
    for row, one in zip(rows, wanted, strict=True):
        known = {name: value for name, value in row["metadata"].items() if value is not None}
        shown = {
            name: str(value).lower() if kinds[name] == "string" and type(value) is bool else value
            for name, value in one["metadata"].items()
        }
        assert known == shown


def in_text(fields):
    """Values as text, whole numbers as fractions: the kinds of a column."""
    return {name: str(float(value)) if type(value) is int else str(value).lower() for name, value in fields.items()}


def test_both_doors_read_rows_as_lines(made):
    def prepared(name):
        found = documents_in(find_files([str(made / name / "documents")]), Fields.of_text("text"))
        return [(one.text, one.about.id, in_text(one.about.fields)) for one in found]

    def cleaned(name):
        found = [one for file in find_once([str(made / name / "documents")]) for one in read(file.path)]
        return [(one.text, in_text(one.metadata)) for one in found]

    assert prepared("rows") == prepared("lines") and cleaned("rows") == cleaned("lines")
    assert {one.metadata["score"] for one in read(str(made / "rows" / "documents" / "000004.parquet"))} == {0.5}


@pytest.mark.soak
def test_rows_have_the_same_bytes_for_any_workers(made):
    run(config(made, "b"), workers=2)
    assert digest(made / "rows") == digest(made / "b")


def test_rows_have_the_same_bytes_after_kills(made, monkeypatch):
    for limit in (7, 23):
        run_until(config(made, "c"), monkeypatch, limit)
    run(config(made, "c", format="jsonl"))
    assert digest(made / "c") == digest(made / "lines")
    (made / "c" / "documents" / ".000000.parquet.0123456789abcdef").write_bytes(b"left by a kill")
    run(config(made, "c"))
    assert digest(made / "rows") == digest(made / "c")


def test_row_groups_are_bounded_and_empty_files_are_files(made, monkeypatch):
    monkeypatch.setattr("maxlm.corpus.files.GROUP_ROWS", 7)
    run(config(made, "small"))
    sizes = [parquet.ParquetFile(file).metadata for file in sorted((made / "small" / "documents").iterdir())]
    assert all(one.row_group(n).num_rows <= 7 for one in sizes for n in range(one.num_row_groups)) and sizes[0].num_row_groups > 1
    whole = parquet.read_table(made / "rows" / "documents")
    assert parquet.read_table(made / "small" / "documents").equals(whole)
    run(config(made, "few", filters={"length": {"max_words": 60}}))
    few = [parquet.read_table(file) for file in sorted((made / "few" / "documents").iterdir())]
    assert 0 in map(len, few) and pyarrow.concat_tables(few).num_rows > 0
    assert list(documents_in(find_files([str(made / "few" / "documents")]), Fields.of_text("text")))


def test_a_foreign_table_in_the_output_is_refused(made):
    run(config(made, "foreign"))
    (made / "foreign" / "documents" / "mine.parquet").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"such as documents/mine\.parquet, which would be lost"):
        engine.make_plan(config(made, "foreign"))


def test_datasets_reads_the_rows(made):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("parquet", data_files=str(made / "rows" / "documents" / "*.parquet"), cache_dir=str(made / "cache"))[
        "train"
    ]
    assert found["text"][:] == [one["text"] for one in records(made / "lines" / "documents")]
