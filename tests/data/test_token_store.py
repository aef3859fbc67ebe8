"""A token store gives back what was written, and nothing else: whatever is missing, foreign or damaged is said in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_cases import random_documents, write_store

from maxlm.base import transient
from maxlm.base.errors import UnavailableError, UserError
from maxlm.data import manifest, storage
from maxlm.data.inspect import describe
from maxlm.data.storage import DamagedStoreError
from maxlm.data.token_store import TokenStore
from maxlm.data.writer import FlatWriter

DOCUMENTS = random_documents(60)
STREAM = np.concatenate(DOCUMENTS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", DOCUMENTS, DOCUMENTS[:3])
    return tmp_path / "store"


def test_ranges_documents_and_windows_are_what_was_written(store):
    opened = TokenStore(str(store))
    assert opened.n_tokens == len(STREAM) and opened.size.documents == len(DOCUMENTS)
    np.testing.assert_array_equal(opened.read(0, len(STREAM)), STREAM)
    np.testing.assert_array_equal(opened.read_documents(0, 61), np.concatenate([[0], np.cumsum([len(d) for d in DOCUMENTS])]))
    rng = np.random.default_rng(0)
    for width in (1, 16, 17, 130):
        starts = rng.integers(0, len(STREAM) + 20, 50)
        windows, lengths = opened.read_windows(starts, width)
        for start, window, length in zip(starts, windows, lengths, strict=True):
            real = STREAM[start : start + width]
            assert length == len(real)
            np.testing.assert_array_equal(window, np.pad(real, (0, width - len(real))))
    np.testing.assert_array_equal(TokenStore(str(store), "eval").read(0, 5), STREAM[:5])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_take_the_smallest_dtype(tmp_path, vocab_size, dtype):
    documents = [np.array([vocab_size - 1, 0], np.uint32)]
    opened = TokenStore(write_store(tmp_path, documents, vocab_size=vocab_size))
    assert opened.read(0, 2).dtype == opened.info.dtype == dtype
    assert opened.read(0, 2).tolist() == [vocab_size - 1, 0]


def test_tokens_that_are_all_zero_are_stored_too(tmp_path):
    opened = TokenStore(write_store(tmp_path, [np.zeros(1, np.uint32)] * 200))
    assert opened.read(0, 200).tolist() == [0] * 200


def test_a_bucket_is_read_like_a_disk(monkeypatch):
    """TensorStore's memory:// stands in for gs://: the same code path, by URL."""
    path = write_store("memory://bucket/store", DOCUMENTS, DOCUMENTS[:3])
    np.testing.assert_array_equal(TokenStore(path).read(0, len(STREAM)), STREAM)
    storage.delete(path, "train/tokens/c/1")
    with pytest.raises(UserError, match="memory://bucket/store: cannot read its train tokens"):
        TokenStore(path).read(60, 130)
    storage.delete(path, f"train/tokens/c/{(len(STREAM) - 1) // 64}")
    with pytest.raises(UserError, match="memory://bucket/store"):
        TokenStore(path)


def shards(store: Path) -> list[Path]:
    return sorted(store.glob("*/*/c/*"))


def test_every_missing_shard_is_noticed_on_opening(store):
    for shard in shards(store):
        aside = store / "aside"
        shard.rename(aside)
        with pytest.raises(UserError, match="is missing") as caught:
            describe(str(store))
        assert str(shard) in str(caught.value)
        aside.rename(shard)


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_every_truncated_shard_is_noticed_on_opening(store, cut):
    for shard in shards(store):
        whole = shard.read_bytes()
        shard.write_bytes(whole[:cut] if cut > 1 else whole[: len(whole) - 1 - cut])
        with pytest.raises(UserError, match="cut short") as caught:
            describe(str(store))
        assert str(shard) in str(caught.value)
        shard.write_bytes(whole)


def test_every_flipped_bit_of_tokens_is_noticed_on_reading(store):
    shard = store / "train/tokens/c/1"
    whole = shard.read_bytes()
    for position in range(0, len(whole), 7):
        shard.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        with pytest.raises(UserError, match="cannot read its train tokens") as caught:
            TokenStore(str(store)).read(0, len(STREAM))
        assert str(store) in str(caught.value) and "\n" not in str(caught.value)


def edit(**changes):
    """Change entries of store.json, with a checksum that fits."""

    def change(store: Path) -> None:
        body = json.loads((store / "store.json").read_text())
        del body["sha256"]
        (store / "store.json").write_bytes(manifest.as_bytes({**body, **changes}))

    return change


def swap_splits(store: Path) -> None:
    (store / "train").rename(store / "x")
    (store / "eval").rename(store / "train")
    (store / "x").rename(store / "eval")


def unfinished(store: Path) -> None:
    (store / "store.json").rename(store / "preparing.npz")


def drop(*names):
    """Files without a checksum in store.json, which has one of its own that fits."""

    def change(store: Path) -> None:
        files = json.loads((store / "store.json").read_text())["files"]
        edit(files={name: digest for name, digest in files.items() if name not in names})(store)

    return change


