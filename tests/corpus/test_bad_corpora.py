"""Bad input to `maxlm corpus run`: a counted skip or one line and an exit code, and no partial output that looks whole."""

import ast
import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet
from read_cases import answer, dump, page, warc

import maxlm
from maxlm import cli
from maxlm.base import directory_lock
from maxlm.corpus import command, engine
from maxlm.corpus.executors import local
from maxlm.corpus.files import read_shard
from maxlm.documents.stream import zstd

GOOD = b'{"text": "The first text of the file that is good."}\n{"text": "And a second one, which is good as well."}\n'
MORE = b"".join(json.dumps({"text": random.Random(n).randbytes(30).hex()}).encode() + b"\n" for n in range(500))
NOISE = random.Random(5).randbytes(3000)
ARCHIVES = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
SMALL = {"max_record_bytes": 20_000, "ratio_from_bytes": 100_000, "max_ratio": 100}
PAGE = warc("response", "http://good", answer(b"<html lang=en><body><p>It is late in Cologne, and bridges are empty.</p></body></html>"))
Files = dict[str, bytes] | Callable[[Path], None]


def table(**columns: object) -> bytes:
    """A Parquet file."""
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def cycles(raw: Path) -> None:
    (raw / "deep" / "deeper").mkdir(parents=True)
    (raw / "deep" / "a.jsonl").write_bytes(GOOD)
    (raw / "deep" / "deeper" / "up").symlink_to("../..")
    (raw / "round").symlink_to(".")


def dead_links(raw: Path) -> None:
    (raw / "gone").symlink_to("nowhere")
    (raw / "self").symlink_to("self")


def odd_names(raw: Path) -> None:
    for name in (b"two\nlines.jsonl", b"not \xff utf-8.jsonl", b"a#3.jsonl", "größe '\"$%.jsonl".encode()):
        (Path(os.fsdecode(bytes(raw) + b"/" + name))).write_bytes(GOOD)


