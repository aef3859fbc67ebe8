"""A trained checkpoint as a scorer of texts, for the perplexity filter of a corpus."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.opening import open_model
from maxlm.evaluation.requests import Request


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that any process can open. `key`: digest of its weights and of its tokenizer, which decide the scores."""

    place: str
    step: int | None
    key: tuple[str, str]

    def open(self) -> "TextScorer":
        """Open the model in this process, once. Raises UserError."""
        return _open(self.place, self.step)


@dataclass(frozen=True)
class TextScorer:
    """Bits per byte by a trained model, over all devices of this process."""

    model: LanguageModel

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text, in windows that overlap by half of the context; 0.0 for an empty text."""
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # a lone surrogate has no tokens
        requests = [Request((self.model.prefix,), self.model.encode(text)) for text in texts]
        scores = self.model.score(requests, stride=max(self.model.scorer.context // 2, 1))
        sizes = (max(len(text.encode()), 1) for text in texts)
        return [-score.logprob / math.log(2) / size for score, size in zip(scores, sizes, strict=True)]


def find_checkpoint(place: str) -> CheckpointSource:
    """The newest checkpoint of a run, or an imported or published model, which stays the same one if training goes on. Raises UserError."""
    opened = open_model(Path(place), [])
    return CheckpointSource(place, opened.step, (opened.model.weights_digest, opened.model.tokenizer.hash))


@cache
def _open(place: str, step: int | None) -> TextScorer:
    return TextScorer(open_model(Path(place), [], step=step).model)
