"""`data prepare` and `corpus run` read the same documents of any source, or both refuse it."""

import gzip
import json
import os
import random
import sys
from pathlib import Path

import pytest
from two_doors import FILES, PACKED, POINTER, TEXTS, agreed, by_corpus, by_prepare, lines

from maxlm.base.errors import UserError
from maxlm.data.sources import Fields, documents_in, find_files
from maxlm.documents.files import find_once
from maxlm.documents.reader import records
from maxlm.documents.records import Defect, ReadSettings, Record, Wanted

RECORDS_BY_NAME = ("authors.jsonl", "license.parquet", "security.stackexchange.com.jsonl")
CASES = Path(__file__).parents[1] / "cases/data"


def named(name: str, packed: str) -> str:
    """The name of a compressed file: a suffix such as `.padded.gz` goes before that of the format, which it must not hide."""
    stem, dot, suffix = name.partition(".")
    *before, last = packed.replace(" ", ".").split(".")[1:] if packed else [""]
    return ".".join([stem, *before]) + dot + suffix + (f".{last}" if last else "")


@pytest.mark.parametrize("name", FILES)
def test_both_doors_read_the_same_documents(tmp_path, name):
    make, expected, field = FILES[name]
    made = make(tmp_path)
    for number, packed in enumerate(PACKED):
        path = tmp_path / str(number) / (named(name, packed) if "." in name or not packed else name)
        path.parent.mkdir()
        path.write_bytes(PACKED[packed](made))
        assert agreed(path, field) == expected, packed
        if name.startswith("pointer"):
            with pytest.raises(UserError, match="git lfs pull"):
                list(documents_in(find_files([str(path)]), Fields.of_text(field)))


@pytest.mark.parametrize("name", [name for name, (_, texts, _) in FILES.items() if texts])
def test_both_doors_see_damage(tmp_path, name):
    """Files that are cut short, or with a bit that is not what it was: never other documents in one door than in the other."""
    make, _, field = FILES[name]
    made, chance = make(tmp_path), random.Random(name)
    for packed in ("", ".gz", ".zst", ".bz2", ".xz"):
        data, path = PACKED[packed](made), tmp_path / (name + packed)
        for share in (0.4, 0.99):
            path.write_bytes(data[: int(len(data) * share)])
            texts = agreed(path, field)
            assert texts is None or not packed, "no compressed file that is cut short is read as whole"
        broken = bytearray(data)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        agreed(path, field)


@pytest.mark.parametrize("name", ["c4.json.gz", "array.json", "a.jsonl.xz", "a.jsonl.bz2", "pad.jsonl.gz", "hfrepo"])
def test_data_sets_as_they_are_downloaded(name, caplog):
    texts = agreed(CASES / name)
    assert texts is not None and len(set(texts)) == 50
    if name == "hfrepo":
        assert caplog.messages[0].endswith(
            "left out as no data: .gitattributes, README.md, dataset_infos.json; to read one of them, name it"
        )
        assert agreed(CASES / "hfrepo/README.md") == [(CASES / "hfrepo/README.md").read_text()]


def write(folder: Path, *names: str, content: bytes = b"") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content or f"Content of {name}.".encode())


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["README.md", "LICENSE", "a.txt", "b/README.txt", "b/_SUCCESS", "b/a.txt.md5"], ["a.txt"]),
        (["guide.md", "a.txt", "code.py"], ["a.txt", "code.py", "guide.md"]),
        (["guide.md", "a.txt", "loader.py", "logo.png", "b/data.jsonl"], ["a.txt", "b/data.jsonl"]),
        (["guide.md", "loader.py", "train.json.gz"], ["train.json.gz"]),
        (["guide.md", "dataset_infos.json", "state.json"], ["guide.md"]),
        (["LICENSE.txt", "authors.jsonl", "license.parquet", "security.stackexchange.com.jsonl"], [*RECORDS_BY_NAME]),
        (["README.md", "package.json", "docs/guide.md", "src/a.py", "tsconfig.json"], ["docs/guide.md", "src/a.py"]),
    ],
)
def test_a_folder_has_its_data_and_says_what_else_there_is(tmp_path, caplog, names, read):
    write(tmp_path, *names)
    for source in (tmp_path, f"{tmp_path}/*"):
        caplog.clear()
        assert [Path(file.path).relative_to(tmp_path).as_posix() for file in find_files([str(source)])] == read
        said = " ".join(caplog.messages)
        assert all(Path(name).name in said for name in set(names) - set(read))


def test_a_folder_of_descriptions_only_has_no_data(tmp_path):
    write(tmp_path, "README.md", "LICENSE")
    with pytest.raises(UserError, match="folder without files"):
        find_files([str(tmp_path)])
    assert agreed(tmp_path / "README.md") == ["Content of README.md."]


