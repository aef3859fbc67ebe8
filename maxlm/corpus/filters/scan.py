"""Compiled passes over a text's code points: words, lines, repetition. Numba compiles them once a machine and keeps the result on disk.

W words, L lines, T tokens. Hashes are 64 bits, the same on every machine; two strings are taken for equal when their hashes are.
"""

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any
from unicodedata import category

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Marks that end a sentence, in scripts that the papers above do not treat as well (Unicode 15, property Sentence_Terminal); closing quotes.
SENTENCE_ENDS = ".!?…。！？．｡؟۔।॥։።፧។៕‼⁇⁈⁉"
CLOSING_QUOTES = "\"'”’»›」』"
BULLETS = "•●◦‣▪■□▫–-*∙·○◆◇►▶"
RELEASED: dict[str, Any] = tomllib.loads(files(__package__).joinpath("fineweb.toml").read_text("utf-8"))
# Classes of a code point.
SPACE, LETTER, WORD, BULLET, SENTENCE_END, CLOSING_QUOTE, UNSPACED, UPPER = 1, 2, 4, 8, 16, 32, 64, 128
TABLE = 0x20000  # code points below are looked up; of those above only the ideographs count, as letters
# Columns of a line.
START, END, WORDS, LONGEST, SENTENCES, LETTERS, UPPERCASE, FLAGS = range(8)
# Flags of a line.
BEGINS_WITH_BULLET, ENDS_WITH_ELLIPSIS, ENDS_WITH_MARK = 1, 2, 4
# Counts of a text.
N_WORDS, SPACED_CHARACTERS, WORDS_WITH_LETTER, HASH_SIGNS, ELLIPSES, SPACED_WORDS = range(6)
# Duplicates of a text.
N_LINES, LINE_CHARACTERS, REPEATED_LINES, REPEATED_LINE_CHARACTERS, N_PARAGRAPHS, REPEATED_PARAGRAPHS, REPEATED_PARAGRAPH_CHARACTERS = (
    range(7)
)

# Hints of a text: what a search for personal data has to look for.
HINT_IPV4, HINT_IPV6, HINT_PHONE, HINT_DIGITS, HINT_TOKEN = 1, 2, 4, 8, 16
ALL_HINTS = 31

NEWLINE, SPACE_SIGN, FULL_STOP, ELLIPSIS, HASH_SIGN = 0x0A, 0x20, 0x2E, 0x2026, 0x23
UNDERSCORE = 0x5F
MAYBE, SURE = 1, 2  # of a line that is boilerplate
DOTTED_I = 0x130  # the only character with a lower case of two characters
SEED = np.uint64(0xCBF29CE484222325)  # FNV-1a's, over code points instead of bytes
PRIME = np.uint64(0x100000001B3)
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads a hash over a table's slots
STEP = np.uint64(0xD6E8FEB86659FD93)  # odd: hash of n words -> hash of n + 1
UNSPACED_BLOCKS = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
)

Hashes = NDArray[np.uint64]
Counts = NDArray[np.int64]
Lines = NDArray[np.int32]
CodePoints = NDArray[np.uint32]


@lru_cache(1)
def tables() -> tuple[NDArray[np.uint8], CodePoints]:
    """Classes and lower-case form of each code point below TABLE, by this Python's Unicode data."""
    classes = np.zeros(TABLE, np.uint8)
    lower = np.arange(TABLE, dtype=np.uint32)
    for code, char in enumerate(map(chr, range(TABLE))):
        if char.isspace():
            classes[code] = SPACE
        elif char.isalpha():
            classes[code] = LETTER | WORD | (UPPER if char.isupper() else 0)
            small = char.lower()
            lower[code] = ord(small) if len(small) == 1 else code
        elif char.isalnum() or char == "_" or (code > 0x2FF and category(char)[0] == "M"):
            classes[code] = WORD
    for chars, kind in ((BULLETS, BULLET), (SENTENCE_ENDS, SENTENCE_END), (CLOSING_QUOTES, CLOSING_QUOTE)):
        for char in chars:
            classes[ord(char)] |= kind
    for first, last in UNSPACED_BLOCKS:
        block = classes[first : last + 1]
        block[block & WORD > 0] |= UNSPACED
    return classes, lower


