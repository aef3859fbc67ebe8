"""Preparing gives the same store whatever interrupts it and however many processes do it, once; and never a half store."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import numpy as np
import pytest
from data_cases import every_byte, prepare_config, some_texts

from maxlm.base.errors import ConfigError, UserError, show
from maxlm.config.schema import DataConfig
from maxlm.data import encoding, manifest, prepare as module, storage, writer
from maxlm.data.prepare import prepare
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import load_tokenizer
from maxlm.data.writer import load_progress

TEXTS = some_texts(60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARS", 500)


def make(config: DataConfig) -> manifest.StoreInfo:
    return prepare(config, progress=False)


def texts_of(store: Path, split: str) -> list[str]:
    """The documents of a split, decoded."""
    opened = TokenStore(str(store), split)
    tokenizer = load_tokenizer(str(store / "tokenizer.json"), "<|endoftext|>")
    offsets = opened.read_documents(0, opened.size.documents + 1).astype(int)
    assert offsets[0] == 0 and offsets[-1] == opened.n_tokens
    return [tokenizer.decode(opened.read(start, stop)) for start, stop in itertools.pairwise(offsets)]


def test_every_document_is_in_one_split_and_in_order(source, tmp_path):
    info = make(prepare_config(tmp_path / "store", source))
    train, held_out = texts_of(tmp_path / "store", "train"), texts_of(tmp_path / "store", "eval")
    assert sorted(train + held_out) == sorted(TEXTS) and not set(train) & set(held_out)
    assert train == [text for text in TEXTS if text in set(train)] and held_out == [text for text in TEXTS if text in set(held_out)]
    assert 5 <= len(held_out) <= 25, "a quarter of 60, by hash"
    assert info.splits["train"].documents == len(train) and info.dtype == "uint16" and info.vocab_size == 300


def test_a_copy_of_a_document_never_lands_on_the_other_side(source, tmp_path):
    source.write_text("\n".join(json.dumps({"text": text}) for text in [*TEXTS, *TEXTS[::-1]]))
    make(prepare_config(tmp_path / "store", source))
    assert not set(texts_of(tmp_path / "store", "train")) & set(texts_of(tmp_path / "store", "eval"))


@pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.5, 0.999])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_neither_split_is_empty_where_it_can_be_helped(tmp_path, fraction, count):
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:count]))
    info = make(prepare_config(tmp_path / "store", tmp_path / "t.jsonl", eval_fraction=fraction))
    sizes = [info.splits[split].documents for split in ("train", "eval")]
    assert sum(sizes) == count and sizes[0] >= 1
    assert (sizes[1] >= 1) == (fraction > 0 and count > 1)
    assert sorted(texts_of(tmp_path / "store", "train") + texts_of(tmp_path / "store", "eval")) == sorted(TEXTS[:count])


def test_a_second_call_changes_nothing_and_reads_no_document(source, tmp_path, monkeypatch):
    config = prepare_config(tmp_path / "store", source)
    info, before = make(config), every_byte(tmp_path / "store")
    monkeypatch.setattr(module, "documents_in", None)
    assert make(config) == info and every_byte(tmp_path / "store") == before
    assert make(prepare_config(tmp_path / "store", source, workers=7)) == info, "the number of workers decides nothing"


def test_sources_of_another_date_are_read_once(source, tmp_path, monkeypatch):
    config = prepare_config(tmp_path / "store", source)
    info = make(config)
    os.utime(source)
    assert make(config) == info
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert make(config) == info


def test_a_moved_source_is_the_same_source(source, tmp_path):
    info = make(prepare_config(tmp_path / "store", source))
    moved = source.rename(tmp_path / "moved.jsonl")
    assert make(prepare_config(tmp_path / "store", moved)) == info


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eval_fraction": 0.5}, "data.prepare.eval_fraction = 0.25, and now it is 0.5"),
        ({"text_field": "id"}, "data.prepare.text_field = text, and now it is id"),
        ({"tokenizer": {"vocab_size": 301}}, "data.prepare.tokenizer.vocab_size = 300, and now it is 301"),
        ({"tokenizer": {"train_bytes": 10}}, "data.prepare.tokenizer.train_bytes"),
        ({"tokenizer": {"end_of_document": "<eod>"}}, "data.prepare.tokenizer.end_of_document"),
        ("content", "the content of data.prepare.sources was different"),
    ],
)
def test_other_settings_are_refused_by_name_and_the_store_stays(source, tmp_path, change, says):
    make(prepare_config(tmp_path / "store", source))
    before = every_byte(tmp_path / "store")
    if change == "content":
        source.write_text(source.read_text().replace("alpha", "omega"))
    with pytest.raises(ConfigError) as caught:
        make(prepare_config(tmp_path / "store", source, **({} if change == "content" else change)))
    assert says in str(caught.value) and show(str(tmp_path / "store")) in str(caught.value) and "delete this one" in str(caught.value)
    assert every_byte(tmp_path / "store") == before


def test_the_store_does_not_depend_on_the_number_of_workers(source, tmp_path):
    for workers in (1, 2):
        make(prepare_config(tmp_path / f"store{workers}", source, workers=workers))
    assert every_byte(tmp_path / "store1") == every_byte(tmp_path / "store2")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Raise KeyboardInterrupt when the reader comes to document number `count`."""
    whole = module.documents_in

    def cut(files, text_field):
        yield from itertools.islice(whole(files, text_field), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "documents_in", cut)


