"""Byte-level BPE: train, load, encode, decode. Every document is closed by one end-of-document token."""

import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Bpe, decoders, models, pre_tokenizers, trainers

from maxlm.base.errors import ConfigError, UserError
from maxlm.base.paths import is_remote, read_file, user_path
from maxlm.data import manifest, storage
from maxlm.data.text_frame import FRAME, TextFrame, started_frame
from maxlm.documents.files import read_url, reading

FIELD = "data.prepare.tokenizer"
BYTES = 256
MOST_BYTES = 2**29  # of a tokenizer's file
_BEFORE = "\n.x0"  # characters that a continuation may follow, the first that gives a token of its own
PIECE_CHARS = 2**20  # longer texts are encoded in pieces: an encoding costs some 100 bytes a token while it is made


class Tokenizer:
    """Text to ids and back. Special tokens written in a text are encoded as text unless a call asks for the tokens (`special`)."""

    def __init__(self, content: bytes | str, end_of_document: str, source: str, frame: TextFrame | None = None) -> None:
        """`content`: a tokenizer.json; `source` names it in errors; `frame`: of the model that it belongs to.

        Raises UserError: it is no tokenizer, or `end_of_document` is not one of its special tokens.
        """
        try:
            self.text = content if isinstance(content, str) else content.decode()
            self._bpe = Bpe.from_str(self.text)
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{source} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self._bpe.encode_special_tokens = True
        self.vocab_size = max(self._bpe.get_vocab(with_added_tokens=True).values()) + 1
        self.special = {added.content for added in self._bpe.get_added_tokens_decoder().values() if added.special}
        if end_of_document not in self.special:
            rule = f"is not a special token of {source}"
            raise ConfigError(f"{FIELD}.end_of_document", end_of_document, rule, f"use one of {sorted(self.special)[:8]}")
        self.end_of_document = end_of_document
        self.end_of_document_id = int(self._bpe.get_vocab(with_added_tokens=True)[end_of_document])
        self.frame = frame or TextFrame()

    @property
    def prefix(self) -> int:
        """Id of the token before a text that nothing precedes."""
        return self.end_of_document_id if self.frame.prefix is None else self.frame.prefix

    def opened(self, ids: Sequence[int]) -> list[int]:
        """Ids of a prompt: `ids` after those that open every text of the model, unless they begin with them; of no ids, one at least."""
        opening = self.frame.opening
        return [*(() if tuple(ids[: len(opening)]) == opening else opening), *ids] or [self.prefix]

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the prompt `text`, as `opened`. `special`: as in `encode`."""
        return self.opened(self.encode(text, special=special).tolist())

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches every special token."""
        return re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))))

    @property
    def ids(self) -> dict[str, int]:
        """Id of every token, special ones included."""
        return dict(self._bpe.get_vocab(with_added_tokens=True))

    @functools.cached_property
    def hash(self) -> str:
        """sha256, in hex, of the tokenizer.json as canonical JSON."""
        return manifest.fingerprint(json.loads(self.text))

    @functools.cached_property
    def joins(self) -> bool:
        """True if a text has the same ids as its lines one by one: not where a space is put before every text."""
        whole, first, second = (self._bpe.encode(text, add_special_tokens=False).ids for text in ("a\nb", "a\n", "b"))
        return bool(whole == first + second)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Ids of `text`, uint32, without an end-of-document token. `special`: special tokens written in it are those tokens."""
        return self.encode_rendered(text)[0] if special else self.encode_documents([text])[0][:-1]

    def encode_pair(self, prompt: str, response: str, *, special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a prompt, as generation encodes it, and of the response after it: both encoded as one text and cut where the prompt ends.

        Where a token would span the cut, as in `f(x` and `)`, the response is encoded alone, without the space that some tokenizers put
        before a text. `special`: as in `encode`.
        """
        before, whole = self.encode(prompt, special=special), self.encode(prompt + response, special=special)
        if np.array_equal(whole[: len(before)], before):
            return before, whole[len(before) :]
        return before, self._continued(response, special)

    def _continued(self, text: str, special: bool) -> np.ndarray:
        """Ids of `text` inside a longer one: after a character that no token of `text` is joined with."""
        if not self.joins:
            for character in _BEFORE:
                first, both = self.encode(character), self.encode(character + text, special=special)
                if np.array_equal(both[: len(first)], first):
                    return both[len(first) :]
        return self.encode(text, special=special)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32, closed by the end-of-document token.

        Raises UserError: the end-of-document token came out of a text, so documents could not be separated.
        """
        pieces = [list(_pieces(text)) if len(text) > PIECE_CHARS and self.joins else [text] for text in texts]
        encodings = iter(self._bpe.encode_batch_fast([piece for parts in pieces for piece in parts], add_special_tokens=False))
        end = np.array([self.end_of_document_id], np.uint32)
        documents = []
        for parts in pieces:
            ids = np.concatenate([*(np.array(next(encodings).ids, np.uint32) for _ in parts), end])
            if (ids[:-1] == self.end_of_document_id).any():
                raise ConfigError(f"{FIELD}.end_of_document", self.end_of_document, "is made from ordinary text", "use a special token")
            documents.append(ids)
        return documents

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of what a chat template wrote, uint32 [N], and the characters of each, [N, 2]. Special tokens in it are those tokens."""
        try:
            self._bpe.encode_special_tokens = False
            encoded = self._bpe.encode(text, add_special_tokens=False)
        finally:
            self._bpe.encode_special_tokens = True
        return np.array(encoded.ids, np.uint32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids, without special tokens."""
        return self._bpe.decode([int(token) for token in ids], skip_special_tokens=True)


def _pieces(text: str) -> Iterator[str]:
    """Pieces of `text` of at most PIECE_CHARS characters, cut at line ends if possible."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]


def tokenizer_hash(path: str) -> str:
    """sha256, in hex, of the tokenizer.json at `path`, local or a URL, as canonical JSON.

    Raises UserError: the file is missing or no JSON.
    """
    try:
        return manifest.fingerprint(json.loads(_read(path)))
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error


def load_tokenizer(path: str, end_of_document: str) -> Tokenizer:
    """The tokenizer.json at `path`, local or a URL; `end_of_document` must be one of its special tokens."""
    return Tokenizer(_read(path), end_of_document, path)


def stored_tokenizer(store: str, end_of_document: str, frame: TextFrame | None = None) -> Tokenizer | None:
    """The tokenizer of a token store that may be unfinished; None if it has none yet."""
    content = storage.read_bytes(store, manifest.TOKENIZER)
    return None if content is None else Tokenizer(content, end_of_document, f"{store}/{manifest.TOKENIZER}", frame)


def open_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of the token store `folder`, or of a folder that `copy_tokenizer` wrote.

    Raises UserError if it is missing, or if a file of it differs from its checksum.
    """
    info = manifest.load(folder)
    if info is None:
        raise UserError(f"{folder} holds no {manifest.MANIFEST}: it is neither a token store nor the tokenizer folder of a run.")
    manifest.check_files(folder, info, [manifest.TOKENIZER, *manifest.COMPANIONS])
    end = info.settings["data.prepare.tokenizer.end_of_document"]
    tokenizer = stored_tokenizer(folder, end, TextFrame.from_settings(info.settings))
    if tokenizer is None:
        raise UserError(f"{folder}/{manifest.TOKENIZER} is missing; {manifest.REMAKE}.")
    return tokenizer


def started_tokenizer(store: str, own: Path, source: Path | None, *, goes_on: bool = False, turns: Collection[int] = ()) -> Tokenizer:
    """The tokenizer of the token store `store` with the frame of `started_frame`, as `copy_tokenizer` records it in `own`."""
    tokenizer = open_tokenizer(store)
    tokenizer.frame = started_frame(source, own, tokenizer.end_of_document_id, goes_on=goes_on, turns=turns)
    return tokenizer


def copy_tokenizer(store: str, folder: Path, source: Path | None = None, *, goes_on: bool = False, turns: Collection[int] = ()) -> None:
    """Copy tokenizer and manifest of `store` into `folder`, so that a run's model can be used without the store. The companions of the
    tokenizer come from the store, and those that it lacks from the folder `source`, the tokenizer of the model that the run starts from,
    as does the frame of texts. `goes_on`, `turns`: as of `started_frame`.
    """
    content, info = storage.read_bytes(store, manifest.TOKENIZER), manifest.load(store)
    assert content is not None and info is not None, "a store that opened has both"
    storage.write_bytes(str(folder), manifest.TOKENIZER, content)
    frame = started_frame(source, folder, info.end_of_document_id, goes_on=goes_on, turns=turns)
    if frame != TextFrame():
        settings = {**info.settings, FRAME: frame.to_json()}
        info = info.model_copy(update={"settings": settings, "fingerprint": manifest.fingerprint(settings)})
    storage.write_bytes(str(folder), manifest.MANIFEST, manifest.as_bytes(info.model_dump(mode="json")))
    companions = companions_of(store)
    lacking = {} if source is None or manifest.SETTINGS in companions else companions_of(str(source))
    if manifest.TEMPLATE in companions:
        lacking.pop(manifest.TOOL_TEMPLATE, None)  # the data was rendered with the template of the store alone
    for name, content in (lacking | companions).items():
        storage.write_bytes(str(folder), name, content)


def companions_of(folder: str) -> dict[str, bytes]:
    """The companion files of a tokenizer.json, local or at a URL; {} for one that stands alone."""
    found = {name: read_if_present(f"{folder.rstrip('/')}/{name}") for name in manifest.COMPANIONS}
    return {name: content for name, content in found.items() if content is not None}


def tokenizer_info(tokenizer: Tokenizer, settings: dict[str, Any]) -> manifest.StoreInfo:
    """Manifest of a folder that holds this tokenizer and no tokens. `settings`: further ones."""
    settings = {f"{FIELD}.end_of_document": tokenizer.end_of_document, **settings}
    return manifest.StoreInfo(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        end_of_document_id=tokenizer.end_of_document_id,
        dtype=manifest.smallest_dtype(tokenizer.vocab_size).name,  # type: ignore[arg-type]
        fingerprint=manifest.fingerprint(settings),
        settings=settings,
        splits={split: manifest.SplitInfo(tokens=0, documents=0) for split in manifest.SPLITS},
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer that no store holds into the folder of a run, as `copy_tokenizer` does."""
    settings = {} if tokenizer.frame == TextFrame() else {FRAME: tokenizer.frame.to_json()}
    storage.write_bytes(str(folder), manifest.TOKENIZER, tokenizer.text.encode())
    storage.write_bytes(str(folder), manifest.MANIFEST, manifest.as_bytes(tokenizer_info(tokenizer, settings).model_dump(mode="json")))


def train_tokenizer(texts: Iterable[str], vocab_size: int, end_of_document: str) -> Tokenizer:
    """A byte-level BPE (GPT-2, Radford et al. 2019) of at most `vocab_size` tokens; fewer if the text yields no more.

    The same texts give the same tokenizer, whatever the number of threads.
    """
    if vocab_size < BYTES + 1:
        rule = f"is below {BYTES + 1}, the {BYTES} bytes and the end-of-document token"
        raise ConfigError(f"{FIELD}.vocab_size", vocab_size, rule, f"use at least {BYTES + 1}")
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[end_of_document], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(bpe.to_str(), end_of_document, "the trained tokenizer")


def read_if_present(path: str) -> bytes | None:
    """The file at `path`, local or a URL; None if there is none."""
    file = user_path(path)
    with reading(path):
        return read_url(path) if is_remote(path) else read_file(file, MOST_BYTES) if file.exists() else None


def _read(path: str) -> bytes:
    content = read_if_present(path)
    if content is None:
        raise UserError(f"{path}: there is no such tokenizer.json.")
    return content