@lru_cache(1)
def released_terminals() -> frozenset[str]:
    """Marks that end a line for FineWeb as released."""
    ranges = [[int(part, 16) for part in entry.split("-")] for entry in RELEASED["terminals"].split()]
    return frozenset(chr(code) for ends in ranges for code in range(ends[0], ends[-1] + 1))


@lru_cache(1)
def released_signs() -> NDArray[np.bool_]:
    """Code points below TABLE that make no word for FineWeb as released."""
    signs = np.zeros(TABLE, np.bool_)
    signs[[*range(9), 11, 12, *range(13, 32), *range(127, 160), *map(ord, RELEASED["signs"]), *map(ord, released_terminals())]] = True
    return signs


@njit(cache=True, nogil=True)
def class_of(code: np.uint32, classes: NDArray[np.uint8]) -> int:
    """Classes of a code point."""
    if code < TABLE:
        return classes[code]
    return LETTER | WORD | UNSPACED if code < 0x40000 else 0


@njit(cache=True, nogil=True)
def flags_of(codes: CodePoints, classes: NDArray[np.uint8], start: np.int64, end: np.int64) -> int:
    """Flags of the line codes[start:end], which has no white space at its ends."""
    final, flags = codes[end - 1], 0
    if class_of(codes[start], classes) & BULLET:
        flags |= BEGINS_WITH_BULLET
    if final == ELLIPSIS or (end - start > 2 and final == codes[end - 2] == codes[end - 3] == FULL_STOP):
        flags |= ENDS_WITH_ELLIPSIS
    if class_of(final, classes) & (SENTENCE_END | CLOSING_QUOTE):
        flags |= ENDS_WITH_MARK
    return flags


