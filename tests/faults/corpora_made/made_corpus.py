"""A corpus of which all is known: copies, near copies of measured similarity, planted test items; files of many formats and encodings."""

import random
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from corpora_made.made_files import Written, write_files
from corpora_made.made_text import CHARACTERS, LANGUAGES, WORDS, Text, made_text
from corpora_made.planted import NEGATIVES, PLANTS, Author, Item
from maxlm.corpus.dedup.settings import MinHashSettings
from maxlm.corpus.dedup.signatures import ngram_hashes
from maxlm.corpus.dedup.words import hash_words

TARGETS = tuple(round(0.5 + 0.025 * step, 3) for step in range(19))  # of Jaccard similarity: 0.5 to 0.95
EDITS = ("scattered", "block", "cut", "added", "moved")
KINDS = ("exam", "sums", "fact", "ending", "code")


@dataclass
class Made:
    """A document and what is known of it. `family`: documents of one origin; `plain`: how it is written in a file, so that it comes out as
    `text`; `item`: the test item planted in it, or -1.
    """

    text: str
    kind: str
    family: int = -1
    item: int = -1
    language: str = "en"


@dataclass
class Corpus:
    """`documents` by id; `items`: all test items; `similar`: Jaccard similarity of pairs of documents of one family."""

    documents: dict[str, Made]
    written: dict[str, Written]
    items: list[Item]
    similar: dict[tuple[str, str], float] = field(default_factory=dict)


def make(folder: Path, seed: int, count: int) -> Corpus:
    """Write a corpus of about `count` documents to `folder`."""
    draw = random.Random(seed)
    made: list[Made] = []
    made += _unique(draw, count * 35 // 100)
    made += _exact(draw, made, count // 10)
    made += _near(draw, count * 35 // 100)
    planted, items = _planted(seed, count // 5)
    made += planted
    draw.shuffle(made)
    written = write_files(folder, [(one.text, one.language, one.kind) for one in made], draw)
    documents = {one.id: made[one.number] for one in written}
    return Corpus(documents, {one.id: one for one in written}, items, _similarities(documents))


def jaccard(texts: list[str], settings: MinHashSettings) -> list[list[float]]:
    """Jaccard similarity of all pairs, of the very n-grams that the deduplication has."""
    sets: dict[int, set[int]] = {}
    for positions, words in hash_words(texts):
        grams, offsets = ngram_hashes(words.hashes, words.offsets, settings.ngram, settings.seed)
        for row, position in enumerate(positions):
            sets[position] = set(np.asarray(grams[offsets[row] : offsets[row + 1]]).tolist())
    return [[len(sets[a] & sets[b]) / max(1, len(sets[a] | sets[b])) for b in range(len(texts))] for a in range(len(texts))]


def _unique(draw: random.Random, count: int) -> list[Made]:
    """Texts of all languages, mostly short, a few long."""
    out = []
    for number in range(count):
        language = LANGUAGES[number % len(LANGUAGES)] if number % 2 else "en"
        length = draw.randint(30, 400) if number % 200 else 8000
        out.append(Made(made_text(draw, language, length).render(), "unique", language=language))
    return out


def _exact(draw: random.Random, made: list[Made], count: int) -> list[Made]:
    """Copies of half as many texts, equal once case, punctuation, spaces and the form of characters are as one."""
    out = []
    for family, one in enumerate(draw.sample(made, count // 2)):
        one.family = family
        one.kind = "copied"
        for _ in range(2):
            way = draw.choice(("same", "upper", "spaces", "marks", "decomposed"))
            text = one.text
            if way == "upper" and one.language in ("en", "ru", "uk", "pl", "cs"):  # elsewhere ß, ς and ı have no single partner
                text = text.upper()
            elif way == "spaces":
                text = text.replace("\n\n", "\n") if one.language in CHARACTERS else text.replace(" ", "  ").replace("\n\n", "\r\n\t")
            elif way == "marks":
                text = text.replace(".", " !").replace(",", ";")
            elif way == "decomposed":
                text = unicodedata.normalize("NFD", text)
            out.append(Made(text, "exact", family, language=one.language))
    return out


def _near(draw: random.Random, count: int) -> list[Made]:
    """Families of an original and two edited texts."""
    out = []
    languages = ("en", "en", "de", "ru", "ar", "pl", "zh", "ja", "ko", "el")
    for number in range(count // 3):
        language = languages[number % len(languages)]
        length = draw.randint(120, 900) if number % 40 else 7000  # above 4,096 n-grams the similarity is estimated
        original = made_text(draw, language, length)
        family = 10**6 + number
        out.append(Made(original.render(), "near", family, language=language))
        for _ in range(2):
            target = draw.choice(TARGETS)
            out.append(Made(edited(draw, original, target, draw.choice(EDITS)).render(), "near", family, language=language))
    return out


def edited(draw: random.Random, text: Text, target: float, edit: str) -> Text:
    """`text` changed so that the Jaccard similarity of n-grams of five words is about `target`."""
    words, size = list(text.words), len(text.words) - 4
    fresh = made_text(draw, text.language, len(words)).words
    changed = size * (1 - target) / (1 + target)  # n-grams of each side that the other does not have
    if edit == "scattered":
        step = 5 * size / changed
        for place in np.arange(draw.random() * step, len(words), step).astype(int).tolist():
            words[place] = fresh[place]
    elif edit == "block":
        length = max(1, round(changed) - 4)
        start = draw.randrange(max(1, len(words) - length))
        words[start : start + length] = fresh[:length]
    elif edit == "cut":
        length = round(size * (1 - target))
        words = words[length:] if draw.random() < 0.5 else words[: len(words) - length]
    elif edit == "added":
        length = round(size * (1 - target) / target)
        words = [*words, *fresh[:length]] if draw.random() < 0.5 else [*fresh[:length], *words]
    else:
        length = max(2, round(5 * size / changed))
        pieces = [words[start : start + length] for start in range(0, len(words), length)]
        draw.shuffle(pieces)
        words = [word for piece in pieces for word in piece]
    return Text(text.language, tuple(words))


def _planted(seed: int, count: int) -> tuple[list[Made], list[Item]]:
    """Documents with test items, twice as many as without."""
    author = Author(seed)
    items = [author.item(KINDS[number % len(KINDS)]) for number in range(max(20, count // 5))]
    out = []
    for number in range(count * 2 // 5):
        kind, item = PLANTS[number % len(PLANTS)], author.draw.randrange(len(items))
        out.append(Made(author.planted(kind, items[item]), kind, 2 * 10**6 + item, item))
    for number in range(count * 3 // 5):
        kind = NEGATIVES[number % len(NEGATIVES)]
        out.append(Made(author.negative(kind, author.draw.choice(items)), kind))
    return out, items


def _similarities(documents: dict[str, Made]) -> dict[tuple[str, str], float]:
    families: dict[int, list[str]] = {}
    for id, one in documents.items():
        if one.family >= 10**6:  # two templates around one item may be near copies, too
            families.setdefault(one.family, []).append(id)
    out = {}
    for ids in families.values():
        table = jaccard([documents[id].text for id in ids], MinHashSettings())
        for a, first in enumerate(ids):
            for b in range(a + 1, len(ids)):
                out[tuple(sorted((first, ids[b])))] = table[a][b]
    return out  # type: ignore[return-value]


assert set(WORDS) | set(CHARACTERS) == set(LANGUAGES)
