"""A token store for chaos: so large that every batch reads from the disk, and with batches that can be poisoned."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from maxlm.config.schema import DataConfig
from maxlm.data import manifest, storage
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.manifest import SPLITS, StoreInfo
from maxlm.data.writer import SplitWriter

VOCABULARY, SEQ_LEN, BATCH = 300, 32, 8
DOCUMENTS, LENGTH = 500, 16_000  # of training: a thousand chunks, of which a process keeps each once it was read
ALPHABET = 64  # ids that occur, beside those of poison
END = "<|endoftext|>"


def make_store(path: Path, poisoned: Sequence[int] = ()) -> None:
    """Write a store of sequences that are mostly predictable. Batches `poisoned`, of a run of seed 0, hold random tokens above
    ALPHABET.
    """
    dice = np.random.default_rng(0)
    sizes = {"train": DOCUMENTS, "eval": 10}
    tokens = {split: np.stack([_document(dice) for _ in range(count)]) for split, count in sizes.items()}
    if poisoned:
        make_store(path)
        rows = Pipeline(DataConfig(store=str(path), seq_len=SEQ_LEN), global_batch=BATCH, seed=0, vocab_size=VOCABULARY)
        flat = tokens["train"].reshape(-1)
        for start in np.concatenate([rows.sample_ids(batch) for batch in poisoned]) * SEQ_LEN:
            window = flat[start : start + SEQ_LEN + 1]
            window[window != 0] = dice.integers(ALPHABET + 1, VOCABULARY, np.count_nonzero(window))
    _write(path, tokens)


def _document(dice: np.random.Generator) -> np.ndarray:
    """Every token follows from the one before, except for one in eight; the last is 0."""
    steps = np.where(dice.random(LENGTH) < 0.125, dice.integers(0, ALPHABET, LENGTH), 7)
    document = 1 + (dice.integers(0, ALPHABET) + np.cumsum(steps)) % ALPHABET
    document[-1] = 0
    return document.astype(np.uint32)


def _write(path: Path, tokens: dict[str, np.ndarray]) -> None:
    splits = {}
    for split in SPLITS:
        writer = SplitWriter(str(path), split, np.dtype(np.uint16))
        for document in tokens[split]:
            writer.add(document)
        writer.finish()
        splits[split] = writer.info
    text = _tokenizer()
    storage.write_bytes(str(path), manifest.TOKENIZER, text.encode())
    settings: dict[str, Any] = {"data.prepare.tokenizer.end_of_document": END}
    hashes: dict[str, Any] = {"tokenizer_hash": manifest.fingerprint(json.loads(text)), "fingerprint": manifest.fingerprint(settings)}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "end_of_document_id": 0, "dtype": "uint16", "splits": splits}
    manifest.save(str(path), StoreInfo(**hashes, settings=settings, **sizes))


def _tokenizer() -> str:
    """Bytes, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={END: 0, **{char: number + 1 for number, char in enumerate(alphabet)}}, merges=[]))
    bpe.add_special_tokens([END])
    return bpe.to_str()
