"""Small token stores and sources that many tests make."""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.config.schema import DataConfig
from maxlm.config.sections.mixture import MixtureConfig
from maxlm.data import manifest, metadata, storage
from maxlm.data.manifest import StoreInfo
from maxlm.data.metadata import About, write_index
from maxlm.data.prefetch import Batches
from maxlm.data.writer import SplitWriter

END = 0  # of a document
_copies = tempfile.TemporaryDirectory(prefix="stores-of-tests-")  # of stores that were written, by a digest of their content
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def random_documents(count: int, *, seed: int = 0, vocab_size: int = 100, longest: int = 40) -> list[np.ndarray]:
    """Documents of 0 to `longest` ids from 1 up, each closed by END."""
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(1, vocab_size, rng.integers(0, longest + 1)), END).astype(np.uint32) for _ in range(count)]


def write_store(
    path: Path,
    train: Sequence[np.ndarray],
    evaluation: Sequence[np.ndarray] = (),
    *,
    vocab_size: int = 100,
    tokenizer_hash: str = "t",
    about: Sequence[About] = (),
) -> str:
    """A whole store of these documents; returns its path. `about`: of those to train on, and then of the others.

    One on a disk that was written before is copied, in a tenth of the time.
    """
    documents = [[(document.dtype.name, document.tolist()) for document in split] for split in (train, evaluation)]
    content = repr((documents, list(about), vocab_size, tokenizer_hash, storage.TOKENS, storage.DOCUMENTS, metadata.ROWS))
    copy = Path(_copies.name) / hashlib.sha256(content.encode()).hexdigest()
    local = "://" not in str(path)
    if local and copy.exists():
        shutil.copytree(copy, path, dirs_exist_ok=True)
        return str(path)
    dtype = manifest.smallest_dtype(vocab_size)
    splits, known, fields = {}, iter(about), {}
    for split, documents in (("train", train), ("eval", evaluation)):
        writer = SplitWriter(str(path), split, dtype)
        for document in documents:
            writer.add(document, next(known) if about else None)
        writer.finish()
        splits[split], fields[split] = writer.info, writer.metadata
    write_index(str(path), fields)
    info = {"tokenizer_hash": tokenizer_hash, "vocab_size": vocab_size, "end_of_document_id": END, "dtype": dtype.name}
    manifest.save(str(path), StoreInfo(**info, fingerprint="f", settings={}, splits=splits))
    if local:
        shutil.copytree(path, copy)
    return str(path)


def config_of(store: str | None = None, **settings: Any) -> DataConfig:
    """A data section of windows of 16 tokens."""
    return DataConfig(**{"seq_len": 16, "store": store, **settings})


def mixture_of(sources: dict[str, dict[str, Any]], **settings: Any) -> MixtureConfig:
    """A data.mixture section."""
    return MixtureConfig(sources=sources, **settings)  # type: ignore[arg-type]


def prepare_config(store: Path, *sources: Any, **settings: Any) -> DataConfig:
    """A data section that prepares `store` from `sources` with a small tokenizer, in this process."""
    tokenizer = {"vocab_size": 300, **settings.pop("tokenizer", {})}
    prepare = {"sources": tuple(map(str, sources)), "workers": 1, "eval_fraction": 0.25, **settings, "tokenizer": tokenizer}
    return DataConfig(store=str(store), seq_len=16, prepare=prepare)


def some_texts(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Different texts of a few words, some with characters outside ASCII."""
    rng = np.random.default_rng(seed)
    return [f"{number} é漢🙂 " + " ".join(rng.choice(WORDS, rng.integers(1, words))) for number in range(count)]


def every_byte(folder: Path) -> dict[str, bytes]:
    """Name -> content of every file in the folder but the lock."""
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"
    }


def all_of(batches: Batches) -> list:
    """Every result left."""
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(batches.get())
    return found
