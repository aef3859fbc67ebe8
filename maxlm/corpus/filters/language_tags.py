"""Language tags of documents in the form of settings: the HTML attribute lang has BCP 47 (en-US), WET files have ISO 639-3 (eng)."""

import tomllib
import unicodedata
from importlib.resources import files
from typing import Any

_LISTS: dict[str, Any] = tomllib.loads(files(__package__).joinpath("languages.toml").read_text("utf-8"))
_CHINESE = ("Hans", "Hant")
# Characters of written Cantonese that texts in Mandarin do not have, in either script.
_CANTONESE = frozenset("嘅咗喺唔佢哋嚟冇啲嗰嘢噉咁乜㗎喎嘥咩啱搵諗")
_CANTONESE_SHARE = 0.02  # of the Chinese characters; in messages of MediaWiki it is 0 in zh, and 0.03 to 0.18 in yue from 60 characters
_WORDS = f"{_LISTS['codes']} {_LISTS['bibliographic']} {_LISTS['members']}".split()
_TWO_LETTERS = dict(zip(_WORDS[1::2], _WORDS[::2], strict=True))


def primary_language(tag: str) -> str:
    """The language of a tag without region and script, as ISO 639-1 where that has a code: en-US, eng -> en; zh_Hant -> zh; sco."""
    language = tag.replace("_", "-").partition("-")[0].strip().lower()
    return _TWO_LETTERS.get(language, language)


def covered(tag: str) -> tuple[frozenset[str], str | None]:
    """Labels that a tag of `keep` covers, and the script that it asks for: zh -> zh, yue, wuu ...; sr-Latn -> sr in Latin letters.

    Raises ValueError: a tag with a part that no identifier tells, such as a region.
    """
    head, *parts = tag.replace("_", "-").split("-")
    script = parts[0].title() if parts else None
    if not head.isalpha() or not 2 <= len(head) <= 3:
        raise ValueError(f"keep: {tag!r} is no language tag; give codes of ISO 639, such as en, zh or sr-Latn")
    if len(parts) > 1 or (script is not None and script not in (*_LISTS["scripts"], *_CHINESE)):
        known = ", ".join(sorted((*_LISTS["scripts"], *_CHINESE)))
        raise ValueError(
            f"keep: {tag!r}: variants and regions of a language are not told apart; give {head}, or {head}- and a script ({known})"
        )
    language = primary_language(head)
    return frozenset((language, *_LISTS["covered"].get(language, "").split())), script


def label_of(label: str, text: str) -> str:
    """The language of `text`, which an identifier labelled `label`, in the form of settings. Cantonese is told by its own characters alone:
    identifiers take Chinese in traditional characters for it.
    """
    language = primary_language(label)
    if language not in ("zh", "yue"):
        return language
    chinese = sum("\u3400" <= char <= "\u9fff" for char in text)
    return "yue" if sum(map(_CANTONESE.__contains__, text)) >= max(1, _CANTONESE_SHARE * chinese) else "zh"


def has_script(text: str, script: str) -> bool:
    """True if most letters of `text` are of `script` (ISO 15924); for Hans and Hant, of the characters that only one of both has."""
    if script in _CHINESE:
        simple, traditional = (
            sum(_encodes(char, codec) > _encodes(char, other) for char in text) for codec, other in (_GB_BIG5, _GB_BIG5[::-1])
        )
        return simple >= traditional if script == "Hans" else traditional > simple
    letters = [char for char in text if char.isalpha()]
    return 2 * sum(unicodedata.name(char, "").startswith(_LISTS["scripts"][script]) for char in letters) > len(letters)


_GB_BIG5 = ("gb2312", "big5")  # the national character sets: of simplified and of traditional characters


def _encodes(char: str, codec: str) -> bool:
    try:
        return bool(char.encode(codec))
    except UnicodeEncodeError:
        return False