# Files beside one that is good -> documents of theirs that are kept, and what is removed of them, by reason. The exit code is 0.
COUNTED: dict[str, tuple[Files, int, dict[str, int]]] = {
    "truncated gzip": ({"a.jsonl.gz": gzip.compress(MORE)[:-400]}, 489, {"truncated": 1}),
    "truncated bzip2": ({"a.jsonl.bz2": bz2.compress(MORE)[:-400]}, 0, {"truncated": 1}),
    "truncated xz": ({"a.jsonl.xz": lzma.compress(MORE)[:-400]}, 488, {"truncated": 1}),
    "truncated zstd": ({"a.jsonl.zst": zstd.compress(MORE)[:-400]}, 0, {"truncated": 1}),
    "truncated text": ({"a.txt.gz": gzip.compress(b"Some text of one document. " * 9)[:-3]}, 0, {"truncated": 1}),
    "truncated WARC": ({"a.warc.gz": gzip.compress(PAGE) + gzip.compress(PAGE)[:-20]}, 1, {"truncated": 1}),
    "truncated dump of a wiki": ({"a.xml": dump(page("A", "a b"), page("B", "b c"))[:-70]}, 1, {"truncated": 1}),
    "truncated Parquet": ({"a.parquet": table(text=["x"] * 50)[:-9]}, 0, {"truncated": 1}),
    "wrong checksum": ({"a.jsonl.gz": gzip.compress(GOOD)[:-8] + b"\0" * 8}, 0, {"damaged": 1}),
    "damaged Parquet": ({"a.parquet": b"PAR1" + NOISE + b"PAR1"}, 0, {"damaged": 1}),
    "bytes after the archive": ({"a.jsonl.gz": gzip.compress(GOOD) + b"garbage"}, 2, {"trailing_garbage": 1}),
    "gzip bomb": ({"a.jsonl.gz": gzip.compress(b"\n" * 5_000_000)}, 0, {"bomb": 1}),
    "bomb of layers": ({"a.gz": gzip.compress(gzip.compress(gzip.compress(gzip.compress(GOOD))))}, 0, {"bomb": 1}),
    "Parquet bomb": ({"a.parquet": table(text=["ab" * 4000] * 5000)}, 0, {"bomb": 1}),
    "zstd window of 2 GiB": ({"a.zst": b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\0" * 50}, 0, {"too_much_memory": 1}),
    "invalid UTF-8": ({"a.txt": NOISE, "b.txt": "Größe und Länge überall, möglichst überprüft".encode() + b"\xff"}, 1, {"encoding": 1}),
    "very long line": ({"a.jsonl": GOOD + b'{"text": "' + b"a" * 2_000_000 + b'"}\n' + GOOD}, 4, {"too_large": 1}),
    "very long file without a line": ({"a.txt": b"word " * 100_000}, 0, {"too_large": 1}),
    "NUL bytes": ({"a.txt": b"\0" * 5000, "b.jsonl": b'{"text": "' + b"\\u0000" * 50 + b'"}\n'}, 0, {"binary": 2}),
    "picture named as text": ({"a.txt": b"\x89PNG\r\n\x1a\n" + NOISE}, 0, {"binary": 1}),
    "half a surrogate pair": ({"a.jsonl": b'{"text": "a \\ud800 b, and so it goes on", "url": "\\udfff", "\\udc80": "x"}\n'}, 1, {}),
    "UTF-16 of an odd length": ({"a.txt": "Eine Zeile, und noch eine".encode("utf-16") + b"x"}, 1, {}),
    "empty file": ({"a.jsonl": b"", "b.parquet": b"", "c.gz": gzip.compress(b"")}, 0, {"empty": 3}),
    "empty shard": ({"a.jsonl.zst": zstd.compress(b""), "b.parquet": table(text=pyarrow.array([], pyarrow.string()))}, 0, {"empty": 2}),
    "blank lines alone": ({"a.jsonl": b"\n\n\r\n", "b.txt": b" \n"}, 0, {"empty": 2}),
    "lines that are no JSON": ({"a.jsonl": GOOD + b"<html>\n{'text': 'x'}\n" + GOOD[:-9]}, 3, {"not_json": 3}),
    "JSON that is no object": ({"a.jsonl": b'[1]\n"text"\n3\nnull\n' + GOOD}, 2, {"not_object": 4}),
    "JSON in great depth": ({"a.jsonl": b'{"text": "x", "a": ' + b"[" * 4000 + b"]" * 4000 + b"}\n"}, 0, {"not_json": 1}),
    "no text in it": (
        {"a.jsonl": b'{"body": 1}\n{"text": null}\n{"text": 5}\n'},
        0,
        {"missing_field": 1, "null_text": 1, "not_text": 1},
    ),
    "HTML in great depth": ({"a.html": b"<html><body>" + b"<b>" * 3000 + b"x"}, 0, {"malformed": 1}),
    "WARC with garbage": ({"a.warc": PAGE + b"some\ngarbage\r\n\r\n" + PAGE}, 2, {"malformed": 1}),
    "schema that changes": (
        {"a.parquet": table(text=["x"], n=[1]), "b.parquet": table(content=["y"]), "c.parquet": table(text=[1])}
        | {"d.parquet": table(text=["z"], n=["one"])},
        2,
        {"missing_field": 1, "not_text": 1},
    ),
    "ids that are wrong or twice": ({"a.jsonl": b'{"text": "x y", "id": 7}\n{"text": "z", "id": 7}\n{"text": "w", "id": [1]}\n'}, 3, {}),
    "names with line feeds and wrong bytes": (odd_names, 8, {}),
    "cyclic links": (cycles, 2, {}),
    "links that lead nowhere": (dead_links, 0, {"vanished": 1, "unreadable": 1}),
    "pipe": (lambda raw: os.mkfifo(raw / "pipe"), 0, {"not_a_file": 1}),
}


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `maxlm corpus run corpus.yaml`."""
    monkeypatch.setattr("sys.argv", ["maxlm", "corpus", "run", "corpus.yaml", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    return code, capsys.readouterr().err


def save(folder: Path, **changes: object) -> None:
    """A corpus file: a folder raw/ with one good file, all in one process. A change that is None takes a section away."""
    (folder / "raw").mkdir(exist_ok=True)
    (folder / "raw" / "good.jsonl").write_bytes(GOOD)
    settings = {"output": "out", "sources": {"made": {"paths": ["raw"]}}, "read": SMALL, "run": {"workers": 1, "memory_mb": 64}, **changes}
    (folder / "corpus.yaml").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", COUNTED)
def test_a_fault_in_the_text_is_counted(tmp_path, monkeypatch, capsys, name):
    given, kept, reasons = COUNTED[name]
    monkeypatch.chdir(tmp_path)
    save(tmp_path)
    if callable(given):
        given(tmp_path / "raw")
    else:
        for file, data in given.items():
            (tmp_path / "raw" / file).write_bytes(data)
    code, errors = run(monkeypatch, capsys)
    assert code == 0 and "Traceback" not in errors, errors
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["passes"][-1]["removed"] == {f"read/{reason}": count for reason, count in reasons.items()}
    records = [
        record for part in ("documents", "removed") for file in (tmp_path / "out" / part).rglob("*.zst") for record in read_shard(file)
    ]
    ids = [record["id"] for record in records]
    assert len(ids) == len(set(ids)) == 2 + kept + sum(reasons.values())


def full_disk(monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def no_writes(module: object, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """No room for what a function writes: the write itself fails, in the libraries as well."""

    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = getattr(module, name)

        def limited(*arguments: object) -> object:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
            try:
                return whole(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        monkeypatch.setattr(module, name, limited)

    return prepare


def failing_bucket(monkeypatch) -> None:
    """A bucket whose connection breaks in the middle of an object."""
    from fsspec.implementations.memory import MemoryFile

    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", MORE)

    def read(self: MemoryFile, size: int = -1) -> bytes:
        if self.tell() >= 8000:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return io.BytesIO.read(self, min(size, 8000) if size >= 0 else 8000)

    monkeypatch.setattr(MemoryFile, "read", read)


def growing(monkeypatch) -> None:
    """A file that grows after the command began."""
    plan = engine.make_plan

    def then_grow(*arguments: object) -> engine.Plan:
        made = plan(*arguments)
        with Path("raw/good.jsonl").open("ab") as file:
            file.write(GOOD)
        return made

    monkeypatch.setattr(command, "make_plan", then_grow)


# What may pass: the exit code is 7, and the same command goes on when the cause is gone.
PASSING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "full disk": (full_disk, r"No space left on device"),
    "full disk while a task writes": (no_writes(local, "run_task"), r"File too large"),
    "full disk while copies are searched": (no_writes(local, "combine"), r"(?i)file too large"),
    "full disk at the report": (no_writes(engine, "write_text"), r"File too large"),
    "bucket that fails half way": (failing_bucket, r"memory://.*a\.jsonl: cannot be read: .*reset"),
    "file that grows while it is read": (growing, r"good\.jsonl: it changed since this command began"),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_ends_with_one_line_and_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, capsys, name):
    prepare, words = PASSING[name]
    monkeypatch.chdir(tmp_path)
    paths = ["raw", "memory://bucket/"] if prepare is failing_bucket else ["raw"]
    save(tmp_path, sources={"made": {"paths": paths}}, deduplicate={"lines": {}})
    with monkeypatch.context() as fault:
        prepare(fault)
        code, errors = run(fault, capsys)
    assert code == 7, errors
    assert_one_line(errors, words)
    assert_nothing_looks_whole(tmp_path / "out")
    assert run(monkeypatch, capsys)[0] == 0
    assert run(monkeypatch, capsys, "output=other")[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    if prepare is failing_bucket:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def assert_one_line(errors: str, words: str) -> None:
    last = errors.splitlines()[-1]
    assert last.startswith("maxlm: ") and re.search(words, last) and last.isprintable() and len(last) < 600, errors
    assert "Traceback" not in errors and sum(line.startswith("maxlm: ") for line in errors.splitlines()) == 1, errors


def assert_nothing_looks_whole(output: Path) -> None:
    """No report, no shard that ends in the middle, and no mark of a task whose shards are missing."""
    assert not (output / "report.json").exists() and not (output / "report.html").exists() and not (output / directory_lock.NAME).exists()
    for shard in output.rglob("*.zst"):
        list(read_shard(shard))
    for mark in output.glob("marks/*/*.json"):
        assert (output / "removed" / mark.parent.name / f"{mark.stem}.jsonl.zst").exists()
    assert [path for path in output.rglob(".*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("name", "content", "where", "says"),
    [
        ("a.csv", b"text,quality\nThe first text.,0.9\nAnd a second one.,0.8\n", "quality >= 0.7", "the field holds text in 2"),
        ("a.parquet", table(text=["The first text.", "A second."], quality=[True, False]), "quality >= 0.7", "holds true or false in 2"),
        ("a.parquet", table(text=["The first text.", "A second."], quality=[0.9, 0.8]), "quality == good", "holds a number in 2"),
        ("a.parquet", table(text=["The first text.", "A second."], quality=[0.9, 0.8]), "qualty >= 0.7", "holds nothing in 2"),
        ("a.parquet", table(text=["The first text.", "A second."], quality=[0.6, 0.5]), "quality >= 0.7", "holds a number in 2"),
    ],
)
def test_a_condition_that_no_document_meets_is_one_line(tmp_path, monkeypatch, capsys, name, content, where, says):
    """Also where another source has documents, and it says what the field holds instead."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path, sources={"made": {"paths": ["raw"]}, "other": {"paths": [name], "where": [where]}})
    (tmp_path / name).write_bytes(content)
    code, errors = run(monkeypatch, capsys)
    assert code == 2, errors
    assert_one_line(errors, rf"sources\.other\.where: none of 2 documents .*`{where}`.*{says}")


def test_conditions_on_numbers_of_every_kind(tmp_path, monkeypatch, capsys):
    """Decimals are numbers, as in a token store; a value of another kind is removed with a reason of its own."""
    monkeypatch.chdir(tmp_path)
    values = [Decimal("0.90"), Decimal("0.10"), Decimal("0.70")]
    save(tmp_path, sources={"made": {"paths": ["raw", "a.parquet"], "where": ["quality >= 0.7"]}})
    (tmp_path / "a.parquet").write_bytes(table(text=["Late in Cologne.", "An early one.", "A third text."], quality=values))
    (tmp_path / "raw" / "b.jsonl").write_text('{"text": "Words for a number.", "quality": "high"}\n')
    assert run(monkeypatch, capsys)[0] == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())["passes"][0]
    assert report["documents"] == 2 and report["removed"]["where/not_comparable"] == 1, report["removed"]


def of(text: str | bytes, name: str = "list.txt") -> Callable[[Path], None]:
    """Write a file beside the corpus file."""
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def nothing(folder: Path) -> None:
    """Prepare nothing."""


def paths(*names: str) -> dict[str, object]:
    return {"sources": {"made": {"paths": names}}}


def exam(**fields: object) -> dict[str, object]:
    return {"decontaminate": {"sets": {"exam": {"path": "list.txt", **fields}}}}


SOURCE = {"paths": ["raw"]}
# Settings that cannot be honoured -> what is prepared, changes of the corpus file, words of the line. The exit code is 2.
REFUSED: dict[str, tuple[Callable[[Path], None], dict[str, object], str]] = {
    "source that is missing": (nothing, paths("raw", "nowhere"), r"nowhere does not exist; give"),
    "folder without files": (
        lambda folder: (folder / "bare").mkdir(),
        paths("bare"),
        r"bare (is a folder without files of data|matches no file); give",
    ),
    "glob without matches": (nothing, paths("raw/*.warc"), r"raw/\*\.warc (is a folder without files of data|matches no file); give"),
    "storage that is unknown": (nothing, paths("nosuch://x/y"), r"nosuch:// is no storage that fsspec knows"),
    "object that is missing": (nothing, paths("memory://none/a"), r"memory://none/a does not exist"),
    "file of two sources": (
        nothing,
        {"sources": {"a": SOURCE, "b": SOURCE}},
        r"sources\.b\.paths: raw/good\.jsonl is .*sources\.a",
    ),
    "no source": (nothing, {"sources": {}}, r"sources = \{\}: "),
    "no output": (nothing, {"output": None}, r"output.*(missing|required)"),
    "setting that is unknown": (nothing, {"dedupe": {}}, r"dedupe = .*no such setting.*deduplicate"),
    "setting of another type": (nothing, {"run": {"workers": "many"}}, r"run\.workers = many .*integer"),
    "setting out of range": (nothing, {"deduplicate": {"minhash": {"bands": 0}}}, r"minhash\.bands = 0 .*must be at least 1"),
    "two executors": (nothing, {"slurm": {"partition": "x"}, "ray": {}}, r"maxlm: ray = .*slurm and ray are both set"),
    "preferred source that is none": (nothing, {"deduplicate": {"prefer": ["x"]}}, r"maxlm: deduplicate\.prefer = \[x\]: x is no source"),
    "language with a region": (nothing, {"filters": {"language": {"keep": ["zh-TW"]}}}, r"language = .*zh-TW.*not told apart; give zh"),
    "most below the least": (nothing, {"filters": {"length": {"min_words": 9, "max_words": 5}}}, r"filters\.length = .*less than.*; raise"),
    "model of no backend": (nothing, {"filters": {"language": {"model": "x"}}}, r"filters\.language = .*; give it with backend: fasttext"),
    "n-gram of one word": (nothing, {"filters": {"gopher_repetition": {"max_top_ngram": {"1": 0.5}}}}, r"repetition = .*; give no other"),
    "perplexity without a model": (nothing, {"filters": {"perplexity": {"max_bits_per_byte": 2}}}, r"perplexity = .*; set one of them"),
    "list for names": (nothing, {"filters": {"gopher_quality": {"stop_words": []}}}, r"stop_words = \[\] .*: must be names .*; write"),
    "output with other files": (
        lambda folder: (folder / "raw" / "x").write_bytes(b"x") and None,
        {"output": "raw"},
        r"not of `maxlm corpus",
    ),
    "output that is a file": (of("x"), {"output": "list.txt"}, r"list\.txt: cannot be read or written: Not a directory"),
    "output below a file": (of("x"), {"output": "list.txt/out"}, r"list\.txt.*Not a directory"),
    "list that is missing": (nothing, {"filters": {"bad_words": {"files": ["none.txt"]}}}, r"none\.txt: cannot be read.*No such file"),
    "list that is no text": (of(NOISE), {"filters": {"bad_words": {"files": ["list.txt"]}}}, r"list\.txt: is not UTF-8"),
    "no evaluation set": (nothing, {"decontaminate": {"sets": {}}}, r"decontaminate = .*no evaluation set is listed.*list one in `sets`"),
    "evaluation set that is missing": (nothing, exam(), r"evaluation set exam: list\.txt: cannot be read: No such file"),
    "evaluation set without its field": (of('{"q": "x"}\n'), exam(fields=["question"]), r"exam: list\.txt, line 1: no field question"),
    "evaluation set that is no JSON": (of("what?\n"), exam(fields=["question"]), r"list\.txt: plain text; without `fields`"),
    "language model that is missing": (nothing, {"filters": {"language": {"backend": "fasttext", "model": "x.bin"}}}, r"x\.bin|fasttext"),
    "corpus file that is no YAML": (of("a: [", "corpus.yaml"), {}, r"corpus\.yaml, line .*not valid YAML"),
    "corpus file that is a list": (of("- 1\n", "corpus.yaml"), {}, r"corpus\.yaml"),
    "corpus file that is missing": (lambda folder: (folder / "corpus.yaml").unlink(), {}, r"corpus\.yaml"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, name):
    prepare, changes, words = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    save(tmp_path, **changes)
    prepare(tmp_path)
    before = contents(tmp_path)
    code, errors = run(monkeypatch, capsys)
    assert code == 2, errors
    assert_one_line(errors, words)
    assert not re.search(r"Value error|a number of at least 0|maxlm: =|remove \.|; \.", errors), errors
    assert contents(tmp_path) == before


def test_validators_say_rule_and_fix():
    """The sentences of all validators that raise ValueError, of which errors are made, have the form "rule; fix"."""
    said = []
    for path in sorted(path for path in Path(maxlm.__file__).parent.rglob("*.py") if "_validator" in path.read_text()):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("_validator" in ast.unparse(one) for one in function.decorator_list):
                raised = [one for one in ast.walk(function) if isinstance(one, ast.Raise) and "ValueError(" in ast.unparse(one)]
                said += [(path.name, function.name, ast.unparse(one)) for one in raised]
    assert len(said) > 3 and [one for one in said if "; " not in one[2]] == []


def test_two_runs_in_one_output_exclude_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "LOCK_SECONDS", 0.0)
    save(tmp_path)
    with directory_lock.locked(tmp_path / "out", "output", 0, print, "wait"):
        code, errors = run(monkeypatch, capsys)
    assert code == 2
    assert_one_line(errors, rf"output = .*out: process {os.getpid()} on .* uses it; wait for it to end, or give another folder")
    assert run(monkeypatch, capsys)[0] == 0


def test_there_are_fifty_cases():
    assert len(COUNTED) + len(PASSING) + len(REFUSED) >= 50


def test_a_table_without_the_column_counts_its_rows_and_names_its_columns(tmp_path, monkeypatch, capsys):
    """As the only file of a source it ends the run, again and again; with the name of the column for this source it is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.parquet").write_bytes(table(content=[f"Row {number}." for number in range(300)], url=["u"] * 300))
    sources = {"made": {"paths": ["raw"]}, "web": {"paths": ["web"]}}
    save(tmp_path, sources=sources)
    for _ in range(2):
        code, said = run(monkeypatch, capsys)
        assert code == 2 and re.search(
            r"sources\.web.*\(300 rows\) has no field text; set sources\.web\.text_field to .*content, url", said
        )
    assert not (tmp_path / "out/report.json").exists()
    save(tmp_path, sources={"made": {"paths": ["raw", "web"]}})
    assert run(monkeypatch, capsys)[0] == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["passes"][0]["removed"] == {"read/missing_field": 300}
    sources["web"]["text_field"] = "content"
    save(tmp_path, sources=sources)
    assert run(monkeypatch, capsys)[0] == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["passes"][0]["came"]["web"][0] == 300


def test_an_output_without_documents_is_an_error_with_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, filters={"length": {"min_words": 10_000}})
    for _ in range(2):
        code, said = run(monkeypatch, capsys)
        assert code == 2 and re.search(r"out: no document is left, removed for \S*length\S* \(2\)", said)
    assert (tmp_path / "out/report.html").exists()
