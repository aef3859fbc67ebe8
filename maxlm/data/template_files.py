"""Files of a tokenizer's folder, read as the Hugging Face library does: its chat template, and the tokens that open every text."""

from collections.abc import Mapping
from datetime import date as Date
from typing import Any

from tokenizers import Tokenizer as Bpe

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.sections.prepare import ChatConfig, PreferencesConfig, PromptResponseConfig
from maxlm.data import manifest
from maxlm.data.chat_template import ChatTemplate
from maxlm.data.manifest import TEMPLATE, TOOL_TEMPLATE
from maxlm.data.messages import FIELD, RESERVED
from maxlm.data.sources import fields_of, text_of
from maxlm.data.text_frame import TextFrame
from maxlm.data.tokenizer import load_tokenizer, read_if_present


def template_of_config(config: PromptResponseConfig | ChatConfig | PreferencesConfig, files: dict[str, bytes]) -> ChatTemplate | None:
    """The chat template that `config` names, or the one among the tokenizer's `files`; None if neither exists.

    Raises UserError: none is found for kind: chat, or the files are no JSON or no text.
    """
    if isinstance(config, PromptResponseConfig):
        return None
    if config.date is not None and not _is_day(config.date):
        raise ConfigError(f"{FIELD}.date", config.date, "is no day", "write it as 2026-01-31")
    arguments = config.chat_template_kwargs
    if reserved := [name for name in arguments if name in RESERVED]:
        raise ConfigError(f"{FIELD}.chat_template_kwargs", reserved[0], "is given to the template with every row", "choose another name")
    template = find_template(with_template(files, template_file(config)), date=config.date, arguments=arguments)
    if template is None and isinstance(config, ChatConfig):
        raise UserError(
            f"the tokenizer has no chat template: neither {TEMPLATE} nor tokenizer_config.json in its folder holds one; "
            f"set {FIELD}.template to a file, or use {FIELD}.kind=prompt_response."
        )
    return template


def template_file(config: ChatConfig | PreferencesConfig) -> bytes | None:
    """The content of the template file that `config` names, if it names one. Raises ConfigError: there is none."""
    if config.template is None:
        return None
    content = read_if_present(config.template)
    if content is None:
        raise ConfigError(f"{FIELD}.template", config.template, "does not exist", "name a jinja file")
    return content


def with_template(files: dict[str, bytes], template: bytes | None) -> dict[str, bytes]:
    """The files of a tokenizer with another chat template, which takes the place of all templates in them."""
    if template is None:
        return files
    return {**{name: content for name, content in files.items() if name != TOOL_TEMPLATE}, TEMPLATE: template}


def find_template(files: Mapping[str, bytes], *, date: str | None, arguments: dict[str, Any]) -> ChatTemplate | None:
    """The chat template among the `files` of a tokenizer. A template file comes before templates of tokenizer_config.json; of several
    templates there, the default, and `tool_use` for conversations with tools.
    """
    settings = {name: fields_of(files[name], name) for name in ("special_tokens_map.json", "tokenizer_config.json") if name in files}
    stated = settings.get("tokenizer_config.json", {}).get("chat_template")
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
    named = stated if isinstance(stated, dict) else {"default": stated}
    places = {"default": TEMPLATE, "tool_use": TOOL_TEMPLATE}
    if any(file in files for file in places.values()):
        named = {name: text_of(files[file], file) for name, file in places.items() if file in files}
    source, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    tokens: dict[str, Any] = {}
    for values in settings.values():
        tokens |= {name: _token(value) for name, value in values.items() if name.endswith("_token") and _token(value) is not None}
    return ChatTemplate(source, tokens, date, tool_use if isinstance(tool_use, str) else None, arguments or None)


def _is_day(text: str) -> bool:
    """True for a calendar day written as YYYY-MM-DD."""
    try:
        return Date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _token(value: Any) -> str | None:
    """A special token as text; newer files hold an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def opening_of(path: str, end_of_document: str) -> tuple[int, ...]:
    """Ids before every text of the model with the tokenizer.json at `path`, local or a URL: the ids that the model's tokenizer folder
    records, else as the files of a published tokenizer say. Raises UserError for a file of another kind than its name says.
    """
    folder = path.rpartition("/")[0] or "."

    def read_json(name: str) -> dict[str, Any] | None:
        content = read_if_present(f"{folder}/{name}")
        return None if content is None else fields_of(content, f"{folder}/{name}")

    recorded = read_json(manifest.MANIFEST)
    if recorded is not None:
        return TextFrame.from_settings(recorded.get("settings", {})).opening
    return published_opening(load_tokenizer(path, end_of_document).text, read_json("tokenizer_config.json") or {})


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
