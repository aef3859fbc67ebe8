"""Index of the n-grams of evaluation items and the weights of their words. K items, W words of all items, P postings."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from maxlm.base.errors import UserError
from maxlm.corpus.decontaminate.frequencies import Frequencies, item_words, load_arrays, save_arrays
from maxlm.corpus.decontaminate.items import Item, read_items
from maxlm.corpus.decontaminate.settings import DecontaminateSettings
from maxlm.corpus.decontaminate.tokens import F64, I64, U64, Words, gram_hashes, kinds

ITEM_SHARE = 0.005  # of all items: an n-gram in as many of them is part of a template, as one in `common_documents` of them
SHORT = 2  # times `shortest` words: items of fewer are short
SLACK = 16  # words of a window before the first run, and after one and a half times the item's length
LABEL = 2  # words that a layout may put before a question or an option, such as "Answer A:"
SAME_SHARE = 0.7  # of the numbers and names that an item and a window have at one place must be equal in both
COMMON_RUN = 1e-6  # weight of each run of an item without a rare one, of which short options tell it from others
FADE = 4  # an n-gram in 1 / FADE of the documents that make it common has its full weight


@dataclass(frozen=True)
class Found:
    """Place of an item's words in a window of a document. `score`: share of the item's weight; `words`: share of its words; `same`: of the
    item's numbers and names, each once, that have a number or name at their place in the window, the share that is equal; `first` and
    `last`: numbers of the words of the window between which all are.
    """

    score: float
    words: float
    same: float
    first: int
    last: int


@dataclass
class EvalIndex:
    """Items that can be told from other text, ready to be looked for.

    `names_K`: set and number of each item, in order; words `bound_K[k]` to `bound_K[k + 1]` are item k's, `segment_W` the text of the item
    that each is from. `grams`: sorted hashes of rare n-grams, postings of gram g: `posting_bound[g]` to `posting_bound[g + 1]`: first
    word `word_P`, and weight of the run `value_P`. `left_out`: numbers of items that are not searched, by set and reason: `empty`,
    `duplicate` of an item before, `short` (no run of `ngram` words), `common` (nothing in it is rare). `seed_K`: weight of all runs that
    can be looked up, up to the item's evidence: options of a word or two are part of none. `slack_K`: words that a layout may put
    among the item's own. `kind_W`: NUMBER, NAME or 0, and `lower`: sorted hashes of words that are no names.
    """

    ngram: int
    names_K: list[tuple[str, int]]
    left_out: dict[str, dict[str, list[int]]]
    hash_W: U64
    weight_W: F64
    segment_W: I64
    bound_K: I64
    required_K: F64
    evidence_K: F64
    strict_K: NDArray[np.bool_]
    seed_K: F64
    slack_K: I64
    kind_W: I64
    lower: U64
    grams: U64
    posting_bound: I64
    word_P: I64
    value_P: F64
    texts: list[str] = field(repr=False)

    @classmethod
    def build(cls, settings: DecontaminateSettings, frequencies: Frequencies) -> Self:
        """Read the sets and weigh their words. Raises UserError for a set that cannot be read, or frequencies of other sets."""
        items, items_digest = read_items(settings)
        if frequencies.items_digest != f"{settings.ngram}-{items_digest}":
            raise UserError("frequencies were learned for other evaluation sets, fields or n-grams: learn them again with these settings.")
        left_out: dict[str, dict[str, list[int]]] = {name: {} for name in sorted(settings.sets)}
        items, found = _distinct(items, left_out)
        weight_W = _weights(settings, frequencies, items, found)
        kept, chosen = [], []
        for item, (question, options) in zip(items, _ranges(items, found), strict=True):
            # The question's words must be found, and the options' as well where the question alone is short or common.
            enough = len(question) >= settings.shortest and weight_W[question].sum() >= max(settings.evidence, 1e-9)
            words = question if enough else np.concatenate([question, options])
            runs = np.bincount(found.owner_T[words]) if len(words) else np.zeros(1)
            if runs.max() < settings.ngram:
                _leave_out(left_out, item, "short")
            elif weight_W[words].sum() < max(settings.evidence, 1e-9):
                _leave_out(left_out, item, "common")
            else:
                kept.append(item)
                chosen.append(words)
        return cls._filled(settings, left_out, kept, chosen, found, weight_W)

    @classmethod
    def _filled(
        cls,
        settings: DecontaminateSettings,
        left_out: dict[str, dict[str, list[int]]],
        items: list[Item],
        chosen: list[I64],
        found: Words,
        all_weights: F64,
    ) -> Self:
        sizes = np.array([len(words) for words in chosen], np.int64)
        words = np.concatenate([np.empty(0, np.int64), *chosen])
        bound_K = np.concatenate([[0], np.cumsum(sizes)])
        weight_W, hash_W, segment_W = all_weights[words], found.hash_T[words], found.owner_T[words]
        n = settings.ngram
        total = np.concatenate([[0.0], np.cumsum(weight_W)])
        first = np.flatnonzero(segment_W[: max(0, len(words) - n + 1)] == segment_W[n - 1 :]) if len(words) >= n else np.empty(0, np.int64)
        value = (total[first + n] - total[first]) / n
        best = np.zeros(len(sizes))
        item_W = np.repeat(np.arange(len(sizes)), sizes)
        np.maximum.at(best, item_W[first], value)
        value = np.where(best[item_W[first]] > 1e-9, value, COMMON_RUN)
        informative = value > 1e-9
        first, value = first[informative], value[informative]
        hashes = gram_hashes(hash_W, n)[first]
        order = np.argsort(hashes, kind="stable")
        grams, start = np.unique(hashes[order], return_index=True)
        ramp = np.interp(
            sizes, SHORT * np.array([settings.shortest, 2 * settings.shortest]), [settings.short_threshold, settings.threshold]
        )
        needed = np.where(sizes < settings.shortest, 1.0, ramp)
        evidence = np.array([all_weights[one].sum() for one in chosen], np.float64)
        part_W, words_of = np.unique(segment_W, return_inverse=True, return_counts=True)[1:]
        in_short = np.bincount(item_W, words_of[part_W] < n, minlength=len(sizes))
        parts = np.bincount(item_W, 1 / words_of[part_W], minlength=len(sizes))
        begins = ((found.text[max(0, at - 2) : at], found.text[at]) for at in found.start_T.tolist())
        votes = [1 if first.islower() else -1 if before[1:] == " " and before[0].isalnum() else 0 for before, first in begins]
        all_words, inverse = np.unique(found.hash_T, return_inverse=True)
        lower = all_words[np.bincount(inverse, np.array(votes, float), minlength=len(all_words)) > 0]
        return cls(
            ngram=n,
            names_K=[(item.set, item.number) for item in items],
            left_out=left_out,
            hash_W=hash_W,
            weight_W=weight_W,
            segment_W=segment_W,
            bound_K=bound_K,
            required_K=needed,
            evidence_K=evidence,
            strict_K=sizes < SHORT * settings.shortest,
            seed_K=np.minimum(evidence, np.bincount(item_W[first], value, minlength=len(sizes))),
            slack_K=np.round(SLACK + in_short + LABEL * parts).astype(np.int64),
            kind_W=kinds(found, words, lower),
            lower=lower,
            grams=grams,
            posting_bound=np.append(start, len(hashes)),
            word_P=first[order],
            value_P=value[order],
            texts=[" ".join(item.question + item.options) for item in items],
        )

    def align(self, item: int, found: Words, low: int, high: int) -> Found:
        """Find words of `item` in a window, words `low` to `high` of documents: those in runs of `ngram` words that both have, in any
        order, and those next to such a run that stand at their place, give or take two.
        """
        begin, end = int(self.bound_K[item]), int(self.bound_K[item + 1])
        window = found.hash_T[low:high]
        grams = gram_hashes(window, self.ngram)
        order = np.argsort(grams, kind="stable")
        segment = self.segment_W[begin:end]
        cuts = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), end - begin]
        place = np.concatenate(
            [
                _aligned(self.hash_W[begin + start : begin + stop], window, grams[order], order, self.ngram)
                for start, stop in itertools.pairwise(cuts)
            ]
        )
        matched = place >= 0
        if not matched.any():
            return Found(0.0, 0.0, 0.0, 0, 0)
        score = float(self.weight_W[begin:end][matched].sum() / self.evidence_K[item])
        kind, words = self.kind_W[begin:end], self.hash_W[begin:end]
        equal = set(words[matched & (kind > 0)].tolist())
        differ: set[int] = set()
        if score >= self.required_K[item] and not matched[kind > 0].all():  # of few windows: this takes as long as all else
            others = kinds(found, np.arange(low, high), self.lower)
            for start, stop in itertools.pairwise(cuts):
                differ.update(words[start + one] for one in _replaced(place[start:stop], kind[start:stop], others))
        same = len(equal) / max(1, len(equal | differ)) if differ else 1.0
        return Found(round(score, 6), round(float(matched.mean()), 6), round(same, 6), int(place[matched].min()), int(place.max()))

    def report(self) -> dict[str, dict[str, int]]:
        """For each set: items that are searched, and items left out by reason."""
        counts = {name: {"searched": 0} | {reason: len(numbers) for reason, numbers in by.items()} for name, by in self.left_out.items()}
        for name, _ in self.names_K:
            counts[name]["searched"] += 1
        return counts

    def save(self, path: Path) -> None:
        """Write atomically; the same index gives the same bytes. Raises OSError."""
        about = {name: value for name, value in vars(self).items() if name not in _ARRAYS}
        save_arrays(path, about, {name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises UserError if `path` cannot be read."""
        about, arrays = load_arrays(path, _ARRAYS)
        return cls(**{**about, "names_K": [tuple(name) for name in about["names_K"]]}, **arrays)


