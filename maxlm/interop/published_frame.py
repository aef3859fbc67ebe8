"""Special tokens around texts, as the files of a published tokenizer state them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Bpe

from maxlm.config.errors import UserError
from maxlm.data.text_frame import TextFrame
from maxlm.data.tokenizer import Tokenizer


def published_frame(folder: Path, tokenizer: Tokenizer, ends: Iterable[Any]) -> TextFrame:
    """The frame of the model with the files in `folder`. `ends`: ids that config.json names.

    What opens a text is said by the post-processor of tokenizer.json, unless `add_bos_token` of tokenizer_config.json says otherwise, as in
    the Hugging Face library. Raises UserError for a file that is no JSON.
    """
    said, generation = (_object(folder / name) for name in ("tokenizer_config.json", "generation_config.json"))
    bos = said.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    prefix = tokenizer.ids.get(bos) if isinstance(bos, str) else None
    opening = _opening(tokenizer)
    if said.get("add_bos_token") is False:
        opening = ()
    elif said.get("add_bos_token") is True and not opening and prefix is not None:
        opening = (prefix,)
    more = generation.get("eos_token_id")
    every = {*ends, *(more if isinstance(more, list) else [more])}
    known = {token for token in every if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < tokenizer.vocab_size}
    return TextFrame(opening, prefix, tuple(sorted(known - {tokenizer.end_of_document_id})))


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor puts before a text."""
    bpe = Bpe.from_str(tokenizer.text)
    plain, whole = (bpe.encode("a", add_special_tokens=added).ids for added in (False, True))
    places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    return tuple(whole[: places[0]]) if places else ()


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; {} if there is none."""
    try:
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON: {str(error).splitlines()[0]}.") from None
    return values if isinstance(values, dict) else {}