@pytest.mark.parametrize("name", ["a.xlsx", "a.foo", "a.jsonl.br", "model.bin"])
def test_an_unknown_suffix_in_a_folder_is_refused_by_name(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(lines())
    write(tmp_path, name)
    with pytest.raises(UserError, match=rf"{name}.*suffix \.\w+ states no format.*glob"):
        list(documents_in(find_files([str(tmp_path)]), Fields.of_text("text")))
    texts, defects, _ = by_corpus(tmp_path)
    assert (texts, defects) == (TEXTS, ["unknown_format"])


def test_links_are_followed_inside_a_folder_only(tmp_path, caplog):
    write(tmp_path, "outside/secret.txt", "in/a.txt", "in/deep/b.txt")
    (tmp_path / "in/link.txt").symlink_to(tmp_path / "outside/secret.txt")
    (tmp_path / "in/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "in/inside.txt").symlink_to(tmp_path / "in/a.txt")
    (tmp_path / "named").symlink_to(tmp_path / "outside")
    assert sorted(agreed(tmp_path / "in")) == ["Content of in/a.txt.", "Content of in/deep/b.txt."]
    assert any("read once: inside.txt; " in message for message in caplog.messages)
    assert any("links out of the folder are not followed: folder, link.txt" in message for message in caplog.messages)
    for told in (tmp_path / "in/link.txt", tmp_path / "in/folder", tmp_path / "in/li*", tmp_path / "named"):
        assert agreed(told) == ["Content of outside/secret.txt."]


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path):
    write(tmp_path, "datasets--x/blobs/0a1b", content=lines())
    (tmp_path / "datasets--x/snapshots/rev/data").mkdir(parents=True)
    (tmp_path / "datasets--x/snapshots/rev/data/a.jsonl").symlink_to("../../../blobs/0a1b")
    for folder in ("datasets--x/snapshots/rev", "datasets--x/snapshots/rev/data"):
        assert agreed(tmp_path / folder) == TEXTS


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for source in (tmp_path / "pipe.jsonl", "/dev/zero"):
        assert by_prepare(source) is None
        assert by_corpus(source)[:2] == ([], ["not_a_file"])


def test_a_small_file_that_becomes_a_large_one_is_refused(tmp_path):
    """One document of more than 16 MiB, and 70 kB of gzip that hold 70 MB."""
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress(b"Some words. " * 1_500_000, 1))
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * 70_000_000, 6))
    for name in ("one.txt.gz", "bomb.jsonl.gz"):
        assert by_prepare(tmp_path / name) is None
    assert by_corpus(tmp_path / "one.txt.gz")[:2] == ([], ["too_large"])
    assert by_corpus(tmp_path / "bomb.jsonl.gz")[:2] == (["a"], ["bomb"])


def test_a_list_is_read_record_by_record(tmp_path, monkeypatch):
    """A list larger than the limit of one record, in blocks of any size; an element above the limit costs no other one."""
    wanted = [{"text": f'Text {number} "quoted" \\ and [braces] {{}}, é🙂', "more": [{"a": ["]", "}"]}]} for number in range(50)]
    wanted[7]["more"] = ["x" * 400]
    path = tmp_path / "list.json"
    for indent, block in ((None, 1), (1, 7), (None, 4096)):
        path.write_text(json.dumps(wanted, indent=indent, ensure_ascii=False))
        monkeypatch.setattr("maxlm.documents.stream.BLOCK", block)
        found = list(records(str(path), Wanted("text", ReadSettings(max_record_bytes=300))))
        assert [one.number for one in found if isinstance(one, Defect)] == [8] and found[7].reason == "too_large"
        assert [one.fields for one in found if isinstance(one, Record)] == [*wanted[:7], *wanted[8:]]


@pytest.mark.parametrize(
    "text", ['[{"text": "a"} {"text": "b"}]', '[{"text": "a"},,{"text": "b"}]', '[{"text": "a"}', '[{"text": "a"}] x', "[1]", "[}"]
)
def test_a_list_that_is_broken_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert agreed(tmp_path / "a.json") is None
    rest = [one for one in records(str(tmp_path / "a.json")) if isinstance(one, Defect)]
    assert rest and "malformed" not in {one.reason for one in rest}, "which promises that the next record is read"


