"""Progress of an unfinished prepare: one object beside the arrays, replaced atomically, from which the same command continues.

Shards written after the last save are written again, with the same content.
"""

import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxlm.config.errors import UserError
from maxlm.data import storage
from maxlm.data.manifest import PROGRESS, SPLITS
from maxlm.data.writer import SplitWriter


@dataclass(frozen=True)
class Progress:
    """Arrays are named split/array, as train/tokens."""

    fingerprint: str  # of the settings
    documents: int = 0  # of the sources, in the arrays
    written: dict[str, int] = field(default_factory=dict)  # elements on disk, of each array
    buffered: dict[str, np.ndarray] = field(default_factory=dict)  # elements in memory, of each array


def save(store: str, fingerprint: str, documents: int = 0, writers: dict[str, SplitWriter] | None = None) -> None:
    """Save that the first `documents` documents of the sources are in `writers`; without writers, mark the store as begun."""
    arrays = {f"{split}/{name}": array for split, writer in (writers or {}).items() for name, array in writer.arrays().items()}
    state = {"fingerprint": fingerprint, "documents": documents, "written": {name: array.written for name, array in arrays.items()}}
    content = io.BytesIO()
    buffered: dict[str, Any] = {name: array.rest() for name, array in arrays.items()}
    np.savez(content, state=np.frombuffer(json.dumps(state).encode(), np.uint8), **buffered)
    storage.write_bytes(store, PROGRESS, content.getvalue())


def load(store: str) -> Progress | None:
    """The saved progress, or None if there is none."""
    content = storage.read_bytes(store, PROGRESS)
    if content is None:
        return None
    try:
        with np.load(io.BytesIO(content)) as arrays:
            buffered = dict(arrays)
        return Progress(**json.loads(buffered.pop("state").tobytes()), buffered=buffered)
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{store}/{PROGRESS} is damaged: {error}; delete {store} and prepare it again.") from error


def restore(store: str, progress: Progress, dtype: np.dtype) -> dict[str, SplitWriter]:
    """Writers in the saved state; empty ones if nothing was saved."""
    writers: dict[str, SplitWriter] = {}
    for split in SPLITS:
        names = [name for name in progress.written if name.startswith(f"{split}/")]
        resume = {name.removeprefix(f"{split}/"): (progress.written[name], progress.buffered[name]) for name in names}
        writers[split] = SplitWriter(store, split, dtype, resume)
    return writers