def flip(before: str, after: str):
    return lambda store: (store / "store.json").write_text((store / "store.json").read_text().replace(before, after))


BREAKS = {
    "another format by one bit": (flip("tokens-3", "tokens-2"), "format"),
    "no format": (edit(format=""), "format"),
    "another format, rehashed": (edit(format="maxlm-tokens-2"), "format"),
    "digests not proven": (drop("train/tokens.shards"), "no checksum of train/tokens.shards"),
    "nothing proven": (edit(files={}), "no checksum of train/tokens/zarr.json"),
    "template added": (lambda store: (store / "chat_template.jinja").write_text("x"), "chat_template.jinja has no checksum"),
    "tokenizer added": (lambda store: (store / "tokenizer.json").write_text("{}"), "tokenizer.json has no checksum"),
    "metadata gone": (edit(files={"metadata.json": "0" * 64}), "metadata.json does not match its checksum"),
    "nothing there": (shutil.rmtree, "not a token store"),
    "manifest gone": (lambda store: (store / "store.json").unlink(), "not a token store"),
    "manifest cut": (lambda store: (store / "store.json").write_text("{"), "store.json is not a maxlm token store's"),
    "manifest of something else": (lambda store: (store / "store.json").write_text('{"name": "x"}'), "not a maxlm token store's"),
    "newer format": (edit(format="maxlm-tokens-4"), "format"),
    "other dtype": (edit(dtype="uint32"), "not uint32"),
    "more tokens": (
        edit(splits={"train": {"tokens": 10**6, "documents": 60}, "eval": {"tokens": 1, "documents": 1}}),
        "store.json describes",
    ),
    "other split": (swap_splits, "does not match its checksum"),
    "array gone": (lambda store: shutil.rmtree(store / "train/tokens"), "train/tokens"),
    "array metadata broken": (lambda store: (store / "train/tokens/zarr.json").write_text("{"), "zarr.json"),
    "unfinished": (unfinished, "run `maxlm data prepare` again"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_store_is_one_line_that_names_it(store, name):
    break_it, says = BREAKS[name]
    break_it(store)
    with pytest.raises(UserError) as caught:
        TokenStore(str(store))
    assert says in str(caught.value) and str(store) in str(caught.value) and "\n" not in str(caught.value)


def test_every_bit_of_the_small_files_is_noticed(store):
    """store.json, zarr.json, the tokenizer: no flip is read as if nothing had happened, and none is a traceback."""
    for path in [store / "store.json", *store.glob("*/*/zarr.json"), *store.glob("*/*.shards")]:
        whole = path.read_bytes()
        for bit in range(0, len(whole) * 8, 67):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(damaged))
            with pytest.raises(UserError) as caught:
                describe(str(store))
            assert str(store) in str(caught.value) and "\n" not in str(caught.value)
        path.write_bytes(whole)


def test_an_edit_that_stays_valid_json_is_noticed(store):
    """Another end-of-document id would cut documents elsewhere; another tokenizer would read other text."""
    text = (store / "store.json").read_text()
    for before, after in (('"end_of_document_id": 0', '"end_of_document_id": 7'), ('"tokenizer_hash": "t"', '"tokenizer_hash": "u"')):
        (store / "store.json").write_text(text.replace(before, after))
        with pytest.raises(DamagedStoreError, match="does not match its checksum"):
            TokenStore(str(store))


def test_a_shard_in_the_place_of_another_is_noticed(store):
    """Both have the right size and right CRCs: only where they lie is wrong."""
    one, two = store / "train/tokens/c/1", store / "train/tokens/c/2"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    opened = TokenStore(str(store))
    opened.read(0, 64)
    with pytest.raises(DamagedStoreError, match="tokens/c/1, chunk 0, is not what was written"):
        opened.read(60, 70)


def rewrite(store: str, split: str, array: str, at: int, values: list[int]) -> None:
    """Other elements with valid CRCs, as another program would write them."""
    written = storage.open_array(f"{store}/{split}/{array}", write=True)
    written[at : at + len(values)].write(np.array(values, written.dtype.numpy_dtype)).result()


@pytest.mark.parametrize("place", ["disk", "memory://bucket/rewritten"])
def test_every_element_that_is_rewritten_with_a_valid_crc_is_noticed(tmp_path, place):
    """Of tokens and of documents, of both splits, on a disk and in a bucket: the line names shard and chunk; others are still read."""
    path = write_store(tmp_path / "store" if place == "disk" else place, DOCUMENTS, DOCUMENTS[:9])
    for split, array, layout in [(s, a, getattr(storage, a.upper())) for s in manifest.SPLITS for a in ("tokens", "documents")]:
        whole = TokenStore(path, split)
        read = {"tokens": whole.read, "documents": whole.read_documents}[array]
        length = {"tokens": whole.n_tokens, "documents": whole.size.documents + 1}[array]
        before = read(0, length)
        for at in {*range(0, length, 211), length - 1}:
            rewrite(path, split, array, at, [before[at] + 1])
            shard, chunk = at // layout.shard, at % layout.shard // layout.chunk
            with pytest.raises(DamagedStoreError) as caught:
                again = TokenStore(path, split)
                (again.read if array == "tokens" else again.read_documents)(0, length)
            assert f"{split}/{array}/c/{shard}, chunk {chunk}, is not what was written" in str(caught.value) and "\n" not in str(
                caught.value
            )
            rewrite(path, split, array, at, [before[at]])
    np.testing.assert_array_equal(TokenStore(path).read(0, len(STREAM)), STREAM)


def test_digests_that_fit_rewritten_tokens_are_noticed_too(store):
    """Whoever rewrites the digests of a shard as well has not rewritten those of the shards, and store.json with them."""
    rewrite(str(store), "train", "tokens", 70, [7, 7, 7])
    first, last = storage.TOKENS.shard, 2 * storage.TOKENS.shard
    other = STREAM.astype(np.uint8).copy()
    other[70:73] = 7
    storage.write_bytes(str(store / "train/tokens"), "digests/1", storage.chunk_digests(other[first:last], storage.TOKENS))
    opened = TokenStore(str(store))
    opened.read(0, 64)
    with pytest.raises(DamagedStoreError, match="tokens/digests/1 is missing, damaged or was edited"):
        opened.read(60, 70)


def test_a_chunk_that_is_read_again_is_compared_again(store, monkeypatch):
    """A long run reads a chunk in every epoch: rewritten in between, it is noticed."""
    monkeypatch.setattr("maxlm.data.token_store.CACHE_BYTES", 64)
    opened = TokenStore(str(store))
    for _ in range(2):
        np.testing.assert_array_equal(opened.read(0, len(STREAM)), STREAM)
    rewrite(str(store), "train", "tokens", 70, [int(STREAM[70]) ^ 1])
    with pytest.raises(DamagedStoreError, match="tokens/c/1, chunk 0"):
        opened.read(0, len(STREAM))


def test_what_may_pass_is_tried_again_and_has_its_own_code(store, monkeypatch, caplog):
    opened, real, tries = TokenStore(str(store)), storage.read_bytes, []

    def fails(*args):
        tries.append(1)
        if len(tries) < failures:
            raise ValueError("UNKNOWN: Error reading local file: Stale file handle [os_error_code='116']")
        return real(*args)

    monkeypatch.setattr(storage, "read_bytes", lambda *args: named(fails, *args))
    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0, 0.0))
    failures = 3
    assert opened.read(0, 10).tolist() == STREAM[:10].tolist() and caplog.text.count("is tried again") == 1
    failures = 10**6
    with pytest.raises(UnavailableError, match="Stale file handle"):
        opened.read(70, 80)