def test_conversations_are_records_of_any_table(tmp_path):
    """With lists of messages inside, from lines, a list or Parquet, compressed or not."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"id": f"{n}", "messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "é"}]} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json.gz", "a.parquet"):
        found = list(documents_in(find_files([str(tmp_path / name)]), Fields(None, frozenset({"messages"}))))
        assert [json.loads(document.text) for document in found] == rows
        assert [document.about.id for document in found] == [row["id"] for row in rows]
    write(tmp_path, "a.txt")
    with pytest.raises(UserError, match=r"a\.txt holds text; conversations are records of JSON"):
        list(documents_in(find_files([str(tmp_path / "a.txt")]), Fields(None, frozenset())))


@pytest.mark.parametrize("name", ["resiliparse", "resiliparse.extract.html2text"])
def test_a_missing_package_of_pages_is_one_line(tmp_path, monkeypatch, name):
    """Everything else is read without the packages of the extra."""
    for package in (name, "chardet", "ftfy"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "resiliparse.extract.html2text", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.html").write_text("<html><body>Words.</body></html>")
    with pytest.raises(UserError, match=r"HTML needs the package resiliparse, which is not installed: pip install .*\[corpus\]'"):
        list(documents_in(find_files([str(tmp_path / "a.html")]), Fields.of_text("text")))
    for other in ("a.jsonl", "list.json", "a.parquet", "a.txt", "latin.txt", "a.arrayrecord"):
        make, expected, field = FILES[other]
        (tmp_path / other).write_bytes(make(tmp_path))
        assert by_prepare(tmp_path / other, field) == expected


def test_a_pointer_beside_data_stops_both_doors(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "b.jsonl").write_bytes(POINTER)
    assert by_prepare(tmp_path) is None and by_corpus(tmp_path) == ([], [], False)


def test_a_file_that_two_sources_list_is_read_once_and_stays_with_the_first(tmp_path, monkeypatch, caplog):
    """Under any name: of a folder, a glob, a relative path or a link. Both doors agree, and one line says so."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "data/a.txt", "data/b.txt")
    (tmp_path / "link").symlink_to("data")
    for again in (str(tmp_path / "data"), "data/*.txt", "./data/../data/a.txt", "link", str(tmp_path / "link/b.txt")):
        caplog.clear()
        strict = find_files(["data", again])
        assert [(file.path, file.source) for file in strict] == [("data/a.txt", "data"), ("data/b.txt", "data")]
        assert len(caplog.messages) == 1 and "read once" in caplog.messages[0]
        assert find_once(["data", again]) == strict
    assert [file.source for file in find_files(["data/b.txt", "data"])] == ["data/b.txt", "data"]


def test_a_recursive_glob_ends_at_links_to_folders_above(tmp_path, monkeypatch):
    """Each real file once, as of the folder; two such links would be 2^40 paths."""
    write(tmp_path, "data/a.txt", "data/b/c.txt", "data/b/[d]/e.txt", "data/.hidden/f.txt")
    for link, target in (("data/up", ".."), ("data/b/loop", "../../data"), ("data/b/again", ".")):
        (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    for source in ("data/**/*.txt", "**/*.txt", f"{tmp_path}/data/**", "data/**/**/*.txt", "data/b/**/data/**/*.txt"):
        found = {os.path.realpath(file.path) for file in find_once([source])}
        assert found == {str(tmp_path / f"data/{name}") for name in ("a.txt", "b/c.txt", "b/[d]/e.txt")}, source
        assert len(find_once([source])) == 3


def whole(path: Path) -> list:
    return [json.loads(document.text) for document in documents_in(find_files([str(path)]), Fields(None, frozenset({"messages"})))]


def test_a_conversation_of_parquet_is_the_one_of_json(tmp_path):
    """Structs have the fields of all rows, of which absent ones are null, and maps are objects, at any depth."""
    import pyarrow
    from pyarrow import parquet

    calls = [{"name": "f", "arguments": arguments} for arguments in ({"city": "Z"}, {"unit": "C", "of": [{"a": 1}, {"b": 2}]})]
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert whole(tmp_path / "a.parquet") == whole(tmp_path / "a.jsonl") == rows
    kind = pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "arguments": pyarrow.map_(pyarrow.string(), pyarrow.int64())}))
    said = [[{"role": "assistant", "arguments": {"x": 1, "y": None}}]]
    for values, expected in ((said, said), ([[{"role": "a", "arguments": [("x", 1), ("x", 2)]}]], None)):
        pairs = [
            [{**one, "arguments": list(dict(one["arguments"]).items()) if expected else one["arguments"]} for one in row] for row in values
        ]
        parquet.write_table(pyarrow.table({"messages": pyarrow.array(pairs, kind)}), tmp_path / "map.parquet")
        if expected:
            assert [row["messages"] for row in whole(tmp_path / "map.parquet")] == expected
        else:
            with pytest.raises(UserError, match=r"map\.parquet holds a value that cannot be read here \(column messages: .*duplicate"):
                whole(tmp_path / "map.parquet")