@pytest.mark.parametrize("save_seconds", [0.0, 1e9], ids=["goes on", "starts over"])
def test_interrupted_anywhere_it_ends_with_the_same_store(source, tmp_path, monkeypatch, save_seconds):
    config = prepare_config(tmp_path / "store", source)
    make(prepare_config(tmp_path / "whole", source))
    monkeypatch.setattr(module, "SAVE_SECONDS", save_seconds)
    for count in (0, 3, 20, 37, 59):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(patch, count)
            make(config)
        with pytest.raises(UserError, match="unfinished"):
            TokenStore(str(tmp_path / "store"))
    encoded = []
    whole = encoding._encode
    monkeypatch.setattr(encoding, "_encode", lambda texts, fraction: encoded.extend(texts) or whole(texts, fraction))
    make(config)
    assert every_byte(tmp_path / "store") == every_byte(tmp_path / "whole")
    assert (len(encoded) < 15) == (save_seconds == 0), "what was saved is not tokenized again"


def test_killed_it_goes_on_with_the_same_store(tmp_path):
    """A real process, a real SIGKILL at several moments; then the same command to its end."""
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in some_texts(1500, words=100)))
    program = (
        "import sys\nfrom maxlm.config.schema import DataConfig\nfrom maxlm.data import encoding, prepare, storage\n"
        "storage.TOKENS = storage.ArrayLayout(chunk=64, shard=8192)\nprepare.SAVE_SECONDS = 0.0\nencoding.BATCH_CHARS = 40000\n"
        "prepare.prepare(DataConfig.model_validate_json(sys.argv[1]), progress=False)\n"
    )

    def start(store: str) -> subprocess.Popen:
        config = prepare_config(tmp_path / store, tmp_path / "t.jsonl").model_dump_json()
        return fork_server.Popen([sys.executable, "-c", program, config], stderr=subprocess.PIPE)

    assert start("whole").wait() == 0
    for documents in (100, 800):
        process = start("store")
        while process.poll() is None and ((done := load_progress(str(tmp_path / "store"))) is None or done.documents < documents):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and not (tmp_path / "store/store.json").exists()
    assert start("store").wait() == 0
    assert every_byte(tmp_path / "store") == every_byte(tmp_path / "whole")


def test_an_interrupted_one_with_other_settings_starts_over(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 40)
        make(prepare_config(tmp_path / "store", source))
    other = {"eval_fraction": 0.5, "tokenizer": {"vocab_size": 310}}
    make(prepare_config(tmp_path / "store", source, **other))
    make(prepare_config(tmp_path / "whole", source, **other))
    assert every_byte(tmp_path / "store") == every_byte(tmp_path / "whole")


