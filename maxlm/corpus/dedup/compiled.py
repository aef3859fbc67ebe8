"""Compiled loops of words, n-grams and sketches. Numba compiles them once a machine and keeps the result on disk.

D documents, C characters. All arithmetic is modulo 2^64, so that a result is the same on every machine.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

SPACE = 32
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd
CHAIN = np.uint64(0xD6E8FEB86659FD93)  # odd: hash of n rows of a band -> hash of n + 1
EMPTY = ~np.uint64(0)
LOW = np.uint64((1 << 56) - 1)

Hashes = NDArray[np.uint64]
Offsets = NDArray[np.int64]


@njit(cache=True, nogil=True)
def mixed(value: np.uint64, offset: np.uint64) -> np.uint64:
    """The finaliser of SplitMix64 (Steele et al. 2014) of value + offset: a bijection that spreads every bit."""
    value += offset
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


@njit(cache=True, nogil=True)
def split_words(
    characters: np.ndarray, offsets: Offsets, flag: np.uint32, offset: np.uint64
) -> tuple[np.ndarray, Offsets, Hashes, Offsets]:
    """Characters with one space after each run of words; how many each document has; hashes of the words; their offsets (D + 1).

    `characters`: all documents, each followed by a space, SPACE being the only separator; one with `flag` is a word by itself.
    The hash of a word is mixed() of the sum over its characters of character * BASE^place.
    """
    kept, lengths = np.empty(characters.size, characters.dtype), np.zeros(offsets.size, np.int64)
    hashes, bounds = np.empty(characters.size, np.uint64), np.zeros(offsets.size + 1, np.int64)
    n_kept, n_words, power, value, inside = 0, 0, np.uint64(1), np.uint64(0), False
    for document in range(offsets.size):
        begin, before = n_kept, np.uint32(SPACE)
        for i in range(offsets[document], offsets[document + 1] if document + 1 < offsets.size else characters.size):
            character = np.uint32(characters[i])
            single = character != SPACE and character >= flag
            if inside and (character == SPACE or single):
                hashes[n_words], n_words, inside = mixed(value, offset), n_words + 1, False
            if character == SPACE:
                if before != SPACE:
                    kept[n_kept], n_kept = SPACE, n_kept + 1
            else:
                plain = character & np.uint32(flag - np.uint32(1))
                kept[n_kept], n_kept = plain, n_kept + 1
                if single:
                    hashes[n_words], n_words = mixed(np.uint64(plain), offset), n_words + 1
                elif inside:
                    value, power = value + np.uint64(plain) * power, power * BASE
                else:
                    value, power, inside = np.uint64(plain), BASE, True
            before = character
        lengths[document], bounds[document + 1] = n_kept - begin, n_words
    return kept[:n_kept], lengths, hashes[:n_words], bounds


@njit(cache=True, nogil=True)
def hash_ngrams(words: Hashes, offsets: Offsets, factors: Hashes, offset: np.uint64) -> tuple[Hashes, Offsets]:
    """Hashes of all runs of `factors.size` words within a document, and their offsets by document (D + 1)."""
    hashes, bounds, n, width = np.empty(words.size, np.uint64), np.zeros(offsets.size, np.int64), 0, factors.size
    for document in range(offsets.size - 1):
        for first in range(offsets[document], offsets[document + 1] - width + 1):
            total = np.uint64(0)
            for place in range(width):
                total += words[first + place] * factors[place]
            hashes[n], n = mixed(total, offset), n + 1
        bounds[document + 1] = n
    return hashes[:n].copy(), bounds


@njit(cache=True, nogil=True)
def fill_sketch(ngrams: Hashes, slots: Hashes, rounds: Hashes, seeds: Hashes, last: np.uint64) -> None:
    """Sketch of one document's n-grams into `slots`. `rounds`: offsets of mixed() in each round; `seeds`: of a slot's own hash."""
    n_slots = np.uint64(slots.size)
    slots[:] = EMPTY
    for turn in range(rounds.size):
        high, empty = np.uint64(turn) << np.uint64(56), False
        for ngram in ngrams:
            value = mixed(ngram, rounds[turn]) if turn else ngram
            slot = ((value >> np.uint64(32)) * n_slots) >> np.uint64(32)
            value = (value & LOW) | high
            slots[slot] = min(slots[slot], value)
        for slot in range(slots.size):
            empty |= slots[slot] == EMPTY
        if not empty:
            return
    high = np.uint64(rounds.size) << np.uint64(56)
    for slot in range(slots.size):
        if slots[slot] == EMPTY:
            for ngram in ngrams:
                slots[slot] = min(slots[slot], (mixed(ngram ^ seeds[slot], last) & LOW) | high)


@njit(cache=True, nogil=True)
def fill_sketches(ngrams: Hashes, offsets: Offsets, table: Hashes, rounds: Hashes, seeds: Hashes, last: np.uint64) -> None:
    """fill_sketch() for each document with n-grams; `table` (D, slots)."""
    for document in range(offsets.size - 1):
        if offsets[document + 1] > offsets[document]:
            fill_sketch(ngrams[offsets[document] : offsets[document + 1]], table[document], rounds, seeds, last)


@njit(cache=True, nogil=True)
def chain_rows(table: Hashes, bands: int, offset: np.uint64) -> Hashes:
    """Hashes of the bands of sketches (D, slots): (D, bands)."""
    out, rows = np.empty((table.shape[0], bands), np.uint64), table.shape[1] // bands
    for document in range(table.shape[0]):
        for band in range(bands):
            value = np.uint64(band)
            for row in range(rows):
                value = mixed(value * CHAIN + table[document, band * rows + row], offset)
            out[document, band] = value
    return out


@njit(cache=True, nogil=True)
def locate_words(
    characters: np.ndarray, separator: np.uint32, flag: np.uint32, mask: np.uint32, base: np.uint64, offset: np.uint64
) -> tuple[Hashes, Offsets, Offsets]:
    """Hashes of the words of one text, and the places of the first character of each and after its last.

    A character with `flag` is a word by itself. The hash is mixed() of the sum over the characters, each without bits outside `mask`, of
    character * base^place: as split_words() has it.
    """
    hashes = np.empty(characters.size, np.uint64)
    starts, ends = np.empty(characters.size, np.int64), np.empty(characters.size, np.int64)
    n_words, power, value, inside = 0, np.uint64(1), np.uint64(0), False
    for i in range(characters.size + 1):
        character = np.uint32(characters[i]) if i < characters.size else separator
        single = character != separator and character >= flag
        if inside and (character == separator or single):
            hashes[n_words], ends[n_words], n_words, inside = mixed(value, offset), i, n_words + 1, False
        if character == separator:
            continue
        plain = np.uint64(character & mask)
        if single:
            hashes[n_words], starts[n_words], ends[n_words], n_words = mixed(plain, offset), i, i + 1, n_words + 1
        elif inside:
            value, power = value + plain * power, power * base
        else:
            starts[n_words], value, power, inside = i, plain, base, True
    return hashes[:n_words].copy(), starts[:n_words].copy(), ends[:n_words].copy()
