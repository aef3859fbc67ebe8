"""Every format gives its documents with their metadata, whatever the name and the compression of the file."""

import datetime
import gzip
import itertools
import json

import pyarrow
import pytest
from pyarrow import parquet
from read_cases import HTML, PACK, SMALL, answer, dump, found, lines, outcome, page, warc

from maxlm.corpus.files import read
from maxlm.documents.files import find_once
from maxlm.documents.records import ReadSettings
from maxlm.documents.wikitext import plain_text


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "named_otherwise"])
def test_compression_by_content(tmp_path, pack, name):
    """Packed once, in two members, or twice, with any name: the same documents."""
    data, path = lines(2000), tmp_path / name.format(pack)
    plain = tmp_path / "plain"
    plain.write_bytes(data)
    expected = [(item.text, item.metadata) for item in found(plain)[0]]
    assert len(expected) == 2000
    half = data.index(b"\n", len(data) // 2) - 5
    for packed in (PACK[pack](data), PACK[pack](data[:half]) + PACK[pack](data[half:]), gzip.compress(PACK[pack](data))):
        path.write_bytes(packed)
        assert [(item.text, item.metadata) for item in found(path)[0]] == expected


def test_block_borders_change_nothing(tmp_path, monkeypatch):
    """A file read in blocks of any size gives the same documents."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(60, "ü{} " + "ß " * 40).replace(b"\n", b"\r\n") + b"\n\n" + b'{"text": "no line feed"}')
    whole = found(path)
    assert len(whole[0]) == 61
    for block in (1, 7, 1000):
        monkeypatch.setattr("maxlm.documents.stream.BLOCK", block)
        assert found(path) == whole


def test_json_fields_become_metadata(tmp_path):
    path = tmp_path / "a.jsonl"
    record = {"body": "Text.", "url": "http://x", "n": 3, "ok": True, "score": 0.5, "none": None, "list": [1], "big": 2**70}
    path.write_text(json.dumps({**record, "metadata": {"url": "inner", "lang": "en"}, "nan": float("nan")}) + "\n")
    documents, removed = found(path, ReadSettings(text_field="body"))
    assert not removed and documents[0].id == f"{path}#1"
    metadata = documents[0].metadata
    assert metadata.pop("big") is not None
    assert metadata == {"lang": "en", "url": "http://x", "n": 3, "ok": True, "score": 0.5}


def test_warc_pages_and_texts(tmp_path):
    packed = gzip.compress(HTML.encode())
    records = [
        warc("warcinfo", "", b"software: x\r\n", "application/warc-fields"),
        warc("request", "http://a", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        warc("response", "http://a", answer(HTML.encode(), "text/html; charset=utf-8")),
        warc("response", "http://b", answer(HTML.encode("cp1252"), "text/html; charset=ISO-8859-1")),
        warc(
            "response",
            "http://c",
            answer(b"%x\r\n%s\r\n0\r\n\r\n" % (len(packed), packed), more="Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n"),
        ),
        warc("conversion", "http://d", "Grüße aus Köln".encode(), "text/plain"),
        warc("response", "http://e", answer(b"no", status="404 Not Found")),
        warc("response", "http://f", answer(b"\x89PNG", "image/png")),
        warc("revisit", "http://g", b""),
    ]
    path = tmp_path / "a"
    for data in (b"".join(records), b"".join(map(gzip.compress, records))):
        path.write_bytes(data)
        documents, removed = found(path)
        assert [item.metadata["url"] for item in documents] == ["http://a", "http://b", "http://c", "http://d"]
        assert all("Grüße aus Köln" in item.text and "var x" not in item.text for item in documents)
        assert documents[0].metadata == {"url": "http://a", "date": "2024-01-02T03:04:05Z", "language": "en", "title": "A & B"}
        assert [item.reason for item in removed] == ["http_status", "content_type", "no_content"]


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_warc_answers_end_their_headers_with_any_line_end(tmp_path, end, kind):
    """The content begins after the first blank line, and keeps the blank lines of its own."""
    body = HTML.encode() if kind == "text/html" else b"Three lines.\n\nAnd.\r\n\r\nThe end."
    texts = []
    for one in (end, b"\r\n"):
        (tmp_path / "a").write_bytes(warc("response", "http://a", answer(b"", kind).replace(b"\r\n", one) + body))
        documents, removed = found(tmp_path / "a")
        assert not removed
        texts += [document.text for document in documents]
    assert len(texts) == 2 and texts[0] == texts[1]


def test_wikipedia_dump(tmp_path):
    text = (
        "'''Gras''' [[lien|texte]] {{boîte|a={{b}}}} [[Fichier:x.jpg|thumb|une [[image]]]]&lt;ref&gt;source&lt;/ref&gt;.\n[[Catégorie:Y]]"
    )
    path = tmp_path / "a"
    path.write_bytes(dump(page("Un &amp; deux", text), page("R", "#R", redirect="Un"), page("Aide:X", "y", ns=12), page("Vide", "{{x}}")))
    documents, removed = found(path)
    assert documents[0].text == "Un & deux\n\nGras texte ."
    assert documents[0].metadata == {
        "source": "frwiki",
        "language": "fr",
        "title": "Un & deux",
        "url": "https://fr.wikipedia.org/wiki/Un_&_deux",
        "date": "2024-01-01T00:00:00Z",
        "page_id": "7",
    }
    assert [item.reason for item in removed] == ["redirect", "not_article", "empty"]


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("== A ==\ntext\n== B ==\n=== C ===\n{{x}}\n== D ==\nmore", "A\n\ntext\n\nD\n\nmore"),
        ("a {{x|{{y}}|[[z]]}} b", "a b"),
        ("a {{unclosed b", "a unclosed b"),
        ("a }} b ]] c", "a b c"),
        ("{| class=x\n! h\n|-\n| {{t|}} || 2\n|}\nafter", "after"),
        ("[http://x the label] and [http://y]", "the label and"),
        ("[[fr:Autre]] [[:Category:Z]] [[a|b]]s", "Category:Z bs"),
        ("{{lang|la|veni}} {{convert|5|km|mi}} (''{{IPA|x}}'')", "veni 5 km"),
        ("* one\n* ''two''\n# three", "one\ntwo\nthree"),
        ("a<!-- c --><ref name=x/><ref>r</ref>&nbsp;b<br />c", "a\xa0bc"),
        ("", ""),
    ],
)
def test_wikitext(wikitext, text):
    assert plain_text(wikitext) == text


@pytest.mark.parametrize(
    "piece", ["{{", "[[", "<ref>", "<!--", "{|\n", "}}", "]]", "'''", "<ref name=", "(", "[http://", "==\n", "{{lang|", "&#"]
)
def test_wikitext_takes_linear_time(piece):
    """200,000 characters of one unclosed mark: quadratic time would take minutes."""
    plain_text("x " + piece * (200_000 // len(piece)))


def test_parquet(tmp_path):
    path = tmp_path / "a"
    table = pyarrow.table(
        {
            "text": [f"row {n}" for n in range(200)],
            "url": ["u"] * 200,
            "n": range(200),
            "at": [datetime.date(2024, 1, 2)] * 200,
            "v": [[1.0]] * 200,
        }
    )
    parquet.write_table(table, path, row_group_size=70)
    documents, removed = found(path)
    assert not removed and [item.text for item in documents] == [f"row {n}" for n in range(200)]
    assert documents[7].metadata == {"url": "u", "n": 7, "at": "2024-01-02"} and documents[7].id == f"{path}#8"
    packed = tmp_path / "b.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [item.text for item in found(packed)[0]] == [item.text for item in documents]


def test_array_record(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in (b'{"text": "one", "n": 1}', b"plain text", "Grüße".encode("cp1252"), b'{"n": 1}', b"{ no json"):
        writer.write(record)
    writer.close()
    documents, removed = found(path)
    assert [item.text for item in documents] == ["one", "plain text", "Grüße"] and documents[0].metadata == {"n": 1}
    assert [item.reason for item in removed] == ["missing_field", "not_json"]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_files(tmp_path, indent):
    """A list of objects, or one object, on one line or on many; and lines under the name of a whole file."""
    path = tmp_path / "a.json"
    records = [{"text": f"row {n}", "n": n} for n in range(5)]
    path.write_text(json.dumps([*records, 5], indent=indent))
    documents, removed = found(path)
    assert [item.text for item in documents] == [record["text"] for record in records] and [item.reason for item in removed] == [
        "not_object"
    ]
    path.write_text(json.dumps(records[0], indent=indent))
    assert [(item.id, item.text) for item in found(path)[0]] == [(f"{path}#1", "row 0")]
    path.write_bytes(lines(3))
    assert outcome(path) == (3, {})


@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_files_of_one_document(tmp_path, name):
    path = tmp_path / name
    path.write_text(HTML)
    assert [item.text for item in found(path)[0]] == ["Grüße aus Köln, it is late."]
    path.write_text("Some text.\nMore of it.\n")
    assert [(item.id, item.text) for item in found(path)[0]] == [(f"{path}#1", "Some text.\nMore of it.\n")]


def test_find_gives_each_file_once_and_sorted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "a/x.jsonl/y.txt", "c.txt", "a/.hidden", "b/.git/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/round").symlink_to(tmp_path)
    (tmp_path / "b/self").symlink_to("self")
    expected = ["a/x.jsonl/y.txt", "b/1.txt", "b/2.txt", "b/self", "c.txt"]
    for sources in itertools.permutations(["a/x.jsonl", "b", "c.txt", "b/*.txt"]):
        assert [file.path for file in find_once(sources)] == expected
    assert [file.size for file in find_once(["c.txt"])] == [5]
    everything = [file.path for file in find_once([str(tmp_path)])]
    assert everything == sorted(set(everything)) and len(everything) == 5  # the link to the folder above brings nothing twice
    assert [file.path for file in find_once(["b/**/1.txt"])] == ["b/1.txt"]


def test_urls(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus-read/a/1.jsonl", lines(3))
    memory.pipe("/corpus-read/a/2.jsonl.gz", gzip.compress(lines(2)))
    files = find_once(["memory://corpus-read/a"])
    assert [file.path for file in files] == ["memory:///corpus-read/a/1.jsonl", "memory:///corpus-read/a/2.jsonl.gz"]
    assert files[0].size == len(lines(3)) and find_once(["memory://corpus-read/*/1.jsonl"]) == [
        type(files[0])(files[0].path, files[0].size, "memory://corpus-read/*/1.jsonl")
    ]
    assert [outcome(file.path) for file in files] == [(3, {}), (2, {})]


def test_reading_is_a_pure_function(tmp_path):
    """Two readers of one file at the same time, in turns, give what one gives alone."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(50) + b"broken\n" + lines(50)))
    alone = list(read(str(path), SMALL))
    pairs = list(zip(read(str(path), SMALL), read(str(path), SMALL), strict=True))
    assert pairs == [(item, item) for item in alone]