def test_killed_while_it_starts_over_it_keeps_nothing_of_the_other_settings(source, tmp_path, monkeypatch):
    """A kill before any of the first writes: the tokenizer of the settings before must not make the tokens of these."""
    other = {"tokenizer": {"vocab_size": 310}}
    whole = make(prepare_config(tmp_path / "whole", source, **other))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 3)
        make(prepare_config(tmp_path / "torn", source))
    left = [0]

    def counted(write):
        def count(*args, **kwargs):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return write(*args, **kwargs)

        return count

    for dies_at in range(1, 8):
        store, left[0] = tmp_path / f"store{dies_at}", dies_at
        shutil.copytree(tmp_path / "torn", store)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            for name in ("delete", "write_bytes"):
                patch.setattr(storage, name, counted(getattr(storage, name)))
            make(prepare_config(store, source, **other))
        assert make(prepare_config(store, source, **other)) == whole, dies_at
        assert every_byte(store) == every_byte(tmp_path / "whole"), dies_at


def test_it_says_how_much_of_other_settings_it_drops(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 40)
        make(prepare_config(tmp_path / "store", source))
    documents = load_progress(str(tmp_path / "store")).documents
    assert 0 < documents <= 40
    prepare(prepare_config(tmp_path / "store", source, eval_fraction=0.5))
    said = " ".join(capsys.readouterr().err.split())
    assert f"{documents} documents of an unfinished prepare with other settings or sources are dropped" in said
    assert "continuing after" not in said


EDITS = {  # of the state and the arrays of an unfinished prepare
    "documents": lambda state, _: state.update(documents=state["documents"] - 1),
    "text": lambda state, _: state.update(documents=str(state["documents"])),
    "negative": lambda state, _: state["written"].update({"train/tokens": -5}),
    "shards": lambda state, _: state["shards"].pop("train/tokens"),
    "tokens": lambda _, arrays: arrays.update({"train/tokens": arrays["train/tokens"] + 1}),
    "shape": lambda _, arrays: arrays.update({"train/tokens": arrays["train/tokens"][None]}),
    "array gone": lambda _, arrays: arrays.pop("train/tokens"),
    "array added": lambda _, arrays: arrays.update(x=arrays["train/tokens"]),
}


@pytest.mark.parametrize("name", [*EDITS, "checksum gone", "more than there are"])
def test_an_edited_progress_is_refused(source, tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 20)
        make(prepare_config(tmp_path / "store", source))
    with np.load(tmp_path / "store/preparing.npz") as file:
        arrays = dict(file)
    state = json.loads(arrays.pop("state").tobytes())
    if name in EDITS:
        EDITS[name](state, arrays)
    else:
        del state["sha256"]
    if name == "more than there are":
        state["documents"] = 10**9
        state["sha256"] = writer._checksum(state, arrays)
    np.savez(tmp_path / "store/preparing.npz", state=np.frombuffer(json.dumps(state).encode(), np.uint8), **arrays)
    with pytest.raises(
        UserError,
        match="is of 1,000,000,000 documents, and the" if name == "more than there are" else "does not match its checksum; delete",
    ) as caught:
        make(prepare_config(tmp_path / "store", source))
    assert "preparing.npz" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["store.json", "sources.json", "preparing.npz", "tokenizer.json"])
def test_a_pipe_in_the_store_is_refused_and_not_waited_for(source, tmp_path, name):
    make(prepare_config(tmp_path / "store", source))
    for gone in {name, "store.json"}:
        (tmp_path / "store" / gone).unlink(missing_ok=True)
    if name == "tokenizer.json":
        writer.save_progress(str(tmp_path / "store"), manifest.fingerprint({}))
    os.mkfifo(tmp_path / "store" / name)
    if name == "tokenizer.json":  # of other settings: it is deleted
        assert make(prepare_config(tmp_path / "store", source)).splits["train"].documents
        return
    with pytest.raises(UserError, match=f"{name}.*it is a named pipe, and not a regular file"):
        make(prepare_config(tmp_path / "store", source))


