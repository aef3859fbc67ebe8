"""A token store gives back what was written, and nothing else: whatever is missing, foreign or damaged is said in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_cases import random_documents, write_store

from maxlm.config.errors import UserError
from maxlm.data import storage
from maxlm.data.inspect import describe
from maxlm.data.store import TokenStore
from maxlm.data.writer import FlatWriter

DOCUMENTS = random_documents(60)
STREAM = np.concatenate(DOCUMENTS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", DOCUMENTS, DOCUMENTS[:3])
    return tmp_path / "store"


def test_ranges_documents_and_windows_are_what_was_written(store):
    opened = TokenStore.open(str(store))
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
    np.testing.assert_array_equal(TokenStore.open(str(store), "eval").read(0, 5), STREAM[:5])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_take_the_smallest_dtype(tmp_path, vocab_size, dtype):
    documents = [np.array([vocab_size - 1, 0], np.uint32)]
    opened = TokenStore.open(write_store(tmp_path, documents, vocab_size=vocab_size))
    assert opened.read(0, 2).dtype == opened.info.dtype == dtype
    assert opened.read(0, 2).tolist() == [vocab_size - 1, 0]


def test_tokens_that_are_all_zero_are_stored_too(tmp_path):
    opened = TokenStore.open(write_store(tmp_path, [np.zeros(1, np.uint32)] * 200))
    assert opened.read(0, 200).tolist() == [0] * 200


def test_a_bucket_is_read_like_a_disk(monkeypatch):
    """TensorStore's memory:// stands in for gs://: the same code path, by URL."""
    path = write_store("memory://bucket/store", DOCUMENTS, DOCUMENTS[:3])
    np.testing.assert_array_equal(TokenStore.open(path).read(0, len(STREAM)), STREAM)
    storage.delete_prefix(path, "train/tokens/c/1")
    with pytest.raises(UserError, match="memory://bucket/store: cannot read its train tokens"):
        TokenStore.open(path).read(60, 130)
    storage.delete_prefix(path, f"train/tokens/c/{(len(STREAM) - 1) // 64}")
    with pytest.raises(UserError, match="memory://bucket/store"):
        TokenStore.open(path)


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
            TokenStore.open(str(store)).read(0, len(STREAM))
        assert str(store) in str(caught.value) and "\n" not in str(caught.value)


def edit(**changes):
    def change(store: Path) -> None:
        manifest = json.loads((store / "store.json").read_text())
        (store / "store.json").write_text(json.dumps({**manifest, **changes}))

    return change


def swap_splits(store: Path) -> None:
    (store / "train").rename(store / "x")
    (store / "eval").rename(store / "train")
    (store / "x").rename(store / "eval")


def unfinished(store: Path) -> None:
    (store / "store.json").rename(store / "preparing.json")


BREAKS = {
    "nothing there": (shutil.rmtree, "not a token store"),
    "manifest gone": (lambda store: (store / "store.json").unlink(), "not a token store"),
    "manifest cut": (lambda store: (store / "store.json").write_text("{"), "store.json is not a maxlm token store's"),
    "manifest of something else": (lambda store: (store / "store.json").write_text('{"name": "x"}'), "not a maxlm token store's"),
    "newer format": (edit(format="maxlm-tokens-2"), "format"),
    "other dtype": (edit(dtype="uint32"), "not uint32"),
    "more tokens": (
        edit(splits={"train": {"tokens": 10**6, "documents": 60}, "eval": {"tokens": 1, "documents": 1}}),
        "store.json describes",
    ),
    "other split": (swap_splits, "store.json describes"),
    "array gone": (lambda store: shutil.rmtree(store / "train/tokens"), "train/tokens"),
    "array metadata broken": (lambda store: (store / "train/tokens/zarr.json").write_text("{"), "zarr.json"),
    "unfinished": (unfinished, "run `maxlm data prepare` again"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_store_is_one_line_that_names_it(store, name):
    break_it, says = BREAKS[name]
    break_it(store)
    with pytest.raises(UserError) as caught:
        TokenStore.open(str(store))
    assert says in str(caught.value) and str(store) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_or_closed_disk_is_one_line_that_names_the_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/tokens: cannot create it"):
        FlatWriter(str(tmp_path / "file/tokens"), np.dtype(np.uint8), storage.TOKENS)


def test_describe_counts_measures_and_shows(tmp_path):
    from data_cases import prepare_config, some_texts

    from maxlm.data.inspect import as_text
    from maxlm.data.prepare import prepare

    texts = some_texts(30)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    info = prepare(prepare_config(tmp_path / "store", tmp_path / "a.jsonl"), progress=False)
    found = json.loads(json.dumps(describe(str(tmp_path / "store"), samples=3)))
    assert found["tokenizer_hash"] == info.tokenizer_hash
    for split, size in info.splits.items():
        summary = found["splits"][split]
        opened = TokenStore.open(str(tmp_path / "store"), split)
        lengths = np.diff(opened.read_documents(0, size.documents + 1).astype(int))
        assert (summary["tokens"], summary["documents"]) == (size.tokens, size.documents)
        assert (summary["document_tokens"]["min"], summary["document_tokens"]["max"]) == (lengths.min(), lengths.max())
        assert summary["document_tokens"]["p50"] in lengths
        assert len(summary["samples"]) == 3
        for sample in summary["samples"]:
            assert any(text.startswith(sample["text"]) for text in texts) and sample["text"]
    assert f"train: {info.splits['train'].tokens:,} tokens" in as_text(found)