_ARRAYS = tuple(
    name for name in EvalIndex.__dataclass_fields__ if name.endswith(("_W", "_K", "_P", "grams", "bound", "lower")) and name != "names_K"
)


def _distinct(items: list[Item], left_out: dict[str, dict[str, list[int]]]) -> tuple[list[Item], Words]:
    """Items with words, each once, and their words."""
    found = item_words(items)
    seen: set[bytes] = set()
    kept = []
    for item, (question, options) in zip(items, _ranges(items, found), strict=True):
        if not len(question) and not len(options):
            _leave_out(left_out, item, "empty")
            continue
        key = b"|".join(part.tobytes() for part in (found.hash_T[question], np.sort(found.hash_T[options])))
        if key in seen:
            _leave_out(left_out, item, "duplicate")
        else:
            seen.add(key)
            kept.append(item)
    return kept, item_words(kept)


def _leave_out(left_out: dict[str, dict[str, list[int]]], item: Item, reason: str) -> None:
    left_out[item.set].setdefault(reason, []).append(item.number)


def _ranges(items: list[Item], found: Words) -> list[tuple[I64, I64]]:
    """Numbers of the words of each item's question and options."""
    texts = np.cumsum([0] + [len(item.question) for item in items] + [len(item.options) for item in items])
    bounds = np.searchsorted(found.owner_T, texts)
    n = len(items)
    return [(np.arange(bounds[k], bounds[k + 1]), np.arange(bounds[n + k], bounds[n + k + 1])) for k in range(n)]


