"""Files of a published model other than its weights: stored with the checkpoint by an import, and restated by an export.

An export describes the model as it is now (config.json, generation_config.json, the tokenizer) and otherwise restates the files that
training has not changed.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from maxlm.base.errors import UserError, shorten
from maxlm.base.paths import read_file
from maxlm.data import manifest
from maxlm.data.manifest import SETTINGS, TEMPLATE
from maxlm.training.saved_run import PUBLISHED, TOKENIZER, SavedRun

CONFIG, GENERATION = "config.json", "generation_config.json"  # as transformers names them
TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (manifest.TOKENIZER, *manifest.COMPANIONS)
# Further files of a tokenizer, of older versions of the library. They repeat tokenizer.json, and go with an equal one only.
_OLDER = (
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("tiktoken.model", "tekken.json", "chat_template.json", "preprocessor_config.json"),
)
_DIGEST = "tokenizer.json.sha256"
_MAX_JSON, _MAX_BYTES = 64 << 20, 1 << 30
_TEMPLATE = re.compile(r"[A-Za-z0-9][\w.-]{0,80}\.jinja", re.ASCII)
Json = dict[str, Any]


def keep_files(source: Path, config: Path, folder: Path) -> None:
    """Copy the files of the published model in `source`, with `config` as its config.json, into the new `folder`."""
    folder.mkdir()
    shutil.copyfile(config, folder / CONFIG)
    alone = not (source / manifest.TOKENIZER).is_file()  # without a tokenizer that can be read here
    for name in (GENERATION, *_OLDER, *(manifest.COMPANIONS if alone else ())):
        file = source / name
        if file.is_file() and file.stat().st_size <= _MAX_BYTES and "/" not in name:
            shutil.copyfile(file, folder / name)
    _copy_templates(source, folder)
    if not alone:
        (folder / _DIGEST).write_text(_digest(source / manifest.TOKENIZER), encoding="utf-8")


def copy_further_files(published: Path, folder: Path) -> None:
    """Copy the further files of the tokenizer into the export `folder`, if its tokenizer.json is the published one, or neither has one."""
    known, here = published / _DIGEST, folder / manifest.TOKENIZER
    if (known.read_text(encoding="utf-8", errors="replace") if known.is_file() else None) != (_digest(here) if here.is_file() else None):
        return
    alone, tools = not known.is_file(), manifest.TOOL_TEMPLATE
    for name in (*_OLDER, *(manifest.COMPANIONS if alone else ())):
        if (published / name).is_file() and "/" not in name:
            shutil.copyfile(published / name, folder / name)
    if alone or (folder / tools).is_file() or not (published / tools).is_file():  # else the run was trained with another template
        _copy_templates(published, folder)


def _digest(file: Path) -> str:
    return hashlib.sha256(read_file(file, _MAX_BYTES)).hexdigest()


def _copy_templates(source: Path, folder: Path) -> None:
    for template in sorted((source / TEMPLATES).glob("*.jinja")) if (source / TEMPLATES).is_dir() else ():
        if _TEMPLATE.fullmatch(template.name) and template.is_file() and template.stat().st_size <= _MAX_JSON:
            (folder / TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / TEMPLATES / template.name)


def read_object(path: Path) -> Json:
    """The JSON object in a file. Raises UserError, FileNotFoundError."""
    content = read_file(path, _MAX_JSON)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {str(error).splitlines()[0]}.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object.")
    return values


def ends_of(values: Json, path: Path) -> list[int]:
    """Ids of tokens that end texts, from `eos_token_id` of a JSON object. Raises UserError naming the file for anything else."""
    stated = values.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(type(end) is not int for end in ends):
        raise UserError(f"{path}: eos_token_id = {shorten(repr(stated))} must be the id of a token, or a list of ids.")
    return ends


def object_or_none(path: Path) -> Json | None:
    """The JSON object in a file; None if there is none. Raises UserError."""
    return read_object(path) if path.exists() else None


def write_object(path: Path, values: Json, source: Path | None = None) -> None:
    """Write a JSON object. Copies `source` if it holds an equal object; else keeps its indentation."""
    if source is None or not source.is_file():
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return
    content = source.read_bytes()
    text = content.decode(json.detect_encoding(content), "surrogatepass")  # as json.loads reads bytes
    if list(json.loads(text).items()) == list(values.items()):
        shutil.copyfile(source, path)
        return
    indent = re.match(r"\s*\{\r?\n( +)", text)
    end = "\n" if text.endswith("\n") else ""
    escaped = text.isascii() or any("\ud800" <= char <= "\udfff" for char in json.dumps(values, ensure_ascii=False))
    path.write_text(json.dumps(values, indent=len(indent[1]) if indent else None, ensure_ascii=escaped) + end, encoding="utf-8")


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
