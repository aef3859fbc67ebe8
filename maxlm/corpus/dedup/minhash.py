"""MinHash signatures of many documents at once: n-grams, band hashes, and the sample by which pairs are verified.

The sketch is Fast Similarity Sketching (Dahlgaard, Knudsen, Thorup 2017, arXiv 1704.04370): an n-gram falls into one random slot in each of
ROUNDS rounds, a slot keeps the smallest (round, hash), and a slot still empty takes a hash of its own over all n-grams. As with classic
MinHash, two sets agree in a slot with a probability equal to their Jaccard similarity; the cost is about one hash an n-gram, not one for
each slot.
"""

from functools import cache

import numpy as np

from maxlm.corpus.dedup import compiled
from maxlm.corpus.dedup.settings import MinHashSettings
from maxlm.corpus.dedup.words import scalar_mix

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
