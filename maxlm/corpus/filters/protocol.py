"""Filters of documents: what each one is, and how a list of them runs."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeGuard

from pydantic import Field

from maxlm.corpus.document import Document, Removed, Value, tag

EXAMPLE_CHARACTERS = 300
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Filter(Protocol):
    """One stage of cleaning. The result depends on the document alone: no state is kept between documents."""

    name: str

    def __call__(self, document: Document) -> Document | Removed:
        """The document, perhaps with changed text and more metadata; or why it is left out. The argument is not changed."""
        ...


class BatchFilter(Filter, Protocol):
    """A filter that is faster with several documents at once."""

    def filter_many(self, documents: Sequence[Document]) -> list[Document | Removed]:
        """Return what the filter gives for each of `documents`."""
        ...


def takes_many(each: Filter) -> TypeGuard[BatchFilter]:
    """True for a BatchFilter. isinstance() with a protocol takes 14 microseconds, which is as long as a filter."""
    return hasattr(each, "filter_many")


class TagFilter:
    """A filter that tags documents (`document.tag`) in place of removing them."""

    def __init__(self, inner: Filter) -> None:
        self.name, self.inner = inner.name, inner

    def __call__(self, document: Document) -> Document:
        return tag(document, self.inner(document), self.name)

    def filter_many(self, documents: Sequence[Document]) -> list[Document | Removed]:
        """Return what the filter gives for each of `documents`."""
        results = self.inner.filter_many(documents) if takes_many(self.inner) else map(self.inner, documents)
        return [tag(document, result, self.name) for document, result in zip(documents, results, strict=True)]


class Scorer(Protocol):
    """A language model that scores texts."""

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text; 0.0 for an empty one."""
        ...


class ScorerSource(Protocol):
    """A scorer that any process can open; it is sent to them pickled."""

    @property
    def key(self) -> Any:
        """Return everything that decides the scores, as JSON has it."""
        ...

    def open(self) -> Scorer:
        """The scorer, in this process. Raises UserError."""
        ...


def removed(document: Document, stage: str, reason: str, **detail: Value) -> Removed:
    """`document`, left out by `stage`; the example is the beginning of its text, in one line."""
    beginning = document.text[: 4 * EXAMPLE_CHARACTERS]
    return Removed(document.id, stage, reason, " ".join(beginning.split())[:EXAMPLE_CHARACTERS], detail)


def replace_text(document: Document, text: str, **metadata: Value) -> Document:
    """A document with the same id, another text and more metadata."""
    return Document(document.id, text, {**document.metadata, **metadata}, document.cuts)


def run_filters(filters: Sequence[Filter], document: Document) -> Document | Removed:
    """The filters one after the other, until one removes the document."""
    for each in filters:
        result = each(document)
        if isinstance(result, Removed):
            return result
        document = result
    return document


def run_together(filters: Sequence[Filter], documents: Sequence[Document]) -> list[Document | Removed]:
    """Return what run_filters() gives for each of `documents`, with filters that take several at once where there are such."""
    if len(documents) == 1 and not any(map(takes_many, filters)):
        return [run_filters(filters, documents[0])]
    results: list[Document | Removed] = list(documents)
    for each in filters:
        places = [place for place, one in enumerate(results) if isinstance(one, Document)]
        left = [one for one in results if isinstance(one, Document)]
        changed = each.filter_many(left) if takes_many(each) else map(each, left)
        for place, one in zip(places, changed, strict=True):
            results[place] = one
    return results
