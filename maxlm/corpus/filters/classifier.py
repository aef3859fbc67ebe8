"""Linear classifier on hashed word n-grams, as fastText's (Joulin et al. 2016, arXiv 1607.01759) without a hidden layer."""

import hashlib
import logging
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maxlm.config.errors import UserError, as_user_error, shorten
from maxlm.config.paths import open_regular
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.protocol import removed, replace_text
from maxlm.corpus.filters.scan import STEP, Hashes
from maxlm.corpus.filters.settings import ClassifierSettings
from maxlm.corpus.filters.statistics import TextStatistics, statistics_of
from maxlm.corpus.read import read
from maxlm.documents.files import find_once
from maxlm.documents.records import DEFAULTS, REASONS
from maxlm.telemetry.atomic import replacing

FORMAT = 1  # of the file and of the hashes: a model is of use with the hashes that it was trained on
_log = logging.getLogger(__name__)
Weights = NDArray[np.float32]


class LinearClassifier:
    """Probability that a text is of the wanted class: the logistic function of the mean weight of its 1- to `order`-grams."""

    def __init__(self, weights: Weights, bias: float, order: int) -> None:
        self.weights, self.bias, self.order = weights, bias, order

    def probability(self, statistics: TextStatistics) -> float:
        buckets = ngram_buckets(statistics.hashes_T, self.order, self.weights.size)
        mean = float(self.weights[buckets].mean(dtype=np.float64)) if buckets.size else 0.0
        return float(_logistic(np.float64(self.bias + mean)))

    def save(self, path: Path) -> None:
        """Write the model as .npz, atomically. Raises OSError."""
        with replacing(path) as file:
            np.savez(file, format=FORMAT, weights=self.weights, bias=np.float64(self.bias), order=self.order)

    @staticmethod
    def is_in(path: Path) -> bool:
        """True if the file holds a classifier, of whatever version. Raises OSError."""
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
                return {"format", "weights", "bias", "order"} <= set(arrays.files)
        except (ValueError, EOFError, AttributeError, zipfile.BadZipFile):
            return False

    @classmethod
    def load(cls, path: Path) -> "LinearClassifier":
        """Raises UserError."""
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
                if int(arrays["format"]) != FORMAT:
                    raise UserError(f"{shorten(str(path))}: is of another version; train the classifier again.")
                weights, bias, order = arrays["weights"], float(arrays["bias"]), int(arrays["order"])
        except OSError as error:
            raise as_user_error(error) from None
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise UserError(f"{shorten(str(path))}: is not a classifier written by maxlm.") from None
        if weights.ndim != 1 or weights.dtype != np.float32 or weights.size & (weights.size - 1) or not weights.size or not 1 <= order <= 5:
            raise UserError(f"{shorten(str(path))}: is not a classifier written by maxlm.")
        return cls(weights, bias, order)


class ClassifierFilter:
    """Documents that a classifier takes for the unwanted class. Metadata `classifier_score`: probability of the wanted one."""

    name = "classifier"

    def __init__(self, settings: ClassifierSettings) -> None:
        self.settings = settings
        self.classifier = LinearClassifier.load(Path(settings.model))

    def __call__(self, document: Document) -> Document | Removed:
        score = round(self.classifier.probability(statistics_of(document.text)), 4)
        if score < self.settings.min_score:
            return removed(document, self.name, "classifier_score", value=score, limit=self.settings.min_score)
        return replace_text(document, document.text, classifier_score=score)


def ngram_buckets(hashes_T: Hashes, order: int, n_buckets: int) -> NDArray[np.int64]:
    """Bucket of each 1- to `order`-gram of tokens; `n_buckets` is a power of two."""
    shift = np.uint64(64 - (n_buckets.bit_length() - 1))
    grams, out = hashes_T, []
    for n in range(1, order + 1):
        if n > 1:
            grams = grams[: max(hashes_T.size - n + 1, 0)] * STEP + hashes_T[n - 1 :]
        mixed = (grams ^ (grams >> np.uint64(32))) * STEP
        out.append((mixed >> shift).astype(np.int64))
    return np.concatenate(out)


