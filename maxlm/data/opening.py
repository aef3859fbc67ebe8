"""Tokens that open every text of the model that a tokenizer belongs to, for plain texts that it is fine-tuned on."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Bpe

from maxlm.data import manifest
from maxlm.data.readers import fields_of
from maxlm.data.text_frame import TextFrame
from maxlm.data.tokenizer import load_tokenizer, read_if_present


def opening_of(path: str, end_of_document: str) -> tuple[int, ...]:
    """Ids before every text of the model with the tokenizer.json at `path`, local or a URL: those that the model's tokenizer folder records
    beside it, else what the files of a published tokenizer say. Raises UserError for a file that is not what its name says.
    """
    folder = path.rpartition("/")[0] or "."

    def beside(name: str) -> dict[str, Any] | None:
        content = read_if_present(f"{folder}/{name}")
        return None if content is None else fields_of(content, f"{folder}/{name}")

    recorded = beside(manifest.MANIFEST)
    if recorded is not None:
        return TextFrame.of(recorded.get("settings", {})).opening
    return published_opening(load_tokenizer(path, end_of_document).text, beside("tokenizer_config.json") or {})


def published_opening(text: str, said: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that the post-processor of a tokenizer.json (`text`) puts before a text, unless `add_bos_token` of tokenizer_config.json (`said`)
    says otherwise, as in the Hugging Face library.
    """
    bpe = Bpe.from_str(text)
    plain, whole = (bpe.encode("a", add_special_tokens=added).ids for added in (False, True))
    places = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    opening = tuple(whole[: places[0]]) if places else ()
    bos = said.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    prefix = bpe.token_to_id(bos) if isinstance(bos, str) else None
    if said.get("add_bos_token") is False:
        return ()
    return (prefix,) if said.get("add_bos_token") is True and not opening and prefix is not None else opening
