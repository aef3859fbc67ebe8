"""Documents between stages, removed documents, and the tags of stages that remove nothing."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

Value = str | int | float | bool
VERDICT, PASSED = "verdict", "passed"


@dataclass
class Document:
    """`id`: "FILE#NUMBER", the file as it was given and the record's number in it. `metadata`: source, url, date, language, licence and
    scores, as far as they are known. `cuts`: what stages took out of its text in this pass, or tagged it for, for the report; they are
    not stored.
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


class Tagged(Removed):
    """A document that stays, with a tag that says why a stage would have removed it."""


def tag(before: Document, result: Document | Removed, stage: str) -> Document:
    """The document with the verdict of `stage` in its metadata: STAGE.verdict is "passed" or the reason for which the stage would remove
    it. Then its text stays as it was `before`, and the figures behind the reason are STAGE.limit, STAGE.value and so on.
    """
    if isinstance(result, Document):
        return Document(result.id, result.text, {**result.metadata, f"{stage}.{VERDICT}": PASSED}, result.cuts)
    found = {f"{stage}.{name}": value for name, value in {**result.detail, VERDICT: result.reason}.items()}
    return Document(before.id, before.text, {**before.metadata, **found}, (*before.cuts, Tagged(**vars(result))))


def is_tagged(document: Document, stages: Collection[str]) -> bool:
    """True if one of `stages` would have removed it."""
    return any(document.metadata.get(f"{stage}.{VERDICT}", PASSED) != PASSED for stage in stages)


def cut_text(document: Document, text: str, stage: str, reason: str, gone: str) -> Document:
    """The document with `text`, which `stage` left of its text; `gone`: what it took, of which the beginning is an example."""
    cut = Removed(document.id, stage, reason, gone[:300], {"characters": len(document.text) - len(text)})
    return Document(document.id, text, document.metadata, (*document.cuts, cut))


def groups(documents: Iterable[Document], characters: int, each: int = 0, rows: int | None = None) -> Iterator[list[Document]]:
    """Documents in lists that end where they hold more than `characters`, or `rows` documents. `each`: characters added for a document."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text) + each
        if len(group) == rows or size > characters:
            yield group
            group, size = [], 0
    if group:
        yield group