def _weights(settings: DecontaminateSettings, frequencies: Frequencies, items: list[Item], found: Words) -> F64:
    """Weight of each word: its inverse document frequency, 0 to 1, times the mean rarity of the n-grams that it is part of."""
    documents = frequencies.documents
    grams, first = found.grams(settings.ngram)
    common = max(settings.common_documents, settings.common_share * documents)
    rarity = _rarity(frequencies.lookup(grams), common)
    item_T = np.zeros(len(found.hash_T), np.int64)
    for number, ranges in enumerate(_ranges(items, found)):
        for words in ranges:
            item_T[words] = number
    _, gram = np.unique(grams, return_inverse=True)
    pairs = np.unique(gram * max(1, len(items)) + item_T[first])
    in_items = np.bincount(pairs // max(1, len(items)), minlength=1)
    rarity = np.minimum(rarity, _rarity(in_items[gram] if len(gram) else gram, max(settings.common_documents, ITEM_SHARE * len(items))))
    _, once = np.unique(gram * max(1, len(items)) + item_T[first], return_index=True)
    repeated = np.ones(len(first), bool)
    repeated[once] = False
    sums, counts = np.zeros(len(found.hash_T)), np.zeros(len(found.hash_T))
    for offset in range(settings.ngram):
        np.add.at(sums, first + offset, rarity)
        np.add.at(counts, first + offset, 1)
    if documents == 0:
        idf = np.ones(len(found.hash_T))
    else:
        idf = np.log((documents + 1) / (np.minimum(frequencies.lookup(found.hash_T), documents) + 1)) / np.log(documents + 1)
    for offset in range(settings.ngram):
        idf[first[repeated] + offset] = 0  # a name that an item repeats counts once
    return np.round(idf * np.where(counts > 0, sums / np.maximum(counts, 1), 1.0), 9)


def _rarity(count: I64, common: float) -> F64:
    return np.clip(np.log(common / np.maximum(count, 1)) / np.log(FADE), 0, 1)


def _aligned(text: U64, window: U64, sorted_grams: U64, order: I64, n: int) -> I64:
    """For each word of `text`, a place in `window` where it stands in the same run of words; -1 where there is none."""
    size = len(text)
    at = np.full(size, -1, np.int64)
    if size < n:  # an option of a word or two: whole
        if size <= len(window):
            starts = np.flatnonzero(np.all([window[k : len(window) - size + 1 + k] == text[k] for k in range(size)], axis=0))
            at[:] = starts[0] + np.arange(size) if len(starts) else -1
        return at
    if not len(order):
        return at
    grams = gram_hashes(text, n)
    place = np.minimum(np.searchsorted(sorted_grams, grams), len(order) - 1)
    hit = np.flatnonzero(sorted_grams[place] == grams)
    for offset in range(n):
        at[hit + offset] = order[place[hit]] + offset
    if not len(hit):
        return at
    known, missing = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
    if not len(missing):
        return at
    right = np.searchsorted(known, missing)
    neighbours = known[np.stack([np.maximum(right - 1, 0), np.minimum(right, len(known) - 1)])]
    distance = missing - neighbours
    expected = (at[neighbours] + distance + SHIFTS).reshape(-1, len(missing))  # one row for each shift and neighbour
    fits = (expected >= 0) & (expected < len(window)) & np.tile(np.abs(distance) <= REACH, (len(SHIFTS), 1))
    fits &= window.take(expected, mode="clip") == text[missing]
    row = np.argmax(fits, axis=0)
    column = np.flatnonzero(fits[row, np.arange(len(missing))])
    at[missing[column]] = expected[row[column], column]
    return at


def _replaced(at: I64, kind: I64, others: I64) -> list[int]:
    """Find the numbers and names of a text that have another number or name at their place in a window.

    `at`: places of the text's words in the window, -1 for a word that is missing; `others`: kinds of the window's words.
    """
    known = np.flatnonzero(at >= 0)
    out = []
    for one in np.flatnonzero((at < 0) & (kind > 0)).tolist() if len(known) else []:
        right = int(np.searchsorted(known, one))
        before, after = (int(known[right - 1]) if right else -1), (int(known[right]) if right < len(known) else -1)
        low = at[before] + 1 if before >= 0 else at[after] - (after - one) - 1
        high = at[after] if after >= 0 else at[before] + (one - before) + 2
        near = before < 0 or after < 0 or 0 < high - low <= after - before + REACH
        edge = min(one - before if before >= 0 else REACH, after - one if after >= 0 else REACH) <= NEXT
        if near and edge and (others[max(0, low) : max(0, high)] == kind[one]).any():
            out.append(one)
    return out


NEXT = 3  # words from a shared word, within which another number or name replaces the item's
SHIFTS = np.array([0, -1, 1, -2, 2])[:, None, None]  # words that were inserted or left out
REACH = 4  # words from a run of words that both texts have, within which single words are matched
