"""MinHash signatures of many documents at once, and files of them: one Parquet file for each shard of the input, a row a document.

A signature has band hashes of n-grams, and the sample by which pairs are verified. The sketch is Fast Similarity Sketching (Dahlgaard,
Knudsen, Thorup 2017, arXiv 1704.04370): an n-gram falls into one random slot in each of ROUNDS rounds, a slot keeps the smallest
(round, hash), and a slot still empty takes a hash of its own over all n-grams. As with classic MinHash, two sets agree in a slot with a
probability equal to their Jaccard similarity; the cost is about one hash an n-gram, not one for each slot.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from maxlm.corpus.dedup import compiled
from maxlm.corpus.dedup.settings import DedupSettings, MinHashSettings
from maxlm.corpus.dedup.tables import BY_LENGTH, HASHES, Priority, lists, parquet
from maxlm.corpus.dedup.words import hash_words, scalar_mix
from maxlm.corpus.document import Document, groups
from maxlm.corpus.urls import is_url, url_key

ROUNDS = 4


def ngram_hashes(words: np.ndarray, offsets: np.ndarray, ngram: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of all runs of `ngram` words that stay within a document, and their offsets by document (int64, D + 1).

    A document of fewer words has none.
    """
    factors = np.array([scalar_mix(1000 + place) | 1 for place in range(ngram)], np.uint64)
    return compiled.hash_ngrams(words, offsets, factors, np.uint64(scalar_mix(seed)))


def band_hashes(ngrams: np.ndarray, offsets: np.ndarray, settings: MinHashSettings) -> np.ndarray:
    """Hashes of the bands, uint64 (D, bands). The row of a document without n-grams means nothing."""
    slots = sketch(ngrams, offsets, settings.bands * settings.rows)
    return compiled.chain_rows(slots, settings.bands, np.uint64(scalar_mix(2)))


def sketch(ngrams: np.ndarray, offsets: np.ndarray, slots: int) -> np.ndarray:
    """Sketch of each document's set of n-grams, uint64 (D, slots). The row of a document without n-grams has no value."""
    table = np.full((len(offsets) - 1, slots), compiled.EMPTY)
    rounds = np.array([scalar_mix(100 + turn) for turn in range(ROUNDS)], np.uint64)
    compiled.fill_sketches(ngrams, offsets, table, rounds, _slot_seeds(slots), np.uint64(scalar_mix(3)))
    return table


@cache
def _slot_seeds(slots: int) -> np.ndarray:
    return np.array([scalar_mix(10_000 + slot) for slot in range(slots)], np.uint64)


def samples(ngrams: np.ndarray, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The `size` smallest different 32-bit hashes of each document's n-grams (uint32, ascending), and their offsets (int64, D + 1)."""
    documents = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    keys = np.sort((documents << np.uint64(32)) | (ngrams >> np.uint64(32)))
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    bounds = np.searchsorted(keys, np.arange(len(offsets), dtype=np.uint64) << np.uint64(32))
    counts = np.minimum(np.diff(bounds), size)
    ends = np.cumsum(counts)
    index = np.repeat(bounds[:-1] - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
    return keys[index].astype(np.uint32), np.append(0, ends)


def jaccard(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray], size: int) -> np.ndarray:
    """Jaccard similarity of pairs of sets from their samples (`samples`: values and offsets): exact below `size`, else estimated."""
    pairs = len(left[1]) - 1
    if pairs == 0:
        return np.zeros(0)
    owner = [np.repeat(np.arange(pairs, dtype=np.uint64), np.diff(offsets)) for _, offsets in (left, right)]
    keys = np.concatenate([(own << np.uint64(32)) | side[0] for own, side in zip(owner, (left, right), strict=True)])
    keys.sort()
    twice = np.append(keys[1:] == keys[:-1], False)
    distinct = np.append(True, keys[1:] != keys[:-1])
    keys, twice = keys[distinct], twice[distinct]
    bounds = np.searchsorted(keys, np.arange(pairs + 1, dtype=np.uint64) << np.uint64(32))
    # The smallest hashes of the union are known as far as the smaller of two cut samples goes, which holds at least `size` of them.
    union = np.minimum(np.diff(bounds), np.where(np.maximum(np.diff(left[1]), np.diff(right[1])) < size, np.diff(bounds), size))
    agree = np.append(0, np.cumsum(twice))
    return (agree[bounds[:-1] + union] - agree[bounds[:-1]]) / np.maximum(union, 1)


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
