"""Filters of documents: what each one is, and how a list of them runs."""

import re
from collections.abc import Sequence
from typing import Protocol

from maxlm.corpus.document import Document, Removed, Value

EXAMPLE_CHARACTERS = 300


class Filter(Protocol):
    """One stage of cleaning. The result depends on the document alone: no state is kept between documents."""

    name: str

    def __call__(self, document: Document) -> Document | Removed:
        """The document, perhaps with changed text and more metadata; or why it is left out. The argument is not changed."""
        ...


class Scorer(Protocol):
    """A language model that scores texts."""

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text; 0.0 for an empty one."""
        ...


def removed(document: Document, stage: str, reason: str, example: str | None = None, **detail: Value) -> Removed:
    """`document`, left out by `stage`; the example is the beginning of `example` (the document's text), in one line."""
    beginning = (document.text if example is None else example)[: 4 * EXAMPLE_CHARACTERS]
    return Removed(document.id, stage, reason, re.sub(r"\s+", " ", beginning).strip()[:EXAMPLE_CHARACTERS], detail)


def replace_text(document: Document, text: str, **metadata: Value) -> Document:
    """A document with the same id, another text and more metadata."""
    return Document(document.id, text, {**document.metadata, **metadata})


def run_filters(filters: Sequence[Filter], document: Document) -> Document | Removed:
    """The filters one after the other, until one removes the document."""
    for each in filters:
        result = each(document)
        if isinstance(result, Removed):
            return result
        document = result
    return document
