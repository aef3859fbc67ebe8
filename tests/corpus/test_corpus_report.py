"""The report of a corpus adds up with the files beside it, and shows the text of strangers as text."""

import json
import random
import re

import pytest

from maxlm.base.errors import UserError
from maxlm.corpus import command, engine
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.executors.local import LocalExecutor
from maxlm.corpus.files import read_shard
from maxlm.corpus.page import page
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.tasks import Tally, add, total

ATTACK = "<script>alert(1)</script> & \"quotes\" 'too'"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run over two sources, with copies in clusters of known sizes and a text that would like to be HTML."""
    folder = tmp_path_factory.mktemp("report")
    rng = random.Random(1)
    words = [f"word{number}" for number in range(2000)]
    texts = [" ".join(rng.choices(words, k=60)) for _ in range(30)]
    for name, some in {"a": [*texts[:20], texts[0], texts[0], ATTACK], "b": [*texts[20:], texts[1]]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some) + "no JSON <b>\n")
    config = CorpusSettings.model_validate(
        {
            "output": str(folder / "out"),
            "sources": {name: {"paths": [str(folder / f"{name}.jsonl")]} for name in ("a", "b")},
            "filters": {"length": {"min_words": 12}},
            "deduplicate": {},
            "run": {"task_bytes": 1, "memory_mb": 64},
        }
    )
    engine.run(engine.make_plan(config), LocalExecutor(1, lambda line: None))
    return folder / "out"


def test_counts_are_those_of_the_files(finished):
    report = json.loads((finished / "report.json").read_text())
    kept = [record for path in sorted((finished / "documents").iterdir()) for record in read_shard(path)]
    last = report["passes"][-1]
    assert total(last["left"]) == (len(kept), sum(len(record["text"].encode()) for record in kept))
    assert {name: count for name, (count, _) in last["left"].items()} == {
        name: sum(record["metadata"]["source"] == name for record in kept) for name in ("a", "b")
    }
    assert sum(last["lengths_left"].values()) == len(kept)
    assert total(report["passes"][0]["came"])[0] == 34
    for one in report["passes"]:
        files = sorted((finished / "removed" / one["name"]).iterdir())
        assert sum(one["removed"].values()) == sum(1 for path in files for _ in read_shard(path))


def test_copies_are_counted_by_the_size_of_their_cluster(finished):
    report = json.loads((finished / "report.json").read_text())
    assert report["passes"][1]["copies"] == {"2": 1, "3": 2}  # texts[1] twice, texts[0] three times: each leaves one


def test_the_page_shows_text_as_text(finished):
    html = (finished / "report.html").read_text("utf-8")
    assert "<script" not in html and "&lt;script&gt;alert(1)" in html and "no JSON &lt;b&gt;" in html
    assert "http" not in html.replace("http-equiv", "")  # nothing is fetched
    assert re.search(r"length_too_few_words", html) and "exact_copy" in html


def test_a_report_is_written_again_and_a_missing_one_is_one_line(finished, tmp_path, capsys):
    before = (finished / "report.html").read_bytes()
    (finished / "report.html").unlink()
    said = []
    command.report(finished, said.append)
    assert (finished / "report.html").read_bytes() == before and said == [f"report: {finished / 'report.html'}"]
    with pytest.raises(UserError, match=r"report.json is missing"):
        command.report(tmp_path, said.append)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(UserError, match=r"not a report of"):
        command.report(tmp_path, said.append)


def test_items_that_are_not_searched_are_reported(tmp_path, capsys):
    """A set of which nothing is searched must not look like one of which nothing was found."""
    rare = "which of the seven old bridges over the quiet river was built by a blind mason in winter"
    for name, items in {"q": ["Paris", "Two words"], "[long]": [rare, rare, "No"]}.items():
        (tmp_path / name).write_text("\n".join(items) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"Text {number} of a corpus."}) + "\n" for number in range(9)))
    config = CorpusSettings.model_validate(
        {
            "output": str(tmp_path / "out"),
            "sources": {"a": {"paths": [str(tmp_path / "a.jsonl")]}},
            "decontaminate": {"sets": {name: {"path": str(tmp_path / name)} for name in ("q", "[long]")}},
        }
    )
    reports = [engine.run(engine.make_plan(config), LocalExecutor(1, lambda line: None)) for _ in range(2)]
    assert reports[0] == reports[1] == json.loads((tmp_path / "out" / "report.json").read_text())
    assert reports[0]["passes"][1]["sets"] == {"q": {"searched": 0, "short": 2}, "[long]": {"searched": 1, "duplicate": 1, "short": 1}}
    command.report(tmp_path / "out", lambda line: None)
    for shown in (capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text("utf-8")):
        assert "q: 0 of 2 items searched, 2 short" in shown
        assert "[long]: 1 of 3 items searched, 1 duplicate, 1 short" in shown


def test_tallies_of_tasks_add_up_in_any_division():
    rng = random.Random(2)
    whole = Tally({"f": "s", "g": "t"})
    parts = [Tally({"f": "s", "g": "t"}) for _ in range(3)]
    for number in range(200):
        one = Document(f"{rng.choice('fg')}#{number}", "ü" * rng.randrange(50), {"language": rng.choice(["en", "de"])})
        part = rng.choice(parts)
        for tally in (whole, part):
            tally.come(one)
            if number % 3:
                tally.keep(one)
            else:
                tally.remove(Removed(one.id, "x", "copy", detail={"cluster_size": number % 5 + 2}))
    assert add([part.as_json() for part in parts]) == whole.as_json() == add([whole.as_json()])


def test_a_corpus_of_which_nothing_is_left_has_a_page():
    nothing = Tally({}).as_json()
    passes = [{"name": "filter", "documents": 0, "bytes": 0, **nothing, "examples": {}}]
    html = page({"settings": {}, "passes": passes, "tasks": 0, "input_files": 0})
    assert "What came in" in html
