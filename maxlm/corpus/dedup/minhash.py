"""MinHash signatures of many documents at once: n-grams, band hashes, and the sample by which pairs are verified.

The sketch is Fast Similarity Sketching (Dahlgaard, Knudsen, Thorup 2017, arXiv 1704.04370): an n-gram falls into one random slot in each of
ROUNDS rounds, a slot keeps the smallest (round, hash), and a slot still empty takes a hash of its own over all n-grams. As with classic
MinHash, two sets agree in a slot with a probability equal to their Jaccard similarity; the cost is about one hash an n-gram, not one for
each slot.
"""

import numpy as np

from maxlm.corpus.dedup.settings import MinHashSettings
from maxlm.corpus.dedup.words import mix, scalar_mix

ROUNDS = 4
FILL = 1 << 18  # hashes computed at once for slots that are still empty
_LOW = np.uint64((1 << 56) - 1)


def ngram_hashes(words: np.ndarray, offsets: np.ndarray, settings: MinHashSettings) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of all runs of `ngram` words that stay within a document, and their offsets by document (int64, D + 1).

    A document of fewer words has none: it has exact copies only.
    """
    size, width = len(words), settings.ngram
    counts = np.maximum(np.diff(offsets) - width + 1, 0)
    out = np.append(0, np.cumsum(counts))
    if out[-1] == 0:
        return np.zeros(0, np.uint64), out
    total = np.zeros(size - width + 1, np.uint64)
    for place in range(width):
        total += words[place : size - width + 1 + place] * np.uint64(scalar_mix(1000 + place) | 1)
    first = np.repeat(offsets[:-1] - out[:-1], counts) + np.arange(out[-1])
    return mix(total[first], settings.seed), out


def band_hashes(ngrams: np.ndarray, offsets: np.ndarray, settings: MinHashSettings) -> np.ndarray:
    """Hashes of the bands, uint64 (D, bands). The row of a document without n-grams means nothing."""
    bands, rows = settings.bands, settings.rows
    slots = sketch(ngrams, offsets, bands * rows).reshape(-1, bands, rows)
    out = np.broadcast_to(np.arange(bands, dtype=np.uint64), slots.shape[:2])
    for row in range(rows):
        out = mix(out * np.uint64(0xD6E8FEB86659FD93) + slots[:, :, row], 2)
    return out


def sketch(ngrams: np.ndarray, offsets: np.ndarray, slots: int) -> np.ndarray:
    """Sketch of each document's set of n-grams, uint64 (D, slots)."""
    counts = np.diff(offsets)
    table = np.full(len(counts) * slots, ~np.uint64(0))
    documents = np.flatnonzero(counts)
    for turn in range(ROUNDS):
        if not len(documents):
            break
        which = np.repeat(documents, counts[documents])
        tokens = ngrams if len(which) == len(ngrams) else ngrams[_spans(offsets[documents], counts[documents])]
        values = mix(tokens, 100 + turn) if turn else tokens
        slot = ((values >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)
        values = (values & _LOW) | np.uint64(turn << 56)
        np.minimum.at(table, which * slots + slot.astype(np.int64), values)
        empty = (table.reshape(-1, slots)[documents] == ~np.uint64(0)).any(axis=1)
        documents = documents[empty]
    _fill(table, ngrams, offsets, slots)
    return table.reshape(-1, slots)


def _fill(table: np.ndarray, ngrams: np.ndarray, offsets: np.ndarray, slots: int) -> None:
    """Give each slot that is still empty the smallest value of its own hash over all n-grams of the document."""
    empty = np.flatnonzero(table == ~np.uint64(0))
    counts = np.diff(offsets)
    empty = empty[counts[empty // slots] > 0]
    seeds = np.fromiter((scalar_mix(10_000 + slot) for slot in range(slots)), np.uint64, slots)
    costs = np.cumsum(counts[empty // slots])
    begin = 0
    while begin < len(empty):
        spent = costs[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(costs, spent + FILL, side="right")))
        part = empty[begin:end]
        lengths = counts[part // slots]
        values = ngrams[_spans(offsets[part // slots], lengths)] ^ np.repeat(seeds[part % slots], lengths)
        values = (mix(values, 3) & _LOW) | np.uint64(ROUNDS << 56)
        table[part] = np.minimum.reduceat(values, np.cumsum(lengths) - lengths)
        begin = end


def samples(ngrams: np.ndarray, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The `size` smallest different 32-bit hashes of each document's n-grams (uint32, ascending), and their offsets (int64, D + 1)."""
    documents = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    keys = np.sort((documents << np.uint64(32)) | (ngrams >> np.uint64(32)))
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    bounds = np.searchsorted(keys, np.arange(len(offsets), dtype=np.uint64) << np.uint64(32))
    counts = np.minimum(np.diff(bounds), size)
    return keys[_spans(bounds[:-1], counts)].astype(np.uint32), np.append(0, np.cumsum(counts))


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


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated index ranges [start, start + length)."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
