"""Filter by bits per byte under a small language model: KenLM, or any scorer that the caller passes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from maxlm.base.errors import UserError, error_kind, shorten
from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters.protocol import Scorer, removed, replace_text
from maxlm.documents.text import optional

BITS_PER_DIGIT = math.log2(10)  # KenLM's scores are log10


class KenlmScorer:
    """Bits per byte by a KenLM model (.arpa or binary): each line is a sentence, its units are words or characters, in lower case.

    Raises UserError if the package or the file is missing.
    """

    def __init__(self, path: str, tokens: str = "words") -> None:
        kenlm = optional("kenlm", "perplexity.kenlm", "kenlm")
        if not Path(path).is_file():
            raise UserError(f"{shorten(path)}: no such file; perplexity.kenlm is the path of a KenLM model.")
        try:
            self.model = kenlm.Model(path)
        except (OSError, RuntimeError) as error:
            raise error_kind(error)(f"{shorten(path)}: is not a KenLM model: {error}.") from None
        self.characters = tokens == "characters"

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text; 0.0 for one without words."""
        scores = []
        for text in texts:
            units = (kenlm_units(line, self.characters) for line in text.split("\n"))
            bits = -BITS_PER_DIGIT * sum(self.model.score(line) for line in units if line)
            scores.append(bits / max(len(text.encode("utf-8", "surrogatepass")), 1))
        return scores


def kenlm_units(line: str, characters: bool) -> str:
    """A line as KenLM's training text has it: units separated by spaces; the space between words is the unit ▁ among characters."""
    words = line.lower().replace("\0", " ").split()
    return " ".join("▁".join(words)) if characters else " ".join(words)


class PerplexitySettings(Section):
    """Bits per byte under a language model, within bounds."""

    checkpoint: str | None = None
    """Model that scores: folder of a run or of an imported model, or a Hugging Face folder; null: `kenlm` is given."""
    kenlm: str | None = None
    """File of a KenLM model that scores instead; null: `checkpoint` is given."""
    tokens: Literal["words", "characters"] = "words"
    """Tokens of the KenLM model."""
    max_bits_per_byte: float = Field(gt=0)
    """Documents above this are removed, such as garbage and shuffled text. Unit: bits a byte."""
    min_bits_per_byte: float = Field(0.0, ge=0)
    """Documents below this are removed, such as templates and repetition. Unit: bits a byte."""
    sample_characters: int = Field(8192, ge=100)
    """Length of the beginning of a document that is scored. Unit: characters."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.checkpoint is None) == (self.kenlm is None):
            raise ValueError("checkpoint or kenlm names the model that scores; set one of them")
        return self


class PerplexityFilter:
    """Remove documents with bits per byte out of bounds. Metadata `bits_per_byte`. Shuffled text is found by this filter alone."""

    name = "perplexity"

    def __init__(self, settings: PerplexitySettings, scorer: Scorer | None = None) -> None:
        assert scorer is not None or settings.kenlm is not None, "whoever reads perplexity.checkpoint passes its scorer"
        self.settings = settings
        self.scorer: Scorer = scorer if scorer is not None else KenlmScorer(str(settings.kenlm), settings.tokens)

    def __call__(self, document: Document) -> Document | Removed:
        return self.filter_many([document])[0]

    def filter_many(self, documents: Sequence[Document]) -> list[Document | Removed]:
        """The same for several documents, scored together."""
        results: list[Document | Removed] = []
        low, high = self.settings.min_bits_per_byte, self.settings.max_bits_per_byte
        scores = self.scorer.score([document.text[: self.settings.sample_characters] for document in documents])
        for document, score in zip(documents, (round(float(one), 4) for one in scores), strict=True):
            if not score <= high:  # not a number is too high
                results.append(removed(document, self.name, "perplexity_too_high", value=score, limit=high))
            elif score < low:
                results.append(removed(document, self.name, "perplexity_too_low", value=score, limit=low))
            else:
                results.append(replace_text(document, document.text, bits_per_byte=score))
        return results
