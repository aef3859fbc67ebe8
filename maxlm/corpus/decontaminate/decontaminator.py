"""Look for evaluation items in documents. T words of a chunk of documents."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maxlm.corpus.decontaminate.frequencies import CHUNK, PIECE, chunks
from maxlm.corpus.decontaminate.index import SAME_SHARE, EvalIndex
from maxlm.corpus.decontaminate.tokens import F64, I64, HashTable, Words, words
from maxlm.corpus.document import Document, Removed, Value, groups

STAGE = "decontaminate"
REASON = "contaminated"
SEED_SHARE = 0.2  # of the weight of an item's runs of words must be in the document before the two are compared in detail
WORD_SHARE = 0.7  # of the share of weight that is needed: share of words that is needed, so that a rare name alone is no match
CHARACTERS = 32  # of a word, at most, in the part that two pieces of a long document share
EXAMPLE = 300  # characters of an example


@dataclass(frozen=True, order=True)
class Match:
    """An item that a document holds. Sorted: the highest score first, then set and number."""

    negative_score: float
    set: str
    number: int
    item: int
    passage: str


class Decontaminator:
    """Tell documents that hold an item of `index` from others. The result for a document depends on it and the index alone."""

    def __init__(self, index: EvalIndex) -> None:
        self.index = index
        self._table = HashTable(index.grams)
        sizes = np.diff(index.bound_K)
        self._item_W = np.repeat(np.arange(len(sizes)), sizes)
        longest = int(sizes.max(initial=0))
        self._overlap = CHARACTERS * (2 * longest + 2 * int(index.slack_K.max(initial=0)))
        self._piece = max(PIECE, 4 * self._overlap)

    def __call__(self, document: Document) -> Document | Removed:
        """The document, or why it is removed."""
        return self.batch([document])[0]

    def run(self, documents: Iterable[Document]) -> Iterator[Document | Removed]:
        """One result for each document, in order. Hashes many at once: the fastest way for short ones."""
        for group in groups(documents, CHUNK - 1, each=1):
            yield from self.batch(group)

    def batch(self, documents: Sequence[Document]) -> list[Document | Removed]:
        """One result for each document, in order."""
        matches: dict[int, list[Match]] = {}
        if len(self.index.grams):
            for owners, texts in chunks((document.text for document in documents), self._piece, self._overlap):
                for text, match in self._search(words(texts)):
                    matches.setdefault(owners[text], []).append(match)
        results: list[Document | Removed] = list(documents)
        for number, found in matches.items():
            best, items = min(found), len({one.item for one in found})
            detail: dict[str, Value] = {"set": best.set, "item": best.number, "score": round(-best.negative_score, 4), "items": items}
            shown = example(self.index.texts[best.item], best.passage)
            results[number] = Removed(documents[number].id, STAGE, REASON, shown, detail)
        return results

    def _search(self, found: Words) -> Iterator[tuple[int, Match]]:
        """Items that texts hold, with the text's number."""
        index = self.index
        grams, first = found.grams(index.ngram)
        position, gram = self._table.find(grams)
        if not len(position):
            return
        counts = index.posting_bound[gram + 1] - index.posting_bound[gram]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        posting = np.repeat(index.posting_bound[gram], counts) + offsets
        place, word, value = np.repeat(first[position], counts), index.word_P[posting], index.value_P[posting]
        text, item = found.owner_T[place], self._item_W[word]
        _, once = np.unique(text * len(index.hash_W) + word, return_index=True)
        all_pairs = text * len(index.names_K) + item
        pairs, inverse = np.unique(all_pairs[once], return_inverse=True)
        share = np.bincount(inverse, value[once]) / index.seed_K[pairs % len(index.names_K)]
        chosen = pairs[share >= SEED_SHARE]
        if not len(chosen):
            return
        order = np.argsort(all_pairs, kind="stable")
        starts, stops = (np.searchsorted(all_pairs[order], chosen, side) for side in ("left", "right"))
        before, present = -1, frozenset[int]()
        for pair, start, stop in zip(chosen.tolist(), starts.tolist(), stops.tolist(), strict=True):
            number, one = divmod(pair, len(index.names_K))
            if number != before:
                begin, end = np.searchsorted(found.owner_T, [number, number + 1])
                before, present = number, frozenset(found.hash_T[begin:end].tolist())
            words = slice(int(index.bound_K[one]), int(index.bound_K[one + 1]))
            there = [word in present for word in index.hash_W[words].tolist()]  # wherever they stand: most of many items with one stem go
            if index.weight_W[words][there].sum() < (index.required_K[one] - 1e-5) * index.evidence_K[one]:
                continue
            mine = order[start:stop]
            match = self._compare(found, number, one, place[mine], value[mine])
            if match is not None:
                yield number, match

    def _compare(self, found: Words, text: int, item: int, place: I64, value: F64) -> Match | None:
        """The best match of an item in windows of a text that start at one of `place`, sorted, where runs of weight `value` are."""
        index = self.index
        begin, end = np.searchsorted(found.owner_T, [text, text + 1])
        length = int(index.bound_K[item + 1] - index.bound_K[item])
        slack = int(index.slack_K[item])
        reach, stride = length + length // 2 + slack, max(1, length // 8)
        total = np.concatenate([[0.0], np.cumsum(value)])
        stop = np.searchsorted(place, place + reach)
        enough = total[stop] - total[:-1] >= SEED_SHARE * index.seed_K[item] - 1e-9
        best: Match | None = None
        following = -1
        for start in place[enough].tolist():
            if start < following:
                continue
            following = start + stride
            low, high = max(int(begin), start - slack), min(int(end), start + reach)
            at = index.align(item, found, low, high)
            needed = index.required_K[item]
            if at.score < needed or at.words < needed * (1.0 if index.strict_K[item] else WORD_SHARE) or at.same < SAME_SHARE:
                continue
            name, number = index.names_K[item]
            passage = found.text[found.start_T[low + at.first] : found.end_T[low + at.last]]
            match = Match(-at.score, name, number, item, passage[: 4 * EXAMPLE])
            best = match if best is None or match.negative_score < best.negative_score else best
        return best


def example(item: str, passage: str) -> str:
    """Both texts in one line of at most EXAMPLE characters."""
    room = (EXAMPLE - len("item:  | document: ")) // 2
    item, passage = (" ".join(text[: 4 * EXAMPLE].split()) for text in (item, passage))
    shown = [text if len(text) <= room else text[: room - 3] + "..." for text in (item, passage)]
    return f"item: {shown[0]} | document: {shown[1]}"
