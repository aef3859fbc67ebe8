"""Files of signatures: one Parquet file for each shard of the input, a row a document."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from maxlm.corpus.dedup.minhash import band_hashes, ngram_hashes, samples
from maxlm.corpus.dedup.settings import DedupSettings
from maxlm.corpus.dedup.words import hash_words
from maxlm.corpus.dedup.writing import BY_LENGTH, HASHES, Priority, lists, parquet
from maxlm.corpus.document import Document, groups
from maxlm.corpus.urls import is_url, url_key

GROUP_ROWS = 4096  # documents of a row group, or fewer where they hold more than GROUP_CHARS
GROUP_CHARS = 1 << 23

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("priority", pa.int64()),  # place in keep order: characters of the text as it came, and above them the rank of its source
        ("url_lo", pa.uint64()),  # hash of its URL, 0 where there is none or URLs are not compared
        ("url_hi", pa.uint64()),
        ("exact_lo", pa.uint64()),
        ("exact_hi", pa.uint64()),
        ("bands", pa.list_(pa.uint64())),  # none for a document of fewer words than an n-gram
        ("sample", pa.list_(pa.uint32())),  # smallest hashes of its n-grams, ascending; none without verification
    ]
)


def signatures(documents: Sequence[Document], settings: DedupSettings, priority: Priority = BY_LENGTH) -> pa.Table:
    """Signatures of some documents, in their order: a table with SCHEMA."""
    texts = [document.text for document in documents]
    urls = np.array([_url_hash(document) if settings.url else (0, 0) for document in documents], np.uint64).reshape(-1, 2)
    exact = np.zeros((len(texts), 2), np.uint64)
    bands: list[Any] = [np.zeros(0, np.uint64)] * len(texts)
    sample: list[Any] = [np.zeros(0, np.uint32)] * len(texts)
    for positions, words in hash_words(texts):
        exact[positions] = words.exact
        if settings.minhash is None:
            continue
        ngrams, offsets = ngram_hashes(words.hashes, words.offsets, settings.minhash.ngram, settings.minhash.seed)
        hashes = band_hashes(ngrams, offsets, settings.minhash)
        for row in np.flatnonzero(np.diff(offsets)).tolist():
            bands[positions[row]] = hashes[row]
        if settings.minhash.verify:
            values, bounds = samples(ngrams, offsets, settings.minhash.verify.sample)
            for row, position in enumerate(positions):
                sample[position] = values[bounds[row] : bounds[row + 1]]
    columns: list[Any] = [
        pa.array([document.id for document in documents], pa.string()),
        pa.array([priority(document) for document in documents], pa.int64()),
        pa.array(urls[:, 0]),
        pa.array(urls[:, 1]),
        pa.array(exact[:, 0]),
        pa.array(exact[:, 1]),
        lists(bands, np.uint64),
        lists(sample, np.uint32),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write_signatures(documents: Iterable[Document], path: Path, settings: DedupSettings, priority: Priority = BY_LENGTH) -> None:
    """Write the signatures of a shard to `path`, atomically.

    The bytes depend on the documents, their order and the settings alone. Raises UserError.
    """
    with parquet(path, SCHEMA, **HASHES) as writer:
        for group in groups(documents, GROUP_CHARS, rows=GROUP_ROWS):
            writer.write_table(signatures(group, settings, priority))


def _url_hash(document: Document) -> tuple[int, int]:
    """Low and high half of BLAKE2b-128 of its URL as it is compared; zeros for a document without one, or with a placeholder."""
    url = document.metadata.get("url")
    key = url_key(url) if isinstance(url, str) and is_url(url) else ""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest() if key else bytes(16)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
