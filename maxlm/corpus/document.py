"""A document on its way through the stages, and one that a stage removed."""

from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass
class Document:
    """`id`: "FILE#NUMBER", the file as it was given and the record's number in it. `metadata`: source, url, date, language, licence and
    scores, as far as they are known. `cuts`: what stages took out of its text in this pass, for the report; they are not stored.
    """

    id: str
    text: str
    metadata: dict[str, Value] = field(default_factory=dict)
    cuts: "tuple[Removed, ...]" = field(default=(), compare=False)


@dataclass(frozen=True)
class Removed:
    """A document, or parts of one, that `stage` left out for `reason`, a short fixed name that can be counted. `example`: text for a person
    to read, at most 300 characters; `detail`: figures or names behind the reason, such as `characters` that were cut.
    """

    id: str
    stage: str
    reason: str
    example: str = ""
    detail: dict[str, Value] = field(default_factory=dict)


def cut_text(document: Document, text: str, stage: str, reason: str, gone: str) -> Document:
    """The document with `text`, which `stage` left of its text; `gone`: what it took, of which the beginning is an example."""
    cut = Removed(document.id, stage, reason, gone[:300], {"characters": len(document.text) - len(text)})
    return Document(document.id, text, document.metadata, (*document.cuts, cut))
