"""Files of an export other than the weights: config.json, generation_config.json and the tokenizer. They describe the model as it is now
and otherwise restate the published files.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from maxlm.data.manifest import SETTINGS, TEMPLATE
from maxlm.interop.published_files import CONFIG, GENERATION, TOKENIZER_FILES, Json, copy_further_files, object_or_none, write_object
from maxlm.training.saved_run import PUBLISHED, TOKENIZER, SavedRun

_MAP = "special_tokens_map.json"
_BOS, _EOS = "bos_token_id", "eos_token_id"
_DTYPES = ("dtype", "torch_dtype")  # the second is of older files


def with_format(config: Json, dtype: str, quantization: Json | None, *, stated: bool) -> Json:
    """config.json with the number format of the weights. `stated`: name it though the file did not."""
    named = [key for key in _DTYPES if config.get(key) is not None] or (["dtype"] if stated else [])
    config = config | dict.fromkeys(named, dtype)
    if quantization is not None:
        return config | {"quantization_config": quantization}
    return {key: value for key, value in config.items() if key != "quantization_config" or value is None}


def write_files(saved: SavedRun, config: Json, folder: Path) -> None:
    """Write config.json, generation_config.json and the files of the tokenizer into the export `folder`.

    A model as it was imported has the files of its source. After training, `eos_token_id` holds the end of a document and all that ended
    texts and turns. Raises UserError for a file that is no JSON.
    """
    published, tokenizer, as_imported = saved.directory / PUBLISHED, saved.tokenizer, _is_as_imported(saved)
    write_tokenizer(saved, folder)
    sources = (place / GENERATION for place in (published, saved.directory / TOKENIZER))
    source = next((file for file in sources if file.is_file()), None)
    generation = None if source is None else object_or_none(source)
    if tokenizer is not None and not as_imported:
        ends = list(dict.fromkeys([tokenizer.end_of_document_id, *tokenizer.frame.ends]))
        config = _ended(config, ends)
        if config.get(_BOS) is None and tokenizer.frame.prefix is not None and not (published / CONFIG).is_file():
            config = config | {_BOS: tokenizer.frame.prefix}
        generation = None if generation is None else _ended(generation, ends)
    if generation is None and not as_imported:
        generation = {name: config[name] for name in (_BOS, _EOS) if config.get(name) is not None}
    write_object(folder / CONFIG, config, published / CONFIG)
    if generation is not None:
        write_object(folder / GENERATION, generation, source)


def _ended(values: Json, ends: list[int]) -> Json:
    """`values` with these ends of texts, unchanged if it names the same."""
    stated = values.get(_EOS)
    same = sorted(stated if isinstance(stated, list) else [stated], key=str) == sorted(ends, key=str)
    return values if same else values | {_EOS: ends if len(ends) > 1 else ends[0]}


def _is_as_imported(saved: SavedRun) -> bool:
    return saved.untrained and (saved.directory / PUBLISHED / CONFIG).is_file()


def write_tokenizer(saved: SavedRun, folder: Path) -> None:
    """Copy the files of the tokenizer, and correct the ones that name another end of document."""
    source, known = saved.directory / TOKENIZER, saved.tokenizer
    for name in TOKENIZER_FILES:
        if name != GENERATION and (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    copy_further_files(saved.directory / PUBLISHED, folder)
    if known is None or _is_as_imported(saved):
        return
    if not (folder / SETTINGS).is_file():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": known.end_of_document, "clean_up_tokenization_spaces": False}
        write_object(folder / SETTINGS, settings)
    for name in () if _template_reads_end(source) else (SETTINGS, _MAP):
        said: dict[str, Any] | None = object_or_none(source / name)
        if said is not None:
            stated = said.get("eos_token")
            if (stated.get("content") if isinstance(stated, dict) else stated) != known.end_of_document:
                write_object(folder / name, said | {"eos_token": known.end_of_document}, source / name)


def _template_reads_end(source: Path) -> bool:
    """True if the chat template writes `eos_token`: then that token stays as in the conversations of training."""
    named, alone = (object_or_none(source / SETTINGS) or {}).get("chat_template"), source / TEMPLATE
    return "eos_token" in json.dumps(named) or (alone.is_file() and "eos_token" in alone.read_text(encoding="utf-8", errors="replace"))