def test_columns_that_no_field_can_hold(tmp_path, caplog):
    """Two columns of one name, and times after the year 9999: refused if they are content, else left out and named."""
    import pyarrow
    from pyarrow import parquet

    late = pyarrow.array([253402300800 * 10**6], pyarrow.timestamp("us"))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    assert by_corpus(tmp_path / "twice.parquet")[:2] == ([], ["ambiguous_field"])
    for fields in (Fields.of_text("text"), Fields(None, frozenset())):
        with pytest.raises(UserError, match=r"twice\.parquet has more than one column of the name text"):
            list(documents_in(find_files([str(tmp_path / "twice.parquet")]), fields))
    parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array([one]) for one in ("a", 1, 2)], ["text", "n", "n"]), tmp_path / "n.parquet"
    )
    assert agreed(tmp_path / "n.parquet") == ["a"]
    row = [{"role": "user", "content": "x"}]
    parquet.write_table(pyarrow.table({"messages": [row], "made": late}), tmp_path / "late.parquet")
    assert whole(tmp_path / "late.parquet") == [{"messages": row}] and "the column made is left out" in caplog.text
    parquet.write_table(
        pyarrow.table({"messages": [row], "more": pyarrow.StructArray.from_arrays([late], ["at"])}), tmp_path / "deep.parquet"
    )
    with pytest.raises(UserError, match=r"deep\.parquet holds a value that cannot be read here \(column more"):
        whole(tmp_path / "deep.parquet")


@pytest.mark.parametrize("first", ['{"text": "cut of', '{"text": "a"},', 'off", "n": 1}', '{"text": NaN x}'])
@pytest.mark.parametrize("size", [10, 5000])
def test_a_first_line_that_is_damaged_costs_no_other_line(tmp_path, first, size):
    path = tmp_path / "a.json"
    texts = [f"{number} " + "x" * size for number in range(3)]
    path.write_text("\n".join([first, *(json.dumps({"text": text}) for text in texts)]))
    assert by_corpus(path)[:2] == (texts, ["not_json"]) and by_prepare(path) is None


def test_an_object_over_several_lines_is_one_record(tmp_path):
    for text in ('{"text": "a",\n"more": {"b":\n{"c": 1}\n}}', '{"text": "a", "data": [\n{"text": "b"}\n]}', '{\n"text": "a"\n}'):
        (tmp_path / "a.json").write_text(text)
        assert agreed(tmp_path / "a.json") == ["a"]


def test_a_row_that_is_wrong_costs_no_other_row(tmp_path, monkeypatch):
    """A wrong quote, too few fields, a row above the limit, one whose quote never ends; in blocks of any size."""
    long = "x" * 300
    path = tmp_path / "a.csv"
    path.write_text(f'id,text\na,One.\nb,"Two"?\nc\nd,{long}\ne,"Three\nlines.\n"\nf,"{long}\n{long}"\ng,Four.\nh,"Five')
    for block in (1, 7, 4096):
        monkeypatch.setattr("maxlm.documents.stream.BLOCK", block)
        found = list(records(str(path), Wanted("text", ReadSettings(max_record_bytes=200))))
        texts = [(one.number, one.text) for one in found if isinstance(one, Record)]
        defects = [(one.number, one.reason) for one in found if isinstance(one, Defect)]
        assert texts == [(2, "One."), (6, "Three\nlines.\n"), (11, "Four.")]
        assert defects[:3] == [(3, "malformed"), (4, "malformed"), (5, "too_large")] and defects[-1] == (0, "truncated")
    with pytest.raises(UserError, match=r"a\.csv, line 3.* breaks the rules of its format.*expected after"):
        list(documents_in(find_files([str(path)]), Fields.of_text("text")))


def test_rows_of_text_are_metadata_and_conversations(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,url,score,none\nWörter,http://a.b,0.5,\n".encode())
    (document,) = documents_in(find_files([str(tmp_path / "a.csv")]), Fields.of_text("text"))
    assert document.about.fields == {"url": "http://a.b", "score": "0.5"} and document.about.id == "a.csv#2"
    (whole_row,) = documents_in(find_files([str(tmp_path / "a.csv")]), Fields(None, frozenset({"text"})))
    assert json.loads(whole_row.text) == {"text": "Wörter", "url": "http://a.b", "score": "0.5"}
    with pytest.raises(
        UserError, match=r"a\.csv has no field body; set data\.prepare\.text_field to one of its fields: text, url, score, none"
    ):
        list(documents_in(find_files([str(tmp_path / "a.csv")]), Fields.of_text("body")))
    (tmp_path / "latin.csv").write_bytes("text,by\nDéjà vu à Paris et très bien été.,café\n".encode("latin-1"))
    texts, defects, mended = by_corpus(tmp_path / "latin.csv")
    assert (texts, defects, mended) == (["Déjà vu à Paris et très bien été."], [], True)