def train_classifier(
    wanted: Sequence[str], unwanted: Sequence[str], *, order: int = 2, bits: int = 18, epochs: int = 40, learning_rate: float = 1.0
) -> LinearClassifier:
    """Train on texts of both classes, which weigh the same whatever their numbers: AdaGrad on the logistic loss of all texts at once.

    Deterministic: no random number, and sums in the order of the texts. `bits`: log2 of the buckets. Raises UserError without examples.
    """
    if not wanted or not unwanted:
        raise UserError("the classifier needs examples of both classes: a folder is empty.")
    buckets_of = [ngram_buckets(TextStatistics(text).hashes_T, order, 1 << bits) for text in (*wanted, *unwanted)]
    lengths = np.array([max(buckets.size, 1) for buckets in buckets_of])
    buckets, rows = np.concatenate(buckets_of), np.repeat(np.arange(len(buckets_of)), [b.size for b in buckets_of])
    target = np.concatenate([np.ones(len(wanted)), np.zeros(len(unwanted))])
    share = np.concatenate([np.full(len(wanted), 0.5 / len(wanted)), np.full(len(unwanted), 0.5 / len(unwanted))])
    weights, bias = np.zeros(1 << bits), 0.0
    squares, bias_square = np.full(1 << bits, 1e-12), 1e-12
    for _ in range(epochs):
        logits = np.bincount(rows, weights[buckets], len(lengths)) / lengths + bias
        error = (_logistic(logits) - target) * share
        gradient = np.bincount(buckets, (error / lengths)[rows], 1 << bits)
        squares += gradient**2
        bias_square += error.sum() ** 2
        weights -= learning_rate * gradient / np.sqrt(squares)
        bias -= 0.1 * learning_rate * error.sum() / np.sqrt(bias_square)
    return LinearClassifier(weights.astype(np.float32), float(bias), order)


@dataclass(frozen=True)
class Trained:
    """A classifier of all examples, and how one of nine tenths of them did on the others: `right` of `held_out`, 0 if there are too few."""

    classifier: LinearClassifier
    wanted: int
    unwanted: int
    right: int
    held_out: int


def train_from_files(wanted: str, unwanted: str, *, text_field: str = DEFAULTS.text_field, **settings: int | float) -> Trained:
    """`train_classifier` on the documents of two folders (or files, globs, URLs) of any format that `read` knows.

    A tenth is held out by a hash of its text, so that copies are on one side. All are in memory at once. Records that are no documents are
    counted by reason in a line of the log. Raises UserError.
    """
    examples = [_documents(source, text_field) for source in (wanted, unwanted)]
    kept, held = zip(*map(_held_out, examples), strict=True)
    right = count = 0
    if all(kept) and all(held):
        trial = train_classifier(*kept, **settings)  # type: ignore[arg-type]
        probabilities = [[trial.probability(TextStatistics(text)) for text in texts] for texts in held]
        right = sum(value >= 0.5 for value in probabilities[0]) + sum(value < 0.5 for value in probabilities[1])
        count = sum(map(len, held))
    whole = train_classifier(*examples, **settings)  # type: ignore[arg-type]
    return Trained(whole, len(examples[0]), len(examples[1]), right, count)


def _documents(source: str, text_field: str) -> list[str]:
    """Texts of a source, at least one."""
    texts: list[str] = []
    rows: Counter[str] = Counter()
    first: dict[str, str] = {}
    for one in (one for file in find_once([source]) for one in read(file.path, text_field=text_field)):
        if isinstance(one, Document):
            texts.append(one.text)
        else:
            rows[one.reason] += int(one.detail.get("rows", 1))
            first.setdefault(one.reason, one.id)
    lost = "; ".join(f"{count:,} {reason} ({REASONS[reason]}), the first {shorten(first[reason])}" for reason, count in rows.items())
    if not texts:
        field = f"; its records have no field {text_field}: name theirs by --text-field" if "missing_field" in rows else ""
        why = f" ({lost})" if lost else ""
        raise UserError(f"{shorten(source)}: no document in it can be read{why}{field}; each folder holds the examples of one class.")
    if lost:
        _log.warning("%s: records that are no documents are left out: %s", shorten(source), lost)
    return texts


def _held_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Nine tenths of the texts, and the others."""
    parts: tuple[list[str], list[str]] = [], []
    for text in texts:
        parts[hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] < 26].append(text)
    return parts


def _logistic(values: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -500.0, 500.0)))
