"""Filter by bits per byte under a small language model: KenLM, or any scorer that the caller passes."""

import math
from collections.abc import Sequence
from pathlib import Path

from maxlm.config.errors import UserError, error_kind, shorten
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.protocol import Scorer, removed, replace_text
from maxlm.corpus.filters.settings import PerplexitySettings

BITS_PER_DIGIT = math.log2(10)  # KenLM's scores are log10


class KenlmScorer:
    """Bits per byte by a KenLM model (.arpa or binary): each line is a sentence, its units are words or characters, in lower case.

    Raises UserError if the package or the file is missing.
    """

    def __init__(self, path: str, tokens: str = "words") -> None:
        try:
            import kenlm
        except ImportError:
            raise UserError("perplexity.kenlm needs the package kenlm: pip install kenlm.") from None
        if not Path(path).is_file():
            raise UserError(f"{shorten(path)}: no such file; perplexity.kenlm is the path of a KenLM model.")
        try:
            self.model = kenlm.Model(path)
        except (OSError, RuntimeError) as error:
            raise error_kind(error)(f"{shorten(path)}: is not a KenLM model: {error}.") from None
        self.characters = tokens == "characters"

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text; 0.0 for one without words."""
        return [self._bits(text) / max(len(text.encode("utf-8", "surrogatepass")), 1) for text in texts]

    def _bits(self, text: str) -> float:
        units = (kenlm_units(line, self.characters) for line in text.split("\n"))
        return -BITS_PER_DIGIT * sum(self.model.score(line) for line in units if line)


def kenlm_units(line: str, characters: bool) -> str:
    """A line as KenLM's training text has it: units separated by spaces; the space between words is the unit ▁ among characters."""
    words = line.lower().replace("\0", " ").split()
    return " ".join("▁".join(words)) if characters else " ".join(words)


class PerplexityFilter:
    """Documents whose bits per byte are out of bounds. Metadata `bits_per_byte`. Shuffled text is found by this filter alone."""

    name = "perplexity"

    def __init__(self, settings: PerplexitySettings, scorer: Scorer | None = None) -> None:
        assert scorer is not None or settings.kenlm is not None, "whoever reads perplexity.checkpoint passes its scorer"
        self.settings = settings
        self.scorer: Scorer = scorer if scorer is not None else KenlmScorer(str(settings.kenlm), settings.tokens)

    def __call__(self, document: Document) -> Document | Removed:
        return self.filter_many([document])[0]

    def filter_many(self, documents: Sequence[Document]) -> list[Document | Removed]:
        """The same for several documents, scored together."""
        scores = self.scorer.score([document.text[: self.settings.sample_characters] for document in documents])
        return [self._judge(document, score) for document, score in zip(documents, scores, strict=True)]

    def _judge(self, document: Document, score: float) -> Document | Removed:
        score = round(float(score), 4)
        settings = self.settings
        if not score <= settings.max_bits_per_byte:  # not a number is too high
            return removed(document, self.name, "perplexity_too_high", value=score, limit=settings.max_bits_per_byte)
        if score < settings.min_bits_per_byte:
            return removed(document, self.name, "perplexity_too_low", value=score, limit=settings.min_bits_per_byte)
        return replace_text(document, document.text, bits_per_byte=score)
