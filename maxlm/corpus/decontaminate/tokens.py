"""Words of texts and stable 64-bit hashes of them and of their n-grams.

A word is a run of letters, digits and marks, without case and accents; a character of a script that writes no spaces between words is a
word by itself. T words, U a run of characters.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from maxlm.corpus.dedup.compiled import hash_ngrams, locate_words

VERSION = f"2/{unicodedata.unidata_version}"  # of the hashes and kinds: part of every digest
BASE = 0x9E6D62D06F6A9A9B  # odd
GRAM_BASE = 0xD1342543DE82EF95
SEPARATOR = "\n"
SINGLE = 1 << 31  # flag of a character that is a word by itself
UNKNOWN = 0xFFFFFFFF
SPACELESS: tuple[tuple[int, int], ...] = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)  # Thai, Lao, Burmese, Khmer, Japanese and Chinese
NUMBER, NAME = 1, 2  # kinds of words
NUMBER_WORDS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty "
    "thirty forty fifty sixty seventy eighty ninety hundred thousand million dozen half twice thrice quarter third"
)
INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"  # may stand inside words

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Words:
    """Words of several texts in order: hashes, first character and end in `text`, number of the text that each is from."""

    text: str
    hash_T: U64
    start_T: I64
    end_T: I64
    owner_T: I64

    def grams(self, n: int) -> tuple[U64, I64]:
        """Hashes of all runs of `n` words inside one text, and the number of each run's first word."""
        if len(self.hash_T) < n:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        inside = self.owner_T[: len(self.owner_T) - n + 1] == self.owner_T[n - 1 :]
        if inside.all():
            return gram_hashes(self.hash_T, n), np.arange(len(inside))
        first = np.flatnonzero(inside)
        return gram_hashes(self.hash_T, n)[first], first


def clean(text: str) -> str:
    """`text` in normal form NFKC, without invisible characters."""
    if text.isascii():
        return text
    text = text.replace("\u00a0", " ").replace("\u2026", " ")  # frequent, and slow to normalise
    for char in INVISIBLE:
        text = text.replace(char, "")
    return unicodedata.normalize("NFKC", text)


def words(texts: Sequence[str]) -> Words:
    """Words of `texts`, which `clean` has seen. Takes about 30 bytes of memory for a character."""
    text = SEPARATOR.join(texts)
    hash_T, start_T, end_T = locate_words(_values(text), np.uint32(0), np.uint32(SINGLE), np.uint32(UNKNOWN), np.uint64(BASE), np.uint64(0))
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    begins = np.cumsum(lengths + 1) - lengths - 1
    counts = np.diff(np.append(np.searchsorted(start_T, begins), len(start_T)))
    return Words(text, hash_T, start_T, end_T, np.repeat(np.arange(len(texts)), counts))


def kinds(found: Words, at: I64, lower: U64) -> I64:
    """Kind of each of the words `at`: NUMBER, NAME, or 0. A name begins with a capital and is not one of `lower`, the hashes of
    words that are written in lower case; the letter of an option is none.
    """
    start, hash_T = found.start_T[at], found.hash_T[at]
    first = [found.text[one] for one in start.tolist()]
    number = np.array([char.isnumeric() for char in first], bool) | np.isin(hash_T, _number_words())
    name = np.array([char.isupper() for char in first], bool) & (found.end_T[at] - start > 1) & ~np.isin(hash_T, lower)
    return np.where(number, NUMBER, np.where(name, NAME, 0))


def gram_hashes(hash_T: U64, n: int) -> U64:
    """Hashes of all runs of `n` words, one for each first word."""
    factors = np.array([pow(GRAM_BASE, n - 1 - place, 1 << 64) for place in range(n)], np.uint64)
    return hash_ngrams(hash_T, np.array([0, len(hash_T)]), factors, np.uint64(0))[0]


def _values(text: str) -> NDArray[np.uint32]:
    """A number for each character, the same for all cases of a letter; 0 between words."""
    if text.isascii():
        return np.take(_ascii_values(), np.frombuffer(text.encode(), np.uint8))
    code_U = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = _table()
    value_U = np.take(table, code_U)
    unknown_U = value_U == UNKNOWN
    if unknown_U.any():
        for code in np.unique(code_U[unknown_U]).tolist():
            table[code] = _value(code)
        value_U = np.take(table, code_U)
    return value_U


def _value(code: int) -> int:
    char = chr(code)
    if unicodedata.category(char)[0] not in "LNM":
        return 0
    folded = char.casefold()
    base = "".join(part for part in unicodedata.normalize("NFKD", folded) if not unicodedata.combining(part))
    value = ord(base if len(base) == 1 else folded if len(folded) == 1 else char)
    return value | (SINGLE if any(low <= code <= high for low, high in SPACELESS) else 0)


@cache
def _ascii_values() -> NDArray[np.uint32]:
    return np.array([_value(code) for code in range(128)], np.uint32)


@cache
def _number_words() -> U64:
    return words(NUMBER_WORDS.split()).hash_T


@cache
def _table() -> NDArray[np.uint32]:
    """Values of all code points; filled when a character is first seen."""
    table = np.full(0x110000, UNKNOWN, np.uint32)
    table[:128] = _ascii_values()
    return table


class HashTable:
    """Sorted distinct hashes, with a filter of bytes in front: a hash that is not in the table is ruled out by one look-up in seven of
    eight cases or more.
    """

    def __init__(self, keys: U64) -> None:
        self.keys = keys
        bits = max(10, (8 * len(keys)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, bool)
        self._filter[keys >> self._shift] = True

    def find(self, hashes: U64) -> tuple[I64, I64]:
        """Positions in `hashes` of those in the table, and their positions in `keys`."""
        maybe = np.flatnonzero(np.take(self._filter, hashes >> self._shift))
        if not len(maybe):
            return maybe, maybe
        wanted = hashes[maybe]
        found = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        same = self.keys[found] == wanted
        return maybe[same], found[same]
