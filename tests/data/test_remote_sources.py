"""Sources at a URL give what the same files give on a disk; fsspec's memory:// stands in for gs://, s3:// and hf://."""

import json
import sys
from pathlib import Path

import fsspec
import pytest
from data_cases import every_byte, prepare_config, some_texts
from test_sources import KINDS, documents, write

from maxlm.base import transient
from maxlm.base.errors import UnavailableError, UserError
from maxlm.config.sections.prepare import PrepareConfig
from maxlm.data.prepare import prepare
from maxlm.data.sources import digests, find_files
from maxlm.data.tokenizer import train_tokenizer

TEXTS = some_texts(200)
BUCKET = "memory://bucket"


@pytest.fixture(autouse=True)
def memory():
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()


def upload(filesystem, folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            filesystem.pipe(f"/bucket/{file.relative_to(folder)}", file.read_bytes())


@pytest.mark.parametrize("name", KINDS)
def test_every_format_is_read_at_a_url(tmp_path, memory, name):
    write(tmp_path / name, TEXTS)
    upload(memory, tmp_path)
    assert [document.text for document in documents([f"{BUCKET}/{name}"], "text")] == TEXTS


def test_folders_and_globs_have_the_files_and_the_order_of_a_disk(tmp_path, memory):
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "b/c/3.py", "a.txt", "b/c.txt", "b/.git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    upload(memory, tmp_path)
    sources = ("b", "*.txt", "b/c/3.py", "**/1.txt")
    found = [list(documents([f"{root}/{source}" for source in sources], "text")) for root in (tmp_path, BUCKET)]
    local, remote = ([document.text for document in documents] for documents in found)
    assert remote == local and len(local) == 5, "a file that several sources list comes once"


def test_a_store_from_urls_is_the_store_from_the_disk(tmp_path, memory):
    """Byte for byte, its tokenizer read at a URL too; only the digests of the sources name other paths."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "texts/tokenizer.json").write_text(train_tokenizer(TEXTS, 300, "<|endoftext|>").text)
    upload(memory, tmp_path / "texts")
    stores = []
    for number, root in enumerate((tmp_path / "texts", BUCKET)):
        store = tmp_path / f"store{number}"
        config = prepare_config(store, f"{root}/a.jsonl", tokenizer={"path": f"{root}/tokenizer.json"})
        prepare(config, progress=False)
        prepare(config, progress=False)  # again: the settings are the same
        stores.append({name: content for name, content in every_byte(store).items() if name != "sources.json"})
    assert stores[0] == stores[1]


def test_a_changed_object_is_read_again_and_an_unchanged_one_is_not(memory, monkeypatch):
    memory.pipe("/bucket/a.txt", b"same")
    files = find_files([f"{BUCKET}/a.txt"])
    known = digests(files, {})
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", None)
        assert digests(files, known) == known
    memory.pipe("/bucket/a.txt", b"diff")
    assert digests(find_files([f"{BUCKET}/a.txt"]), known) != known


@pytest.mark.parametrize(("url", "package"), [("gs://b/x.jsonl", "gcsfs"), ("s3://b/*.txt", "s3fs"), ("https://h/x.txt", "aiohttp")])
def test_a_missing_package_is_named_in_one_line(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    with pytest.raises(UserError, match=rf"{url.partition(':')[0]}:// needs the package {package}.*pip install {package}") as caught:
        find_files([url])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [("nothere://b/x", "no storage that fsspec knows"), (f"{BUCKET}/none.txt", "does not exist"), (f"{BUCKET}/*.none", "matches no file")],
)
def test_a_url_without_files_is_named(url, says):
    with pytest.raises(UserError, match=says) as caught:
        find_files([url])
    assert url in str(caught.value)


def test_storage_that_cannot_be_reached_is_tried_again_and_then_named(memory, monkeypatch):
    calls = []

    def info(self, path, **_):
        calls.append(path)
        raise TimeoutError("no answer")

    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(type(memory), "info", info)
    with pytest.raises(UnavailableError, match=f"{BUCKET}/a.txt: cannot be read: .*no answer; try again"):
        find_files([f"{BUCKET}/a.txt"])
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "json.arrayrecord"])
def test_an_object_cut_short_is_one_line_that_names_its_url(tmp_path, memory, name):
    content = write(tmp_path / name, TEXTS).read_bytes()
    memory.pipe(f"/bucket/{name}", content[: int(0.9 * len(content))])
    with pytest.raises(UserError, match=f"memory://.*{name}") as caught:
        list(documents([f"{BUCKET}/{name}"], "text"))
    assert "\n" not in str(caught.value)


def test_the_config_takes_urls_and_refuses_file(tmp_path):
    sources = ("gs://b/x", "s3://b/x/*.jsonl", "hf://datasets/o/d/a.parquet", "https://h/a.jsonl.gz?download=1")
    assert PrepareConfig(sources=sources).sources == sources
    with pytest.raises(ValueError, match="without file:"):
        PrepareConfig(sources=("file:///texts",))
