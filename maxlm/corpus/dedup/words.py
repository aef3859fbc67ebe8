"""Normalised words and their hashes, for many texts at once.

The rule (a change of it raises `engine.FORMAT`): NFC; simple case folding (one character to one character); each run of separators
(punctuation, spaces, controls, format characters) is one space, and none at the ends (a text of separators alone is compared as it
is); a word is what lies between spaces, and each symbol, emoji and character of a script without spaces (Han, kana, Thai ...) is a word by
itself. Character classes are Unicode 14.0's whatever the version of Python; NFC and case folding of assigned characters never change
(Unicode stability policy).
"""

import hashlib
import tomllib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from maxlm.corpus.dedup import compiled
from maxlm.corpus.dedup.compiled import BASE, SPACE, split_words

SINGLE = 1 << 24  # flag of a character that is a word by itself
SINGLE_ASCII = 1 << 7
BLOCK_CHARS = 1 << 18  # characters hashed at once: the arrays of a block stay within a core's cache
LONGEST = 1 << 22  # characters of a document that are split into words: near copies of a longer one are found by its beginning


@dataclass(frozen=True)
class Words:
    """Hashes of the words of D documents; document d has `hashes[offsets[d]:offsets[d + 1]]`."""

    hashes: np.ndarray  # uint64
    offsets: np.ndarray  # int64, D + 1
    exact: np.ndarray  # uint64, (D, 2): low and high half of BLAKE2b-128 of the normalised text as UTF-8


@dataclass(frozen=True)
class _Block:
    """Documents that are hashed together: all in ASCII, or none."""

    positions: list[int]
    texts: list[str]
    ascii: bool


def scalar_mix(value: int) -> int:
    """Return SplitMix64's output number `value`: 64 bits."""
    value = (value + 1) * int(BASE) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def hash_words(texts: Sequence[str]) -> Iterator[tuple[list[int], Words]]:
    """Yield positions in `texts` and their words, block by block; every position comes once, in no particular order."""
    for block in _blocks(texts):
        long = [index for index, text in enumerate(block.texts) if len(text) > LONGEST]
        digests = {index: _digest(block.texts[index]) for index in long}
        for index in long:
            block.texts[index] = block.texts[index][:LONGEST]
        characters, offsets = _fold(block)
        flag = np.uint32(SINGLE_ASCII if block.ascii else SINGLE)
        kept, lengths, hashes, bounds = split_words(characters, offsets, flag, np.uint64(scalar_mix(1)))
        ends = np.cumsum(lengths)
        pieces = (kept[end - length : max(end - 1, end - length)] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True))
        exact = [hashlib.blake2b(piece.data if block.ascii else _utf8(piece), digest_size=16).digest() for piece in pieces]
        words = Words(hashes, bounds, np.frombuffer(b"".join(exact), "<u8").astype(np.uint64).reshape(-1, 2))
        for index in np.flatnonzero(np.diff(words.offsets) == 0).tolist():
            if index not in digests:
                digests[index] = hashlib.blake2b(
                    texts[block.positions[index]].encode("utf-8", "surrogatepass"), digest_size=16, person=b"raw"
                ).digest()
        for index, digest in digests.items():
            words.exact[index] = np.frombuffer(digest, "<u8")
        yield block.positions, words


