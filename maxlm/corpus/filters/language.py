"""Language identification by a choice of libraries."""

import math
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from maxlm.config.errors import UserError, shorten
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.protocol import removed, replace_text
from maxlm.corpus.filters.settings import LanguageSettings

Identify = Callable[[str], tuple[str, float]]  # text -> ISO 639-1 code (or the model's label) and probability
UNKNOWN = "und"  # ISO 639-2: undetermined


class LanguageFilter:
    """Label each document with its language, and keep those of chosen ones. Metadata `language`, `language_score`.

    Measured on messages of Debian's programs in 57 languages, 30 messages a text, 600 characters of it looked at: py3langid 0.4.0 is right
    on 96.7% (0.37 ms a text by its own program, less than 0.1 ms as compiled here), fastText's lid.176.ftz on 91.9% (0.22 ms); lingua 2.1.1
    takes 18 times as long as fastText.
    A text without letters is of the language "und", score 0. Raises UserError if a library or a model is missing.
    """

    name = "language"

    def __init__(self, settings: LanguageSettings) -> None:
        self.settings = settings
        makers: dict[str, Callable[[], Identify]] = {
            "fasttext": partial(_fasttext, settings.model or ""),
            "py3langid": _py3langid,
            "lingua": _lingua,
        }
        self.identify = makers[settings.backend]()
        self.keep = frozenset(settings.keep)

    def __call__(self, document: Document) -> Document | Removed:
        sample = sample_text(document.text, self.settings.sample_characters)
        language, score = self.identify(sample) if any(map(str.isalpha, sample)) else (UNKNOWN, 0.0)
        score = round(score, 4)
        if self.keep and language not in self.keep:
            return removed(document, self.name, "language_not_kept", language=language, score=score)
        if self.keep and score < self.settings.min_score:
            return removed(document, self.name, "language_score", language=language, score=score, limit=self.settings.min_score)
        return replace_text(document, document.text, language=language, language_score=score)


def sample_text(text: str, characters: int) -> str:
    """At most `characters` of a text in one line: a third each from the beginning, the middle and the end."""
    if len(text) > characters:
        part, middle = characters // 3, len(text) // 2
        text = "\n".join((text[:part], text[middle - part // 2 : middle - part // 2 + part], text[-part:]))
    return " ".join(text.encode("utf-8", "replace").decode().split())  # the libraries refuse lone surrogates


def load_fasttext(path: str, setting: str) -> Any:
    """The fastText model at `path`, which is `setting`.model. Raises UserError: it is missing or none, or the package is."""
    library = _import("fasttext", "fasttext-predict", setting)
    if not Path(path).is_file():
        raise UserError(f"{shorten(path)}: no such file; {setting}.model is the path of a fastText model, for example lid.176.ftz.")
    try:
        return library.load_model(path)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{shorten(path)}: is not a fastText model: {error}.") from None


def _fasttext(path: str) -> Identify:
    model = load_fasttext(path, "language")

    def identify(text: str) -> tuple[str, float]:
        labels, scores = model.predict(
            text.lower(), k=1
        )  # lid.176 was trained on lower case as well, and a page in capitals is no other language
        return (labels[0].removeprefix("__label__"), min(float(scores[0]), 1.0)) if labels else (UNKNOWN, 0.0)

    return identify


def _py3langid() -> Identify:
    module = _import("py3langid.langid", "py3langid")
    return NaiveBayes(module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True))


class NaiveBayes:
    """py3langid's classifier with its own model, compiled: a quarter of the time, and one order of addition on every machine.

    Features are byte n-grams that an automaton finds; a language's score is its log prior plus log(1 + count) times the log likelihood of
    each feature, divided by the square root of the number of bytes, then a softmax.
    """

    def __init__(self, identifier: Any) -> None:
        self.moves = np.frombuffer(identifier.tk_nextmove, np.uint32)
        self.rows = np.frombuffer(identifier.tk_row, np.uint16)
        self.features = np.array(identifier.tk_output, np.int32)  # of each state; negative: none
        self.likelihoods = np.ascontiguousarray(identifier.nb_ptc, np.float32)  # (features, classes)
        self.priors = np.ascontiguousarray(identifier.nb_pc, np.float32)
        self.counts = np.zeros(len(self.likelihoods), np.int32)  # all zero between texts
        self.classes = [str(name) for name in identifier.nb_classes]
        self.names = np.array([self.classes.index(name) for name in self.classes])  # scripts of one language are classes of one name

    def __call__(self, text: str) -> tuple[str, float]:
        text = unicodedata.normalize("NFC", text.lower() if text.isupper() else text)
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        model = self.moves, self.rows, self.features, self.likelihoods, self.priors, self.names
        best, share = find_language(data, *model, self.counts)
        return self.classes[best], float(share)


@njit(cache=True, nogil=True)
def find_language(
    data: NDArray[np.uint8],
    moves: NDArray[np.uint32],
    rows: NDArray[np.uint16],
    features: NDArray[np.int32],
    likelihoods: NDArray[np.float32],
    priors: NDArray[np.float32],
    names: NDArray[np.int64],
    counts: NDArray[np.int32],
) -> tuple[int, float]:
    """Most probable class (NaiveBayes) and its probability. A text without features has all classes alike. `counts` comes and goes zero."""
    found, n, state = np.empty(data.size, np.int32), 0, np.uint32(0)
    for i in range(data.size):
        state = moves[(np.int64(rows[state]) << 8) + data[i]]
        feature = features[state]
        if feature >= 0:
            if counts[feature] == 0:
                found[n], n = feature, n + 1
            counts[feature] += 1
    scores = np.zeros(priors.size, np.float32)
    for i in range(n):
        weight, row = np.float32(math.log1p(counts[found[i]])), likelihoods[found[i]]
        counts[found[i]] = 0
        for j in range(scores.size):
            scores[j] += weight * row[j]
    if n:
        for j in range(scores.size):
            scores[j] += priors[j]
    top, total, shares = scores.max(), 0.0, np.zeros(priors.size)
    for j in range(scores.size):
        share = math.exp(float(scores[j] - top) / math.sqrt(max(data.size, 1)))
        shares[names[j]] += share
        total += share
    best = int(np.argmax(shares))
    return best, shares[best] / total


def _lingua() -> Identify:
    library = _import("lingua", "lingua-language-detector")
    detector = library.LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().with_preloaded_language_models().build()

    def identify(text: str) -> tuple[str, float]:
        values = detector.compute_language_confidence_values(text)
        return (values[0].language.iso_code_639_1.name.lower(), float(values[0].value)) if values else (UNKNOWN, 0.0)

    return identify


def _import(module: str, package: str, setting: str = "language") -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{setting} needs the package {package}: pip install {package}.") from None
