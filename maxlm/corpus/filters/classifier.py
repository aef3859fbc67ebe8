"""Quality classifier: a supervised model of fastText (Joulin et al. 2016, arXiv 1607.01759), as `fasttext supervised` trains and DCLM,
FineWeb2 and CCNet publish them.
"""

from pydantic import Field

from maxlm.config.errors import UserError, shorten
from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.language import load_fasttext
from maxlm.corpus.filters.protocol import Fraction, removed, replace_text

EVERY = -1  # labels


class ClassifierSettings(Section):
    """A classifier of fastText, as `fasttext supervised` trains it and others publish theirs."""

    model: str = Field(min_length=1, description="Path of a fastText model (.bin or .ftz).")
    label: str = Field(min_length=1, description="The wanted label, without __label__.")
    min_score: Fraction = Field(0.5, description="Probability of this label that a document has at least.")


class ClassifierFilter:
    """Remove documents with a probability of the wanted label below `min_score`. Metadata `classifier_score`."""

    name = "classifier"

    def __init__(self, settings: ClassifierSettings) -> None:
        """Raises UserError: there is no such model, or it has no such label."""
        self.settings, self.model = settings, load_fasttext(settings.model, "filters.classifier")
        self.label = f"__label__{settings.label}"
        labels = [label for label, _ in self._labels("text")]
        if self.label not in labels:
            known = ", ".join(label.removeprefix("__label__") for label in sorted(labels)[:20])
            raise UserError(f"filters.classifier.label: {shorten(settings.model)} has no label {shorten(settings.label)}; it has {known}.")

    def __call__(self, document: Document) -> Document | Removed:
        text = " ".join(document.text.encode("utf-8", "replace").decode().split())
        score = round(next((score for label, score in self._labels(text) if label == self.label), 0.0), 4)
        if score < self.settings.min_score:
            return removed(document, self.name, "classifier_score", value=score, limit=self.settings.min_score)
        return replace_text(document, document.text, classifier_score=score)

    def _labels(self, text: str) -> list[tuple[str, float]]:
        labels, scores = self.model.predict(text, k=EVERY)
        return [(label, min(float(score), 1.0)) for label, score in zip(labels, scores, strict=True)]
