"""Special tokens around the texts of a model, as it was trained with them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.data import manifest

FRAME = "frame"  # in `settings` of the manifest in the tokenizer folder of a model, and of no token store


class TextFrame(NamedTuple):
    """Ids around texts. Token stores have none but the end of a document, and so has a run that was trained on them from the beginning."""

    opening: tuple[int, ...] = ()  # before every text
    prefix: int | None = None  # before a text that nothing precedes; None: the end of a document
    ends: tuple[int, ...] = ()  # further ones that end a text, such as the end of a turn

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "TextFrame":
        """Read the frame that `settings` of a manifest record."""
        values = settings.get(FRAME, {})
        return cls(tuple(values.get("opening", ())), values.get("prefix"), tuple(values.get("ends", ())))

    def to_json(self) -> dict[str, Any]:
        """Return the value that `from_settings` reads."""
        return {"opening": list(self.opening), "prefix": self.prefix, "ends": list(self.ends)}


def started_frame(source: Path | None, own: Path, end: int, *, goes_on: bool, turns: Collection[int] = ()) -> TextFrame:
    """The frame of a run with the tokenizer folder `own` on data with documents that end with `end`, that starts from the model with the
    tokenizer in `source`: the model's, or as recorded where that is gone; of a run that starts from none, the frame of token stores.

    `goes_on`: from a checkpoint of its own, so that what is recorded holds though its config names no source any more. The end of a
    document of the model still ends texts where the data has another one, and so do `turns`, which end turns in the data.
    """
    info = None if source is None else manifest.load(str(source))
    if info is None and (source is not None or goes_on):
        info = manifest.load(str(own))
    if info is None:
        return TextFrame(ends=tuple(sorted({*turns} - {end})))
    frame = TextFrame.from_settings(info.settings)
    return frame._replace(ends=tuple(sorted({*frame.ends, *turns, info.end_of_document_id} - {end})))