def test_a_bad_document_leaves_no_store_and_a_mended_one_is_prepared(source, tmp_path):
    good = source.read_text()
    source.write_text(good + '\n{"text": 5}')
    with pytest.raises(UserError, match=r"texts\.jsonl, line 61"):
        make(prepare_config(tmp_path / "store", source))
    with pytest.raises(UserError):
        TokenStore(str(tmp_path / "store"))
    source.write_text(good)
    assert make(prepare_config(tmp_path / "store", source)).splits["train"].documents > 0


def test_a_folder_with_something_else_is_not_touched(source, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter1.tex").write_text("...")
    with pytest.raises(ConfigError, match=r"data\.store = .*not empty.*chapter1\.tex"):
        make(prepare_config(tmp_path / "thesis", source))
    assert list(every_byte(tmp_path / "thesis")) == ["chapter1.tex"]


@pytest.mark.parametrize("store", ["file", "file/below"])
def test_a_store_that_cannot_be_is_one_line(source, tmp_path, store):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError) as caught:
        make(prepare_config(tmp_path / store, source))
    assert "\n" not in str(caught.value) and (tmp_path / "file").read_text() == "mine"


def test_two_at_once_do_not_write_over_each_other(source, tmp_path):
    with module._locked(str(tmp_path / "store")), pytest.raises(UserError, match="uses it; wait for it to end"):
        make(prepare_config(tmp_path / "store", source))
    assert make(prepare_config(tmp_path / "store", source))


def test_what_the_config_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.prepare"):
        make(DataConfig(store=str(tmp_path), seq_len=4))
    with pytest.raises(ConfigError, match=r"data\.store"):
        make(DataConfig(seq_len=4, prepare={"sources": ("python-stdlib",)}))


def test_a_given_tokenizer_is_used_and_kept(source, tmp_path):
    first = make(prepare_config(tmp_path / "first", source))
    given = prepare_config(tmp_path / "second", source, tokenizer={"path": str(tmp_path / "first/tokenizer.json")})
    assert make(given).tokenizer_hash == first.tokenizer_hash
    assert every_byte(tmp_path / "second/train") == every_byte(tmp_path / "first/train")


def test_training_text_is_bounded_shared_between_files_and_never_held_out(tmp_path):
    for name, count in (("a", 3), ("b", 200), ("c", 200)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": name + text}) for text in some_texts(count, seed=ord(name))))
    config = prepare_config(tmp_path / "store", tmp_path, tokenizer={"train_bytes": 9000}).prepare
    texts = list(module._training_texts(config, module.find_files(config.sources)))
    sizes = {name: sum(len(text.encode()) for text in texts if text[0] == name) for name in "abc"}
    assert 8000 < sum(sizes.values()) <= 9000 and sizes["a"] < 3000 < sizes["b"] and sizes["c"] > 3000
    whole = [text for text in texts if not any(text != other and other.startswith(text) for other in texts)]
    assert not any(encoding.is_held_out(text.encode(), 0.25) for text in whole[:-3])


def test_a_dead_worker_is_one_line(source, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_encode", _die)
    with pytest.raises(UserError, match=r"data\.prepare\.workers = 2"):
        make(prepare_config(tmp_path / "store", source, workers=2))


def _die(texts: list[str], fraction: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_held_out_by_hash_is_near_the_fraction():
    held = np.mean([encoding.is_held_out(f"document {number}".encode(), 0.1) for number in range(5000)])
    assert 0.08 < held < 0.12


def test_what_is_rewritten_between_interruption_and_continuation_is_noticed(source, tmp_path, monkeypatch):
    """The digests of the shards are part of the saved progress: tokens and digests on the disk that fit each other are not enough."""
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 40)
        make(prepare_config(tmp_path / "store", source))
    folder = str(tmp_path / "store/train/tokens")
    tokens = storage.open_array(folder, write=True)
    tokens[5].write(tokens[5].read().result() ^ 1).result()
    storage.write_bytes(folder, "digests/0", storage.chunk_digests(tokens[: storage.TOKENS.shard].read().result(), storage.TOKENS))
    make(prepare_config(tmp_path / "store", source))
    with pytest.raises(UserError, match="tokens/digests/0 is missing, damaged or was edited"):
        TokenStore(str(tmp_path / "store")).read(0, 10)
