"""Documents of raw files for a corpus: texts normalised, and a Removed for each record that gives none, so that it is counted."""

from collections.abc import Callable, Iterator

from maxlm.corpus.document import Document, Removed
from maxlm.documents.columns import scalars
from maxlm.documents.reader import records
from maxlm.documents.records import DEFAULTS, EXAMPLE, Defect, ReadSettings, Record, Wanted, defect
from maxlm.documents.text import decode, is_blank, normalise, problem_of

STAGE = "read"


def read(
    path: str, settings: ReadSettings = DEFAULTS, tell: Callable[[int], None] | None = None, *, text_field: str | None = None
) -> Iterator[Document | Removed]:
    """Documents of a file or URL, in order, and a Removed for each record that is none and for the rest of a file that cannot be read.

    `text_field`: instead of `settings.text_field`; `tell`: as for `records`. Raises as `records` does.
    """
    wanted = Wanted(text_field or settings.text_field, settings)
    for found in records(path, wanted, tell):
        id = f"{path}#{found.number}" if found.number else path
        one = found if isinstance(found, Defect) else _document(id, found, str(wanted.text_field))
        yield one if isinstance(one, Document) else Removed(id, STAGE, one.reason, one.example, dict(one.detail))


def _document(id: str, record: Record, text_field: str) -> Document | Defect:
    """The document of a record, its text normalised. Adds to the metadata what was wrong with the text and is mended."""
    metadata = scalars(record.fields, {text_field}, lambda text: text if text.isascii() and text.isprintable() else normalise(text))
    text, encoding = record.text, record.encoding
    if isinstance(text, bytes):
        decoded = decode(text, encoding)
        if decoded is None:
            return _defect(record, "encoding", text[:EXAMPLE].decode("latin-1"))
        text, encoding = decoded.text, decoded.encoding if decoded.encoding != "utf-8" else None
    assert text is not None, "a text is asked for"
    if encoding is not None:
        metadata["encoding"] = encoding
    clean = normalise(text)
    if clean is not text and (problem := problem_of(text)) == "binary":  # normalise returns the very object where nothing is wrong
        return _defect(record, problem, text[:EXAMPLE])
    if is_blank(text) or is_blank(clean):
        return _defect(record, "empty")
    if not clean.isascii() and (wrong := clean.count("\ufffd")):
        if problem_of(clean) is not None:
            return _defect(record, "encoding", clean[:EXAMPLE])
        metadata["replaced_characters"] = wrong
    return Document(id, clean, metadata)


def _defect(record: Record, reason: str, example: str = "") -> Defect:
    return defect(record.number, record.unit, reason, example)
