"""Text survives a tokenizer to the letter, documents stay apart, and a hash follows what a tokenizer does."""

import json

import numpy as np
import pytest
import tokenizers
from data_cases import some_texts
from tokenizers import Tokenizer as Bpe, models

from maxlm.base.errors import ConfigError, UserError
from maxlm.data import tokenizer as module
from maxlm.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash, train_tokenizer

END = "<|endoftext|>"
TEXTS = some_texts(200)
AWKWARD = ["", " ", "\n\n\t x", "naïve 漢字 🙂\r\n", f"before {END} after", "\x01\x7f\ufeff", "é" * 3000]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, 400, END)


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("piece_chars", [7, 2**20])
def test_text_comes_back_to_the_letter(trained, monkeypatch, text, piece_chars):
    monkeypatch.setattr(module, "PIECE_CHARS", piece_chars)
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("text", ["hello " * 20, "hello\nworld\n" * 10])
def test_a_long_text_gets_no_space_where_one_is_put_before_every_text(monkeypatch, text):
    """As by Llama 2's tokenizer: in pieces each would have one."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    replaced = tokenizers.normalizers.Replace(" ", "▁")
    bpe.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), replaced])
    decoders = tokenizers.decoders
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "</s>"]
    bpe.train_from_iterator(["hello world\nhello "] * 3, tokenizers.trainers.BpeTrainer(special_tokens=special, show_progress=False))
    tokenizer = Tokenizer(bpe.to_str(), "</s>", "made here")
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "PIECE_CHARS", 16)
    np.testing.assert_array_equal(tokenizer.encode(text), whole)
    assert tokenizer.decode(whole) == text


def test_the_end_of_a_document_cannot_be_written_in_a_text(trained):
    documents = trained.encode_documents([*AWKWARD, *TEXTS])
    for ids in documents:
        assert np.flatnonzero(ids == trained.end_of_document_id).tolist() == [len(ids) - 1]


def test_documents_encoded_together_are_those_encoded_alone(trained):
    together = trained.encode_documents([*AWKWARD, *TEXTS])
    for text, ids in zip([*AWKWARD, *TEXTS], together, strict=True):
        np.testing.assert_array_equal(ids[:-1], trained.encode(text))


def test_training_is_deterministic_and_compresses(trained):
    again = train_tokenizer(TEXTS, 400, END)
    assert again.text == trained.text and again.hash == trained.hash and trained.vocab_size == 400
    text = " ".join(TEXTS)
    assert len(trained.encode(text)) < 0.6 * len(text.encode())
    assert train_tokenizer(TEXTS, 401, END).hash != trained.hash


def test_the_hash_ignores_spacing_and_key_order_only(trained, tmp_path):
    content = json.loads(trained.text)
    (tmp_path / "same.json").write_text(json.dumps(dict(reversed(content.items())), indent=4))
    content["model"]["vocab"]["zz"] = 400
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert tokenizer_hash(str(tmp_path / "same.json")) == trained.hash
    assert tokenizer_hash(str(tmp_path / "other.json")) != trained.hash
    assert load_tokenizer(str(tmp_path / "same.json"), END).encode("alpha beta").tolist() == trained.encode("alpha beta").tolist()


def test_a_tokenizer_that_truncates_or_pads_does_not_here(trained, tmp_path):
    bpe = Bpe.from_str(trained.text)
    bpe.enable_truncation(4)
    bpe.enable_padding(length=64)
    bpe.save(str(tmp_path / "t.json"))
    text = " ".join(TEXTS[:4])
    np.testing.assert_array_equal(load_tokenizer(str(tmp_path / "t.json"), END).encode(text), trained.encode(text))


def test_bad_tokenizers_are_one_line(trained, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json").write_text(trained.text[:500])
    (tmp_path / "latin.json").write_bytes(b"caf\xe9")
    for name, says in (
        ("none.json", "no such"),
        ("list.json", "not a tokenizer.json"),
        ("cut.json", "not a tokenizer.json"),
        ("latin.json", "utf-8"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            load_tokenizer(str(tmp_path / name), END)
        assert name in str(caught.value)
    with pytest.raises(UserError, match=r"cut\.json"):
        tokenizer_hash(str(tmp_path / "cut.json"))


def test_an_end_of_document_must_be_a_special_token(trained):
    with pytest.raises(ConfigError, match=r"end_of_document = <eod>.*not a special token.*endoftext"):
        Tokenizer(trained.text, "<eod>", "here")
    plain = Bpe(models.BPE())
    plain.add_tokens(["<eod>"])
    with pytest.raises(ConfigError, match="not a special token"):
        Tokenizer(plain.to_str(), "<eod>", "here")


def test_a_word_that_text_makes_is_refused_as_end_of_document():
    texts = ["alpha alpha alpha"] * 50
    with pytest.raises(ConfigError, match="ordinary text"):
        train_tokenizer(texts, 300, "alpha").encode_documents(["alpha"])


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"data\.prepare\.tokenizer\.vocab_size = 256.*at least 257"):
        train_tokenizer(TEXTS, 256, END)
    assert train_tokenizer(TEXTS, 257, END).vocab_size == 257