def locate_words(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of the words of a text that is in NFC, as documents are, and where in it each begins (int64, characters)."""
    pieces = [(np.zeros(0, np.uint64), np.zeros(0, np.int64)), *locate_by_pieces(text)]
    hashes, starts = zip(*pieces, strict=True)
    return np.concatenate(hashes), np.concatenate(starts)


def locate_by_pieces(text: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what locate_words() gives, of one piece of the text after the other, in a few MB of memory.

    A run of more than BLOCK_CHARS characters without white space is cut into words of that many.
    """
    done = 0
    while done < len(text):
        end = done + BLOCK_CHARS
        if end < len(text):
            end = max(text.rfind(" ", done, end), text.rfind("\n", done, end)) + 1 or end
        piece = text[done:end]
        plain = piece.isascii()
        characters, _ = _fold(_Block([0], [piece], plain))
        flag = SINGLE_ASCII if plain else SINGLE
        hashes, starts, _ = compiled.locate_words(
            characters, np.uint32(SPACE), np.uint32(flag), np.uint32(flag - 1), BASE, np.uint64(scalar_mix(1))
        )
        yield hashes, starts + done
        done = end


def normalise(text: str) -> str:
    """Return the normalised text. Slow: for tests, and for a person to read."""
    kept, *_ = split_words(*_fold(_Block([0], [unicodedata.normalize("NFC", text)], False)), np.uint32(SINGLE), np.uint64(0))
    return _utf8(kept).decode("utf-8", "surrogatepass").strip(" ")


def _blocks(texts: Sequence[str]) -> Iterator[_Block]:
    pending: dict[bool, list[int]] = {True: [], False: []}
    sizes = {True: 0, False: 0}
    normal: dict[int, str] = {}
    for position, raw in enumerate(texts):
        plain = raw.isascii()
        text = raw if plain else unicodedata.normalize("NFC", raw)
        plain = plain or text.isascii()
        normal[position] = text
        pending[plain].append(position)
        sizes[plain] += len(text) + 1
        if sizes[plain] >= BLOCK_CHARS:
            yield _Block(pending[plain], [normal.pop(index) for index in pending[plain]], plain)
            pending[plain], sizes[plain] = [], 0
    for plain, positions in pending.items():
        if positions:
            yield _Block(positions, [normal.pop(index) for index in positions], plain)


def _fold(block: _Block) -> tuple[np.ndarray, np.ndarray]:
    """Folded characters, each document followed by a space, and where each document begins."""
    lengths = np.fromiter((len(text) + 1 for text in block.texts), np.int64, len(block.texts))
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    joined = "".join(text + " " for text in block.texts)
    if block.ascii:
        return np.frombuffer(joined.encode("ascii").translate(_ascii_table()), np.uint8), offsets
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    return _table()[points], offsets


def _digest(text: str) -> bytes:
    """BLAKE2b-128 of the normalised text, a piece at a time."""
    digest, word_before, space_waits = hashlib.blake2b(digest_size=16), False, False
    for start in range(0, len(text), BLOCK_CHARS):
        characters, _ = _fold(_Block([0], [text[start : start + BLOCK_CHARS]], False))
        characters = characters[:-1]
        is_word = characters != SPACE
        keep = is_word.copy()
        keep[1:] |= is_word[:-1]
        keep[0] |= word_before
        word_before = bool(is_word[-1])
        piece = _utf8(characters[keep] & np.uint32(SINGLE - 1))
        if piece:
            digest.update(b" " if space_waits else b"")
            space_waits = piece.endswith(b" ")
            digest.update(piece.removesuffix(b" "))
    return digest.digest()


def _utf8(points: np.ndarray) -> bytes:
    return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")


@cache
def _table() -> np.ndarray:
    """Folded character and flag for each code point, uint32."""
    table = np.arange(0x110000, dtype=np.uint32)
    for point in range(0x1F000):  # no letter with two cases lies above
        folded = chr(point).casefold()
        table[point] = ord(folded) if len(folded) == 1 else point
    lists = tomllib.loads(files(__package__).joinpath("unicode_ranges.toml").read_text("utf-8"))
    ranges = {
        name: [(int(part.partition("-")[0], 16), int(part.rpartition("-")[2], 16) + 1) for part in text.split()]
        for name, text in lists.items()
    }
    for start, end in ranges["symbols"] + ranges["unspaced"]:
        table[start:end] |= np.uint32(SINGLE)
    for start, end in ranges["separators"]:
        table[start:end] = SPACE
    return table


@cache
def _ascii_table() -> bytes:
    table = _table()[:128]
    low = (table & np.uint32(SINGLE_ASCII - 1)) | np.where(table >= SINGLE, np.uint32(SINGLE_ASCII), np.uint32(0))
    return low.astype(np.uint8).tobytes() + bytes(128)