@njit(cache=True, nogil=True)
def scan_text(codes: CodePoints, classes: NDArray[np.uint8], lower: CodePoints) -> tuple[Hashes, Lines, Lines, Hashes, Counts]:
    """Words and lines of a text: hashes_W, lengths_W, columns of lines, hashes_L, counts.

    A word stands between white space; its hash and length leave out what is no letter or digit at its ends, and case, unless nothing
    would be left. One with characters of scripts without spaces (Chinese, Japanese, Thai) is counted as so many words, and its length in
    characters is no word's. A line stands between newlines; white space at its ends does not count.
    """
    n_lines, size, one = 1, np.uint64(codes.size), np.uint64(1)
    for code in codes:
        n_lines += code == NEWLINE
    hashes_W, lengths_W = np.empty(codes.size // 2 + 1, np.uint64), np.empty(codes.size // 2 + 1, np.int32)
    lines, hashes_L = np.zeros((n_lines, 8), np.int32), np.zeros(n_lines, np.uint64)
    n, n_words, n_characters, n_with_letter, n_hash_signs, n_ellipses, n_spaced = np.uint64(0), 0, np.int64(0), 0, 0, 0, 0
    i = np.uint64(0)  # places are unsigned: a sign costs a test at each use, since Python counts negative ones from the end
    for line in range(n_lines):
        line_start, line_end, line_words, longest, sentences, letters, uppercase = size, size, 0, np.uint64(0), 0, 0, 0
        line_hash, line_end_hash = SEED, SEED
        while i < size and codes[i] != NEWLINE:
            code = codes[i]
            kind = class_of(code, classes)
            if kind & SPACE:
                line_hash, i = (line_hash ^ np.uint64(code)) * PRIME, i + one
                continue
            if line_start == size:
                line_start, line_hash = i, SEED
            word_start, first, last, word_hash, end_hash, pending, dots = i, size, size, SEED, SEED, 0, 0
            has_letter, unspaced = False, 0
            while i < size and not kind & SPACE:  # signs, then letters and digits, in turn
                while i < size and not kind & (WORD | SPACE):
                    line_hash = (line_hash ^ np.uint64(code)) * PRIME
                    word_hash = (word_hash ^ np.uint64(lower[code] if code < TABLE else code)) * PRIME
                    if kind & SENTENCE_END:
                        pending = max(pending, 2 if code > 0x7F and code != ELLIPSIS else 1)
                        dots = dots + 1 if code == FULL_STOP else 0
                        if code == ELLIPSIS or dots == 3:
                            n_ellipses, dots = n_ellipses + 1, 0
                    else:
                        n_hash_signs, dots = n_hash_signs + (code == HASH_SIGN), 0
                    i += one
                    code = codes[i] if i < size else np.uint32(NEWLINE)
                    kind = class_of(code, classes)
                if i == size or kind & SPACE:
                    break
                if first == size:
                    first, word_hash = i, SEED
                sentences, pending, dots = sentences + (pending == 2), 0, 0  # "3.14" ends no sentence, "。" ends one wherever it stands
                while i < size and kind & WORD:
                    line_hash = (line_hash ^ np.uint64(code)) * PRIME
                    word_hash = (word_hash ^ np.uint64(lower[code] if code < TABLE else code)) * PRIME
                    is_letter = (kind & LETTER) != 0
                    has_letter, letters, uppercase = has_letter | is_letter, letters + is_letter, uppercase + ((kind & UPPER) != 0)
                    unspaced += (kind & UNSPACED) != 0
                    i += one
                    code = codes[i] if i < size else np.uint32(NEWLINE)
                    kind = class_of(code, classes)
                last, end_hash = i, word_hash
            length = last - first if first != size else i - word_start
            hashes_W[n], lengths_W[n], n = (end_hash if first != size else word_hash), length, n + one
            if unspaced:
                n_words, n_with_letter, line_words = n_words + unspaced, n_with_letter + unspaced, line_words + unspaced
            else:
                n_words, n_with_letter, line_words = n_words + 1, n_with_letter + has_letter, line_words + 1
                n_spaced, n_characters, longest = n_spaced + 1, n_characters + np.int64(length), max(longest, i - word_start)
            sentences, line_end, line_end_hash = sentences + (pending > 0), i, line_hash
        if line_words:
            row, flags = lines[line], flags_of(codes, classes, np.int64(line_start), np.int64(line_end))
            row[START], row[END], row[WORDS], row[LONGEST] = line_start, line_end, line_words, longest
            row[SENTENCES], row[LETTERS], row[UPPERCASE], row[FLAGS] = sentences, letters, uppercase, flags
            hashes_L[line] = line_end_hash
        i += one
    counts = np.array([n_words, n_characters, n_with_letter, n_hash_signs, n_ellipses, n_spaced], np.int64)
    return hashes_W[:n], lengths_W[:n], lines, hashes_L, counts


@njit(cache=True, nogil=True)
def slot_of(table: Hashes, key: np.uint64) -> np.uint64:
    """Slot of `key` in a table of 2^k slots that is not full, or the empty one where it belongs. No key is zero."""
    mask = np.uint64(table.size - 1)
    slot = (key * MIX >> np.uint64(32)) & mask
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(cache=True, nogil=True)
def table_for(n: int) -> Hashes:
    """An empty table for n keys: at least half of it stays empty."""
    size = 8
    while size < 2 * n:
        size *= 2
    return np.zeros(size, np.uint64)


@njit(cache=True, nogil=True)
def table_of(keys: Hashes) -> Hashes:
    """A table that holds `keys`."""
    table = table_for(keys.size)
    for i in range(keys.size):
        key = max(keys[i], np.uint64(1))
        table[slot_of(table, key)] = key
    return table


@njit(cache=True, nogil=True)
def find_duplicates(lines: Lines, hashes_L: Hashes) -> Counts:
    """Lines with text, and paragraphs (lines with text between lines without), that repeat an earlier one: counts and characters."""
    out = np.zeros(7, np.int64)
    seen_lines, seen_paragraphs = table_for(hashes_L.size), table_for(hashes_L.size // 2 + 1)
    paragraph, characters = SEED, 0
    for i in range(hashes_L.size + 1):
        length = lines[i, END] - lines[i, START] if i < hashes_L.size else 0
        if length > 0:
            key = max(hashes_L[i], np.uint64(1))
            paragraph, characters = paragraph * STEP + key, characters + length
            out[N_LINES] += 1
            out[LINE_CHARACTERS] += length
            slot = slot_of(seen_lines, key)
            if seen_lines[slot] != 0:
                out[REPEATED_LINES] += 1
                out[REPEATED_LINE_CHARACTERS] += length
            seen_lines[slot] = key
        elif characters > 0:
            key = max(paragraph, np.uint64(1))
            out[N_PARAGRAPHS] += 1
            slot = slot_of(seen_paragraphs, key)
            if seen_paragraphs[slot] != 0:
                out[REPEATED_PARAGRAPHS] += 1
                out[REPEATED_PARAGRAPH_CHARACTERS] += characters
            seen_paragraphs[slot] = key
            paragraph, characters = SEED, 0
    return out


@njit(cache=True, nogil=True)
def find_repetition(hashes_W: Hashes, lengths_W: Lines, characters: int) -> NDArray[np.float64]:
    """Fraction of the words' characters, by n-gram length: for 2 to 4 in the most frequent n-gram, the longest of equals, if it
    comes twice; for 5 to 10 in n-grams that repeat an earlier one, from left to right and without overlap.

    `characters` above 0 are those that FineWeb as released divides by: the text's. Then the most frequent n-gram is the first of equals,
    even if none comes twice, and has spaces between its words.
    """
    total, shares, released = characters, np.zeros(11), characters > 0
    if released:
        for n in range(2, min(5, lengths_W.size + 1)):
            shares[n] = (lengths_W[:n].sum() + n - 1) / total
    else:
        for i in range(lengths_W.size):
            total += lengths_W[i]
    grams_W, characters_W = hashes_W.copy(), lengths_W.astype(np.int64)
    places = np.arange(hashes_W.size + 1)  # of the n-grams that may come twice, and an end
    slots = np.empty(hashes_W.size, np.uint64)
    n_places = hashes_W.size
    for n in range(2, 11):
        n_before, n_places = n_places, 0
        places[n_before] = -1
        for k in range(n_before):  # both (n - 1)-grams of an n-gram that comes twice do
            if places[k + 1] == places[k] + 1:
                places[n_places], n_places = places[k], n_places + 1
        table = table_for(n_places)
        counts, firsts = np.zeros(table.size if n < 5 else 0, np.int64), np.zeros(table.size if n < 5 else 0, np.int64)
        best, best_characters, best_first, repeated, free = 1, 0, 0, 0, 0
        for k in range(n_places):
            i = places[k]
            grams_W[i] = max(grams_W[i] * STEP + hashes_W[i + n - 1], np.uint64(1))
            characters_W[i] += lengths_W[i + n - 1]
            if n >= 5 and i < free:
                continue
            slot = slots[k] = slot_of(table, grams_W[i])
            if n >= 5:
                if table[slot] != 0:
                    repeated, free = repeated + characters_W[i], i + n
            else:
                counts[slot] += 1
                if counts[slot] == 1:
                    firsts[slot] = i
                better = firsts[slot] < best_first if released else characters_W[i] > best_characters
                if counts[slot] > best or (counts[slot] == best and best > 1 and better):
                    best, best_characters, best_first = counts[slot], characters_W[i], firsts[slot]
            table[slot] = grams_W[i]
        if n >= 5:
            shares[n] = repeated / max(total, 1)
        elif best > 1:
            shares[n] = min(1.0, best * (best_characters + (n - 1) * released) / total)
        if (n < 5 and best == 1) or (n >= 5 and repeated == 0):
            break  # no n-gram comes twice: no longer one does
        if n < 5:
            n_before, n_places = n_places, 0
            for k in range(n_before):
                if counts[slots[k]] > 1:
                    places[n_places], n_places = places[k], n_places + 1
    return shares


@njit(cache=True, nogil=True)
def count_present(hashes_W: Hashes, wanted: Hashes, enough: int) -> int:
    """Number of different ones of `wanted` among the words; stops at `enough`."""
    found, present = 0, np.zeros(wanted.size, np.bool_)
    for i in range(hashes_W.size):
        for j in range(wanted.size):
            if hashes_W[i] == wanted[j] and not present[j]:
                present[j], found = True, found + 1
                if found >= enough:
                    return found
    return found


@njit(cache=True, nogil=True)
def scan_tokens(codes: CodePoints, classes: NDArray[np.uint8], lower: CodePoints) -> Hashes:
    """Hashes of the tokens, without case: runs of letters and digits; in scripts without spaces, single characters."""
    hashes_T, n, inside, value = np.empty(codes.size + 1, np.uint64), 0, False, SEED
    for i in range(codes.size + 1):
        kind = class_of(codes[i], classes) if i < codes.size else 0
        if inside and (not kind & WORD or kind & UNSPACED):
            hashes_T[n], n, inside = value, n + 1, False
        if kind & WORD:
            if not inside:
                inside, value = True, SEED
            value = (value ^ np.uint64(lower[codes[i]] if codes[i] < TABLE else codes[i])) * PRIME
            if kind & UNSPACED:
                hashes_T[n], n, inside = value, n + 1, False
    return hashes_T[:n]


@njit(cache=True, nogil=True)
def scan_pieces(codes: CodePoints, classes: NDArray[np.uint8], signs: NDArray[np.bool_]) -> tuple[Hashes, Lines, Lines, Counts]:
    """Words and signs of a text, for the rules of FineWeb as released: hashes_W with case, starts_W, lengths_W, counts.

    A word is a run of letters and digits, or one other character that is no white space; in scripts without spaces, one character.
    Counts: words that are not of `signs` alone, their characters, words with a letter.
    """
    hashes_W, starts_W, lengths_W = np.empty(codes.size, np.uint64), np.empty(codes.size, np.int32), np.empty(codes.size, np.int32)
    n, counts, i = 0, np.zeros(3, np.int64), 0
    while i < codes.size:
        kind = class_of(codes[i], classes)
        if kind & SPACE:
            i += 1
            continue
        start, value, letter, only_signs, joined = i, SEED, False, True, kind & (WORD | UNSPACED) == WORD
        while i == start or (joined and i < codes.size):
            kind = class_of(codes[i], classes)
            if i > start and kind & (WORD | UNSPACED) != WORD:
                break
            value, letter = (value ^ np.uint64(codes[i])) * PRIME, letter or (kind & LETTER) != 0
            only_signs = only_signs and codes[i] < TABLE and signs[codes[i]]
            i += 1
        hashes_W[n], starts_W[n], lengths_W[n], n = value, start, i - start, n + 1
        counts[0], counts[1], counts[2] = counts[0] + (not only_signs), counts[1] + (i - start) * (not only_signs), counts[2] + letter
    return hashes_W[:n], starts_W[:n], lengths_W[:n], counts


@njit(cache=True, nogil=True)
def find_members(hashes_T: Hashes, table: Hashes) -> Counts:
    """Positions of the tokens that are in `table`."""
    positions, n = np.empty(hashes_T.size, np.int64), 0
    for i in range(hashes_T.size):
        key = max(hashes_T[i], np.uint64(1))
        if table[slot_of(table, key)] == key:
            positions[n], n = i, n + 1
    return positions[:n]


@njit(cache=True, nogil=True)
def is_digit(code: np.uint32, classes: NDArray[np.uint8]) -> bool:
    """True for characters of class WORD that are no letter and no underscore: every decimal digit, and a few more."""
    kind = class_of(code, classes)
    return kind & WORD != 0 and kind & LETTER == 0 and code != UNDERSCORE


@njit(cache=True, nogil=True)
def find_hints(codes: CodePoints, classes: NDArray[np.uint8]) -> int:
    """Kinds of data that the text may contain, so that slow expressions are tried on few texts. Necessary conditions, not sufficient ones:

    IPv4: three full stops between digits in one word. IPv6: 2000 to 3fff before a colon. Phone: "+" before a digit, or three digits, one
    character that is no digit, four digits. Digits: six digits with at most five other characters between each two. Token: 12 or
    more of the characters that tokens have, with a digit among them or 20 long.
    """
    hints, stops, digits, gap, run, run_has_digit, length = 0, 0, 0, 0, 0, False, 0
    for i in range(codes.size + 1):
        code = codes[i] if i < codes.size else np.uint32(NEWLINE)
        kind = class_of(code, classes)
        digit = kind & WORD != 0 and kind & LETTER == 0 and code != UNDERSCORE
        if digit:
            digits, gap, length = (digits + 1 if gap <= 5 else 1), 0, length + 1
            if digits >= 6:
                hints |= HINT_DIGITS
            four = length == 4 and i >= 7 and is_digit(codes[i - 5], classes) and is_digit(codes[i - 6], classes)
            if four or (i > 0 and codes[i - 1] == 0x2B):
                hints |= HINT_PHONE
        else:
            gap, length = gap + 1, 0
        if code == FULL_STOP and 0 < i < codes.size - 1 and is_digit(codes[i - 1], classes) and is_digit(codes[i + 1], classes):
            stops += 1
            if stops >= 3:
                hints |= HINT_IPV4
        elif kind & SPACE:
            stops = 0
        elif code == 0x3A and i >= 4 and (codes[i - 4] == 0x32 or codes[i - 4] == 0x33):
            hints |= HINT_IPV6
        if kind & WORD or code == 0x2B or code == 0x2D or code == 0x2F or code == 0x3D:
            run, run_has_digit = run + 1, run_has_digit or digit
            if run >= 20 or (run >= 12 and run_has_digit):
                hints |= HINT_TOKEN
        else:
            run, run_has_digit = 0, False
    return hints


@njit(cache=True, nogil=True)
def _lower_case(code: np.uint32, lower: CodePoints) -> np.uint32:
    """Lower case; of the three sigmas, one: which of them is lower case depends on the place in the word."""
    code = lower[code] if code < TABLE else code
    return np.uint32(0x3C3) if code == 0x3C2 else code


@njit(cache=True, nogil=True)
def hash_without_space(codes: CodePoints, start: int, end: int, classes: NDArray[np.uint8], lower: CodePoints) -> np.uint64:
    """Hash of codes[start:end] without case and without white space; never zero."""
    value = SEED
    for i in range(start, end):
        if not class_of(codes[i], classes) & SPACE:
            value = (value ^ np.uint64(_lower_case(codes[i], lower))) * PRIME
    return max(value, np.uint64(1))


@njit(cache=True, nogil=True)
def _has_phrase(codes: CodePoints, start: int, end: int, classes: NDArray[np.uint8], lower: CodePoints, phrases: CodePoints) -> bool:
    """True if one of `phrases` may be in codes[start:end]: rows of lower-case letters and zeros, a space for any white space.

    True also where a character's lower case is two (U+0130).
    """
    begins = np.zeros(128, np.uint32)  # of a first letter: bits for the second letters that follow it
    for k in range(phrases.shape[0]):
        begins[phrases[k, 0]] |= np.uint32(1) << (phrases[k, 1] & np.uint32(31))
    following = _lower_case(codes[start], lower)
    if following == DOTTED_I:
        return True
    for i in range(start, end - 1):
        code, following = following, _lower_case(codes[i + 1], lower)
        if following == DOTTED_I:
            return True
        if code >= 128 or not (begins[code] >> (following & np.uint32(31))) & np.uint32(1):
            continue
        for k in range(phrases.shape[0]):
            at, j = i, 0
            while at < end and phrases[k, j] != 0:
                if phrases[k, j] == SPACE_SIGN and class_of(codes[at], classes) & SPACE:
                    while at < end and class_of(codes[at], classes) & SPACE:
                        at += 1
                elif _lower_case(codes[at], lower) == phrases[k, j]:
                    at += 1
                else:
                    break
                j += 1
            if phrases[k, j] == 0:
                return True
    return False


@njit(cache=True, nogil=True)
def _is_numerical(code: np.uint32, classes: NDArray[np.uint8], signs: CodePoints) -> bool:
    """True for digits, white space and `signs`."""
    kind = class_of(code, classes)
    if kind & LETTER:
        return False
    if kind & (SPACE | WORD):
        return True
    for sign in signs:  # noqa: SIM110 - no generators in compiled code
        if code == sign:
            return True
    return False


@njit(cache=True, nogil=True)
def _numerical_line(codes: CodePoints, start: int, end: int, classes: NDArray[np.uint8], signs: CodePoints) -> int:
    """SURE for a line of ASCII digits, white space and `signs`, MAYBE with other digits and marks, else 0."""
    result = SURE
    for i in range(start, end):
        if not _is_numerical(codes[i], classes, signs):
            return 0
        if codes[i] == UNDERSCORE or (codes[i] > 0x7F and class_of(codes[i], classes) & WORD):
            result = MAYBE
    return result


@njit(cache=True, nogil=True)
def find_candidates(
    codes: CodePoints,
    lines: Lines,
    classes: NDArray[np.uint8],
    lower: CodePoints,
    phrases: CodePoints,
    signs: CodePoints,
    short: int,
    listed: Hashes,
) -> NDArray[np.uint8]:
    """Lines that may be boilerplate (MAYBE: a necessary condition, not a sufficient one), or are (SURE).

    With `phrases` (see _has_phrase): lines of digits and `signs` (SURE in ASCII), lines of up to three words that begin with one of them
    and have a letter, and lines of up to `short` words with a phrase. With `listed`, a table of hash_without_space(): lines in it.
    """
    found_L = np.zeros(lines.shape[0], np.uint8)
    for line in range(lines.shape[0]):
        start, end, words = lines[line, START], lines[line, END], lines[line, WORDS]
        if end == 0:
            continue
        no_letters = lines[line, LETTERS] == 0
        if phrases.shape[0] and (no_letters or words <= 3) and _is_numerical(codes[start], classes, signs):
            found_L[line] = MAYBE
            if no_letters:
                found_L[line] = _numerical_line(codes, start, end, classes, signs)
        is_short = phrases.shape[0] > 0 and words <= short
        if listed.size and not found_L[line]:
            key, dotted = hash_without_space(codes, start, end, classes, lower), False
            for i in range(start, end):
                dotted |= codes[i] == DOTTED_I
            found_L[line] = MAYBE if dotted or listed[slot_of(listed, key)] == key else 0
        if is_short and not found_L[line] and _has_phrase(codes, start, end, classes, lower, phrases):
            found_L[line] = MAYBE
    return found_L


@njit(cache=True, nogil=True)
def has_any(data: NDArray[np.uint8], phrases: NDArray[np.uint8], lengths: Counts) -> bool:
    """True if one of `phrases` (rows, with their lengths of at least two) is in `data`."""
    begins = np.zeros(256, np.uint32)  # of a first byte: bits for the second bytes that follow it
    for k in range(phrases.shape[0]):
        begins[phrases[k, 0]] |= np.uint32(1) << np.uint32(phrases[k, 1] & 31)
    for i in range(data.size - 1):
        if not (begins[data[i]] >> np.uint32(data[i + 1] & 31)) & np.uint32(1):
            continue
        for k in range(phrases.shape[0]):
            if i + lengths[k] <= data.size:
                j = 0
                while j < lengths[k] and data[i + j] == phrases[k, j]:
                    j += 1
                if j == lengths[k]:
                    return True
    return False
