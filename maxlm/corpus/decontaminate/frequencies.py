"""Document frequencies of the words and n-grams of evaluation items, learned from the corpus itself."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from maxlm.base.atomic import replacing
from maxlm.base.errors import UserError, as_user_error, shorten
from maxlm.base.paths import open_regular
from maxlm.corpus.decontaminate.items import Item, read_items
from maxlm.corpus.decontaminate.settings import DecontaminateSettings
from maxlm.corpus.decontaminate.tokens import I64, U64, HashTable, Words, clean, words
from maxlm.corpus.document import Document, groups

CHUNK = 1 << 18  # characters that are hashed at once: arrays of them stay in the cache
PIECE = 1 << 20  # characters of a document that are hashed at once


@dataclass(frozen=True)
class Frequencies:
    """In how many of `documents` documents each key occurs. Keys are the hashes of words and n-grams of the items, and no others, so that
    counts are exact and memory is bounded by the items. `items_digest`: of the items and the n-grams' length.
    """

    items_digest: str
    documents: int
    keys: U64
    counts: I64

    @classmethod
    def none(cls, settings: DecontaminateSettings) -> Self:
        """Counts of no documents: every n-gram is rare. Raises UserError for a set that cannot be read."""
        items, digest = read_items(settings)
        found = item_words(items)
        keys = np.unique(np.concatenate([found.hash_T, found.grams(settings.ngram)[0]]))
        return cls(f"{settings.ngram}-{digest}", 0, keys, np.zeros(len(keys), np.int64))

    @classmethod
    def learn(cls, settings: DecontaminateSettings, documents: Iterable[Document]) -> Self:
        """Count in a sample: `settings.sample_share` of `documents`. 100,000 documents or more tell quotations and templates from text
        that was copied a few times. Counts of parts of a corpus are added by `merge`. Raises UserError for a set that cannot be read.
        """
        empty = cls.none(settings)
        table, counts, number = HashTable(empty.keys), empty.counts.copy(), 0
        limit = round(settings.sample_share * 2**64)
        hashed = ((document, hashlib.blake2b(document.id.encode("utf-8", "surrogatepass"), digest_size=8)) for document in documents)
        sample = (document for document, state in hashed if int.from_bytes(state.digest(), "little") < limit)
        for texts in ([document.text for document in group] for group in groups(sample, CHUNK - 1, each=1)):
            number += len(texts)
            seen = []
            for numbers, pieces in chunks(texts, PIECE, 64):
                found, owners = words(pieces), np.array(numbers)
                grams, first = found.grams(settings.ngram)
                for hashes, first_T in ((found.hash_T, found.owner_T), (grams, found.owner_T[first])):
                    position, key = table.find(hashes)
                    seen.append(np.unique(owners[first_T[position]] * len(empty.keys) + key))
            if seen and len(empty.keys):
                counts += np.bincount(np.unique(np.concatenate(seen)) % len(empty.keys), minlength=len(empty.keys))
        return cls(empty.items_digest, number, empty.keys, counts)

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """Add counts of separate parts of a corpus, one at least, in any order. Raises UserError if they are of different items."""
        first, *others = parts
        if any(other.items_digest != first.items_digest for other in others):
            raise UserError("frequencies: parts were learned for different evaluation sets; learn them again.")
        documents = first.documents + sum(other.documents for other in others)
        return cls(first.items_digest, documents, first.keys, sum((other.counts for other in others), first.counts))

    def lookup(self, hashes: U64) -> I64:
        """Counts of `hashes`; 0 for one that is not a key."""
        counts = np.zeros(len(hashes), np.int64)
        if len(self.keys):
            found = np.minimum(np.searchsorted(self.keys, hashes), len(self.keys) - 1)
            counts = np.where(self.keys[found] == hashes, self.counts[found], 0)
        return counts

    def save(self, path: Path) -> None:
        """Write atomically; the same counts give the same bytes. Raises OSError."""
        save_arrays(path, {"items_digest": self.items_digest, "documents": self.documents}, {"keys": self.keys, "counts": self.counts})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises UserError if `path` cannot be read."""
        about, arrays = load_arrays(path, ("keys", "counts"))
        return cls(about["items_digest"], about["documents"], arrays["keys"], arrays["counts"])


def item_words(items: list[Item]) -> Words:
    """Words of all texts of all items: first the questions' texts in order, then the options'."""
    return words([text for item in items for text in item.question] + [text for item in items for text in item.options])


def chunks(texts: Iterable[str], size: int, overlap: int) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of `texts` to hash at once, with the number of each one's text: of at most `size` characters, each of which repeats the last
    `overlap` of the one before. ASCII is hashed faster, and apart from other text.
    """
    groups: dict[bool, tuple[list[int], list[str]]] = {True: ([], []), False: ([], [])}
    sizes = {True: 0, False: 0}
    for number, text in enumerate(texts):
        kind, plain = text.isascii(), clean(text)
        for start in range(0, len(plain) - overlap, size - overlap) if len(plain) > size else (0,):
            piece = plain[start : start + size]
            groups[kind][0].append(number)
            groups[kind][1].append(piece)
            sizes[kind] += len(piece)
            if sizes[kind] >= CHUNK:
                yield groups[kind]
                groups[kind], sizes[kind] = ([], []), 0
    yield from (group for group in groups.values() if group[0])


def save_arrays(path: Path, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write `about` and `arrays` as one file of numpy's format npz, atomically. Raises OSError."""
    text = np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, about=text, **arrays)
    with replacing(path) as file:
        file.write(buffer.getbuffer())


def load_arrays(path: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays that `save_arrays` wrote. Raises UserError."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            return json.loads(arrays["about"].tobytes()), {name: arrays[name] for name in names}
    except OSError as error:
        raise as_user_error(error) from None
    except (ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile):
        raise UserError(f"{shorten(str(path))}: damaged, or not a file of this stage; build it again.") from None
