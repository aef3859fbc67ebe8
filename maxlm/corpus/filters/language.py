"""Language identification by a choice of libraries, and a quality classifier: a supervised model of fastText (Joulin et al. 2016, arXiv
1607.01759), as `fasttext supervised` trains and DCLM, FineWeb2 and CCNet publish them.
"""

import math
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, model_validator

from maxlm.base.errors import UserError, shorten
from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.language_tags import covered, has_script, label_of, primary_language
from maxlm.corpus.filters.protocol import Fraction, removed, replace_text
from maxlm.documents.text import optional

Identify = Callable[[str], list[tuple[str, float]]]  # text -> codes (or a model's labels) and probabilities, the likeliest first
LIKELY = 5  # languages that an identifier names
EVERY = -1  # labels of a classifier
UNKNOWN = "und"  # ISO 639-2: undetermined


class LanguageSettings(Section):
    """Language identification."""

    keep: tuple[str, ...] = ()
    """Languages that stay, by their ISO 639 codes and perhaps a script (zh-Hant, sr-Latn). A macrolanguage covers its members: zh covers
    yue and wuu, no covers nb and nn, sh covers sr, hr and bs. Empty: all stay, and are only labelled.
    """
    min_score: Fraction = 0.65
    """Smallest probability that the language of a document must have. Unit: probability."""
    backend: Literal["fasttext", "py3langid"] = "py3langid"
    """Program that identifies languages. py3langid: with its own model; fasttext: with the file in `model`."""
    model: str | None = None
    """File of a fastText model, such as lid.176.ftz; null: the backend is py3langid."""
    sample_characters: int = Field(600, ge=100)
    """Length of the text that is looked at, from the beginning, the middle and the end of a document. Unit: characters."""

    @model_validator(mode="after")
    def _tags_and_model(self) -> "LanguageSettings":
        for tag in self.keep:
            covered(tag)
        if (self.backend == "fasttext") != (self.model is not None):
            raise ValueError("`model` is the path of a fastText model; give it with backend: fasttext, and only there")
        return self


class LanguageFilter:
    """Label each document with its language, and keep documents in chosen languages. Metadata `language`, `language_score`.

    A document stays if its language is covered by a tag of `keep` (`language_tags.covered`) and the probabilities of all covered languages
    add up to `min_score`: Bosnian, Croatian and Serbian are hard to tell apart, and together they are not. docs/lab/corpus.md has what was
    measured.

    A text without letters is of the language "und", score 0. Raises UserError if a library or a model is missing.
    """

    name = "language"

    def __init__(self, settings: LanguageSettings) -> None:
        self.settings = settings
        self.identify: Identify
        if settings.backend == "fasttext":  # lid.176 was trained on lower case as well, and a page in capitals is no other language
            predict = load_fasttext(settings.model or "", "language")
            self.identify = lambda text: predict(text.lower(), LIKELY)
        else:
            self.identify = _py3langid()
        self.keep = [covered(tag) for tag in settings.keep]
        known = {primary_language(one) for one in getattr(self.identify, "classes", ())}
        for tag, (languages, _) in zip(settings.keep, self.keep, strict=True):
            if known and not languages & known:
                told = ", ".join(sorted(known))
                raise UserError(f"language.keep: {shorten(tag)} is no language that {settings.backend} tells apart: it has {told}.")

    def __call__(self, document: Document) -> Document | Removed:
        sample = sample_text(document.text, self.settings.sample_characters)
        ranked = (self.identify(sample) if any(map(str.isalpha, sample)) else []) or [(UNKNOWN, 0.0)]
        ranked = [(label_of(label, sample), score) for label, score in ranked]
        language, score = ranked[0][0], round(sum(score for label, score in ranked if label == ranked[0][0]), 4)
        if not self.keep:
            return replace_text(document, document.text, language=language, language_score=score)
        kept = {one for languages, script in self.keep if not script or has_script(sample, script) for one in languages}
        if language not in kept:
            return removed(document, self.name, "language_not_kept", language=language, score=score)
        if round(sum(score for label, score in ranked if label in kept), 4) < self.settings.min_score:
            return removed(document, self.name, "language_score", language=language, score=score, limit=self.settings.min_score)
        return replace_text(document, document.text, language=language, language_score=score)


def sample_text(text: str, characters: int) -> str:
    """At most `characters` of a text in one line: a third each from the beginning, the middle and the end."""
    if len(text) > characters:
        part, middle = characters // 3, len(text) // 2
        text = "\n".join((text[:part], text[middle - part // 2 : middle - part // 2 + part], text[-part:]))
    return " ".join(text.encode("utf-8", "replace").decode().split())  # the libraries refuse lone surrogates


def load_fasttext(path: str, setting: str) -> Callable[[str, int], list[tuple[str, float]]]:
    """The fastText model at `path`, which is `setting`.model: text, number of labels -> labels without __label__ and their probabilities.

    Raises UserError: it is missing or none, or the package is.
    """
    library = optional("fasttext", setting, "fasttext-predict")
    if not Path(path).is_file():
        raise UserError(f"{shorten(path)}: no such file; {setting}.model is the path of a fastText model, for example lid.176.ftz.")
    try:
        model = library.load_model(path)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{shorten(path)}: is not a fastText model: {error}.") from None

    def predict(text: str, count: int) -> list[tuple[str, float]]:
        labels, scores = model.predict(text, k=count)
        return [(label.removeprefix("__label__"), min(float(score), 1.0)) for label, score in zip(labels, scores, strict=True)]

    return predict


class ClassifierSettings(Section):
    """A classifier of fastText, as `fasttext supervised` trains it and others publish theirs."""

    model: str = Field(min_length=1)
    """File of a fastText model (.bin or .ftz)."""
    label: str = Field(min_length=1)
    """Label of the documents that are wanted, without __label__."""
    min_score: Fraction = 0.5
    """Smallest probability of this label that a document must have. Unit: probability."""


class ClassifierFilter:
    """Remove documents with a probability of the wanted label below `min_score`. Metadata `classifier_score`."""

    name = "classifier"

    def __init__(self, settings: ClassifierSettings) -> None:
        """Raises UserError: there is no such model, or it has no such label."""
        self.settings, self.predict = settings, load_fasttext(settings.model, "filters.classifier")
        labels = [label for label, _ in self.predict("text", EVERY)]
        if settings.label not in labels:
            known = ", ".join(sorted(labels)[:20])
            raise UserError(f"filters.classifier.label: {shorten(settings.model)} has no label {shorten(settings.label)}; it has {known}.")

    def __call__(self, document: Document) -> Document | Removed:
        text = " ".join(document.text.encode("utf-8", "replace").decode().split())
        score = round(next((score for label, score in self.predict(text, EVERY) if label == self.settings.label), 0.0), 4)
        if score < self.settings.min_score:
            return removed(document, self.name, "classifier_score", value=score, limit=self.settings.min_score)
        return replace_text(document, document.text, classifier_score=score)


def _py3langid() -> Identify:
    module = optional("py3langid.langid", "language")
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

    def __call__(self, text: str) -> list[tuple[str, float]]:
        text = unicodedata.normalize("NFC", text.lower() if text.isupper() else text)
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        model = self.moves, self.rows, self.features, self.likelihoods, self.priors, self.names
        shares = find_language(data, *model, self.counts)
        return [(self.classes[one], float(shares[one])) for one in np.argsort(-shares, kind="stable")[:LIKELY].tolist()]


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
) -> NDArray[np.float64]:
    """Probabilities of the classes (NaiveBayes), classes of one name together at the first; all alike for a text without features.

    `counts` comes and goes zero.
    """
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
    return shares / total
