"""Special tokens around texts, as the files of a published tokenizer state them."""

from collections.abc import Iterable
from pathlib import Path

from maxlm.data.template_files import published_opening
from maxlm.data.text_frame import TextFrame
from maxlm.data.tokenizer import Tokenizer
from maxlm.interop.published_files import GENERATION, ends_of, object_or_none


def published_frame(folder: Path, tokenizer: Tokenizer, ends: Iterable[int]) -> TextFrame:
    """The frame of the model with the files in `folder`. `ends`: ids that config.json names.

    Raises UserError for a file that is no JSON, or names an end of texts by no number.
    """
    said, generation = (object_or_none(folder / name) or {} for name in ("tokenizer_config.json", GENERATION))
    bos = said.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    prefix = tokenizer.ids.get(bos) if isinstance(bos, str) else None
    every = {*ends, *ends_of(generation, folder / GENERATION)}
    known = {token for token in every if 0 <= token < tokenizer.vocab_size}
    return TextFrame(published_opening(tokenizer.text, said), prefix, tuple(sorted(known - {tokenizer.end_of_document_id})))
