"""Small stores of marked ids that several rooms test with."""

import numpy as np

from maxlm.data import manifest, marks
from maxlm.data.manifest import StoreInfo
from maxlm.data.writer import SplitWriter


def write_marked(path, documents, evaluation=(), kind="chat", vocab_size=100):
    """A store of these ids with marks; returns its path."""
    splits = {}
    for split, own in (("train", documents), ("eval", evaluation)):
        writer = SplitWriter(str(path), split, marks.DTYPE)
        for document in own:
            writer.add(document)
        writer.finish()
        splits[split] = writer.info
    info = {"tokenizer_hash": "t", "vocab_size": vocab_size, "end_of_document_id": 0, "dtype": "uint32", "fingerprint": "f"}
    manifest.save(str(path), StoreInfo(**info, settings={manifest.CONVERSATIONS: kind}, splits=splits))
    return str(path)


def conversations(count, longest=17, seed=0):
    """Marked documents of 3 to `longest` ids; the id of the first tells the document."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = rng.integers(1, 100, rng.integers(3, longest + 1))
        ids[0], ids[1] = number % 100, number // 100
        found.append(marks.segment(ids, np.arange(len(ids)) >= rng.integers(1, len(ids))))
    return found


def pairs(count, seed=0, longest=7):
    """Marked preference pairs: two segments of 4 to `longest` ids, of which those after the second count."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, longest + 1, (count, 2))
    return [np.concatenate([marks.segment(rng.integers(1, 100, n), np.arange(n) >= 2) for n in pair]) for pair in lengths]