def named(read, *args):
    with storage.failures_named("store", "read it"):
        return read(*args)


def test_a_store_whose_disk_is_not_mounted_may_come_back(store, monkeypatch):
    monkeypatch.setattr(transient, "RETRY_DELAYS_S", ())
    opened = TokenStore(str(store))
    store.rename(store.parent / "away")
    with pytest.raises(UnavailableError, match="is gone"):
        opened.read(0, 10)
    (store.parent / "away").rename(store)
    assert opened.read(0, 10).tolist() == STREAM[:10].tolist()


def test_a_bucket_that_may_not_be_read_says_which_credential():
    says = r"gs://b/s: cannot read it: .*gcloud auth application-default login"
    with pytest.raises(UnavailableError, match=says), storage.failures_named("gs://b/s", "read it"):
        raise ValueError("PERMISSION_DENIED: HTTP response code: 403")


def test_a_full_or_closed_disk_is_one_line_that_names_the_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/tokens: cannot create it"):
        FlatWriter(str(tmp_path / "file/tokens"), np.dtype(np.uint8), storage.TOKENS)


def test_describe_counts_measures_and_shows(tmp_path):
    from data_cases import prepare_config, some_texts
    from rich.console import Console

    from maxlm.data.inspect import render
    from maxlm.data.prepare import prepare

    texts = some_texts(30)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    info = prepare(prepare_config(tmp_path / "store", tmp_path / "a.jsonl"), progress=False)
    found = json.loads(json.dumps(describe(str(tmp_path / "store"), samples=3)))
    assert found["tokenizer_hash"] == info.tokenizer_hash
    for split, size in info.splits.items():
        summary = found["splits"][split]
        opened = TokenStore(str(tmp_path / "store"), split)
        lengths = np.diff(opened.read_documents(0, size.documents + 1).astype(int))
        assert (summary["tokens"], summary["documents"]) == (size.tokens, size.documents)
        assert (summary["document_tokens"]["min"], summary["document_tokens"]["max"]) == (lengths.min(), lengths.max())
        assert summary["document_tokens"]["p50"] in lengths
        assert len(summary["samples"]) == 3
        for sample in summary["samples"]:
            assert any(text.startswith(sample["text"]) for text in texts) and sample["text"]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(found))
    shown = capture.get()
    assert all(f"{info.splits[split].tokens:,}" in shown for split in ("train", "eval"))
    assert json.dumps(found["splits"]["eval"]["samples"][0]["text"], ensure_ascii=False)[:40] in shown
