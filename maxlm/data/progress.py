"""Where an unfinished prepare stands, saved beside the arrays so that the same command can go on from there.

Order is everything: first what is held in memory goes to a fresh prefix, then preparing.json names it, then the old one is
deleted. Whatever moment it is killed at, preparing.json names a whole state. Shards written after it are written again,
with the same content.
"""

import json
from typing import Any

import numpy as np

from maxlm.config.errors import UserError
from maxlm.data import storage
from maxlm.data.manifest import PROGRESS, SPLITS
from maxlm.data.writer import SplitWriter

HELD = "preparing"  # prefix of what was held in memory


def begin(store: str, fingerprint: str) -> None:
    """Mark the folder as a store being made, with nothing in it yet."""
    _write(store, {"fingerprint": fingerprint, "saves": 0, "documents": 0, "splits": None})


def load(store: str) -> dict[str, Any] | None:
    """What preparing.json says, or None where there is none."""
    text = storage.read_bytes(store, PROGRESS)
    if text is None:
        return None
    try:
        progress = json.loads(text)
        return {key: progress[key] for key in ("fingerprint", "saves", "documents", "splits")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store}/{PROGRESS} is damaged: {error}; delete {store} and prepare it again.") from error


def save(store: str, progress: dict[str, Any], documents: int, writers: dict[str, SplitWriter]) -> dict[str, Any]:
    """Save that `documents` of the sources are in `writers`; returns the new progress."""
    number = progress["saves"] + 1
    splits: dict[str, dict[str, int]] = {}
    for split, writer in writers.items():
        splits[split] = {}
        for name, array in writer.arrays().items():
            storage.write_bytes(store, f"{HELD}/{number}/{split}.{name}", array.rest().tobytes())
            splits[split][name] = array.written
    new = {"fingerprint": progress["fingerprint"], "saves": number, "documents": documents, "splits": splits}
    _write(store, new)
    storage.delete_prefix(store, f"{HELD}/{number - 1}/")
    return new


def restore(store: str, progress: dict[str, Any], dtype: np.dtype) -> dict[str, SplitWriter]:
    """Writers that stand where the saved ones stood; new ones where nothing was saved."""
    if not progress["splits"]:
        return {split: SplitWriter(store, split, dtype) for split in SPLITS}
    writers = {}
    for split, arrays in progress["splits"].items():
        resume = {}
        for name, written in arrays.items():
            held = storage.read_bytes(store, f"{HELD}/{progress['saves']}/{split}.{name}")
            if held is None:
                raise UserError(f"{store} lost what an interrupted prepare had saved; delete it and prepare it again.")
            resume[name] = (written, np.frombuffer(held, dtype if name == "tokens" else np.uint64))
        writers[split] = SplitWriter(store, split, dtype, resume)
    return writers


def end(store: str) -> None:
    """Clear away what only an unfinished prepare needs."""
    storage.delete_prefix(store, f"{HELD}/")
    storage.delete_prefix(store, PROGRESS)


def _write(store: str, progress: dict[str, Any]) -> None:
    storage.write_bytes(store, PROGRESS, json.dumps(progress).encode())
