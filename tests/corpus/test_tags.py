"""A stage that tags and a selection by its tag afterwards give the documents that the stage leaves when it removes, byte for byte."""

import json

import pytest
from test_engine import digest, records, run, run_until, settings, write_corpus

from maxlm.base.errors import UserError
from maxlm.corpus import engine
from maxlm.corpus.document import PASSED, Document
from maxlm.corpus.files import line_of
from maxlm.corpus.settings import CorpusSettings

STAGES = ("length", "gopher_quality", "deduplicate", "repeated_lines", "repeated_substrings", "decontaminate")


def config(tmp_path, output, **changed):
    """Every kind of stage; the second filter changes nothing and removes some documents of those that the first one would remove."""
    base = settings(tmp_path, tmp_path / output).model_dump()
    base["filters"] = {
        "length": {"min_words": 12},
        "gopher_quality": {"min_words": 50, "max_words": 200, "min_stop_words": 0, "min_alphabetic_words": 0},
    }
    return CorpusSettings.model_validate(base | changed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a corpus, its run without tags in `remove`, and with all of them in `tag`; and both reports."""
    folder = tmp_path_factory.mktemp("tags")
    write_corpus(folder / "raw")
    words = [f"other{number}" for number in range(215)]  # a long document that a filter removes, of which a shorter one is a near copy
    lines = [json.dumps({"text": " ".join(some)}) + "\n" for some in (words, words[:190])]
    (folder / "raw" / "9.jsonl").write_text("".join(lines))
    return folder, run(config(folder, "remove")), run(config(folder, "tag", tag=STAGES))


def selected(folder, names):
    """Lines of the documents that no stage of `names` would have removed, without the tags."""
    kept = [one for one in records(folder / "documents") if all(one["metadata"].get(f"{name}.verdict") == PASSED for name in names)]
    for one in kept:
        one["metadata"] = {key: value for key, value in one["metadata"].items() if key.partition(".")[0] not in names}
    return b"".join(line_of(Document(**one)) for one in kept)


@pytest.mark.parametrize("names", [STAGES, ("deduplicate",), ("length", "decontaminate")], ids="+".join)
def test_tag_then_selection_is_removal(made, names):
    folder, _, _ = made
    if names != STAGES:
        run(config(folder, "some", tag=names))
    assert selected(folder / ("tag" if names == STAGES else "some"), names) == selected(folder / "remove", ())


def test_tags_are_counted_as_removals_are(made):
    folder, removing, tagging = made
    removed = {key: n for one in removing["passes"] for key, n in one["removed"].items()}
    tagged = {key: n for one in tagging["passes"] for key, n in one["tagged"].items()}
    assert tagged.pop("gopher_quality/gopher_too_few_words") > removed.pop("gopher_quality/gopher_too_few_words", 0), (
        "also of a document that the filter before tags"
    )
    assert removed.pop("read/not_json") == 3 and tagged == removed
    assert [one["removed"] for one in tagging["passes"]] == [{"read/not_json": 3}, {}, {}, {}, {}]
    page = (folder / "tag" / "report.html").read_text()
    assert "What stays with a tag" in page and "deduplicate/near_copy" in page


def test_a_tag_has_the_reason_and_its_figures(made):
    by_verdict = {
        (name, one["metadata"][f"{name}.verdict"]): one
        for one in records(made[0] / "tag" / "documents")
        for name in STAGES
        if f"{name}.verdict" in one["metadata"]
    }
    short = by_verdict["length", "length_too_few_words"]
    assert short["text"].startswith("short") and short["metadata"]["length.limit"] == 12 and short["metadata"]["length.value"] < 12
    assert "deduplicate.verdict" not in short["metadata"], "a document that is tagged takes no part in later searches"
    copy = by_verdict["deduplicate", "exact_copy"]["metadata"]
    assert copy["deduplicate.kept"] and copy["deduplicate.cluster_size"] == 2
    assert by_verdict["decontaminate", "contaminated"]["metadata"]["decontaminate.set"] == "bridges"


@pytest.mark.soak
def test_tags_have_the_same_bytes_for_any_workers(made):
    run(config(made[0], "b", tag=STAGES), workers=2)
    assert digest(made[0] / "tag") == digest(made[0] / "b")


def test_tags_have_the_same_bytes_after_kills(made, monkeypatch):
    folder, _, _ = made
    for limit in (1, 6):
        run_until(config(folder, "c", tag=STAGES), monkeypatch, limit)
    run(config(folder, "c"))  # without tags in between: nothing of it may stay
    run(config(folder, "c", tag=STAGES))
    assert digest(folder / "tag") == digest(folder / "c")


def test_a_later_run_selects_by_tags_and_replaces_its_own(made, tmp_path):
    folder, _, _ = made
    where = [f"{name}.verdict == passed" for name in STAGES]
    source = {"paths": [str(folder / "tag" / "documents")], "where": where}
    report = run(CorpusSettings.model_validate({"output": str(tmp_path / "next"), "sources": {"tagged": source}}))
    assert [one["text"] for one in records(tmp_path / "next" / "documents")] == [
        one["text"] for one in records(folder / "remove" / "documents")
    ]
    (removed,) = (one["removed"] for one in report["passes"])
    assert set(removed) == {"where/not_met"} and report["passes"][0]["came"]["tagged"][0] == 74
    assert {one["detail"]["condition"] for one in report["passes"][0]["examples"]["where/not_met"]} <= set(where)
    again = {"output": str(tmp_path / "again"), "sources": {"tagged": source | {"where": []}}, "filters": {"length": {}}, "tag": ["length"]}
    run(CorpusSettings.model_validate(again))
    assert {one["metadata"]["length.verdict"] for one in records(tmp_path / "again" / "documents")} == {PASSED}
    assert not any("length.limit" in one["metadata"] for one in records(tmp_path / "again" / "documents"))


def test_a_store_selects_by_tags(made):
    """`data prepare` keeps tags as metadata, and a mixture's `where` reads them."""
    from maxlm.config.conditions import parse
    from maxlm.data.sources import Fields, documents_in, find_files

    read = documents_in(find_files([str(made[0] / "tag" / "documents")]), Fields.of_text("text"))
    where = [parse(f"{name}.verdict == passed") for name in STAGES]
    kept = [one.text for one in read if all(condition.meets(one.about.fields.get(condition.field)) for condition in where)]
    assert kept == [one["text"] for one in records(made[0] / "remove" / "documents")]


def test_a_tag_of_no_stage_is_refused(tmp_path):
    write_corpus(tmp_path / "raw")
    with pytest.raises(
        UserError, match=r"tag: fineweb is no stage of this file \(length, gopher_quality, deduplicate, .*decontaminate\); name"
    ):
        engine.make_plan(config(tmp_path, "out", tag=["fineweb"]))
    with pytest.raises(ValueError, match="must be a condition"):
        CorpusSettings.model_validate({"output": "x", "sources": {"a": {"paths": ["a"], "where": ["nonsense"]}}})
    assert json.dumps(config(tmp_path, "out").model_dump(mode="json"))
