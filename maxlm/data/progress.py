"""Progress of an unfinished prepare, saved beside the arrays, so that the same command can continue.

A save first writes the buffered elements to a new prefix, then preparing.json that names it, then deletes the old prefix:
at every moment preparing.json names a complete state. Shards written after it are written again, with the same content.
"""

import json
from typing import Any

import numpy as np

from maxlm.config.errors import UserError
from maxlm.data import storage
from maxlm.data.manifest import PROGRESS, SPLITS
from maxlm.data.writer import SplitWriter

BUFFERED = "preparing"  # prefix of the elements that were in memory


def begin(store: str, fingerprint: str) -> None:
    """Mark the folder as an unfinished store without documents."""
    _write(store, {"fingerprint": fingerprint, "saves": 0, "documents": 0, "splits": None})


def load(store: str) -> dict[str, Any] | None:
    """Content of preparing.json, or None if it does not exist."""
    text = storage.read_bytes(store, PROGRESS)
    if text is None:
        return None
    try:
        progress = json.loads(text)
        return {key: progress[key] for key in ("fingerprint", "saves", "documents", "splits")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store}/{PROGRESS} is damaged: {error}; delete {store} and prepare it again.") from error


def save(store: str, progress: dict[str, Any], documents: int, writers: dict[str, SplitWriter]) -> dict[str, Any]:
    """Save `writers`, which hold `documents` documents of the sources; returns the new progress."""
    number = progress["saves"] + 1
    splits: dict[str, dict[str, int]] = {}
    for split, writer in writers.items():
        splits[split] = {}
        for name, array in writer.arrays().items():
            storage.write_bytes(store, f"{BUFFERED}/{number}/{split}.{name}", array.rest().tobytes())
            splits[split][name] = array.written
    new = {"fingerprint": progress["fingerprint"], "saves": number, "documents": documents, "splits": splits}
    _write(store, new)
    storage.delete_prefix(store, f"{BUFFERED}/{number - 1}/")
    return new


def restore(store: str, progress: dict[str, Any], dtype: np.dtype) -> dict[str, SplitWriter]:
    """Writers in the saved state; empty ones if nothing was saved."""
    if not progress["splits"]:
        return {split: SplitWriter(store, split, dtype) for split in SPLITS}
    writers = {}
    for split, arrays in progress["splits"].items():
        resume = {}
        for name, written in arrays.items():
            buffered = storage.read_bytes(store, f"{BUFFERED}/{progress['saves']}/{split}.{name}")
            if buffered is None:
                raise UserError(
                    f"{store}: saved progress of the interrupted preparation is missing; delete the store and prepare it again."
                )
            resume[name] = (written, np.frombuffer(buffered, dtype if name == "tokens" else np.uint64))
        writers[split] = SplitWriter(store, split, dtype, resume)
    return writers


def end(store: str) -> None:
    """Delete the saved progress."""
    storage.delete_prefix(store, f"{BUFFERED}/")
    storage.delete_prefix(store, PROGRESS)


def _write(store: str, progress: dict[str, Any]) -> None:
    storage.write_bytes(store, PROGRESS, json.dumps(progress).encode())
