"""Real text written in the encodings of its language, declared rightly, wrongly or not at all: does it come out as it was written?"""

import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from corpora.quality import Messages, Row
from maxlm.documents.text import decode

WESTERN = "de fr es it pt pt-br nl da sv fi nb nn is ca eu gl"
WEB = {  # encodings that pages of today state (WHATWG Encoding), by locale of MediaWiki
    **dict.fromkeys(["cs", "pl", "hu", "sk", "sl", "hr", "ro"], ("cp1250", "iso8859-2")),
    **dict.fromkeys(WESTERN.split(), ("cp1252", "iso8859-15")),
    **{"ru": ("cp1251", "koi8-r", "iso8859-5"), "uk": ("cp1251", "koi8-u"), "be": ("cp1251",)},
    **dict.fromkeys(["bg", "mk", "sr-ec"], ("cp1251", "iso8859-5")),
    **{"el": ("iso8859-7", "cp1253"), "tr": ("cp1254",), "he": ("cp1255", "iso8859-8"), "ar": ("cp1256", "iso8859-6"), "fa": ("cp1256",)},
    **{"th": ("cp874",), "lt": ("cp1257", "iso8859-13", "iso8859-4"), "lv": ("cp1257", "iso8859-13"), "et": ("cp1257",)},
    **{"ja": ("cp932", "euc_jp", "iso2022_jp"), "ko": ("cp949",), "zh-hans": ("gb18030", "gbk"), "zh-hant": ("cp950",)},
    "yue": ("big5hkscs",),
}
OLD = {"ru": ("cp866", "mac-cyrillic"), "ko": ("iso2022_kr",), **dict.fromkeys(WESTERN.split(), ("cp850", "mac-roman"))}
SIZES = (60, 200, 600, 2500)
EACH = 3  # texts of a locale, encoding and size
Case = tuple[str, str, bytes]  # encoding, text, bytes


def measure(folder: Path, seed: int) -> Iterator[Row]:
    """Rows: undeclared by kind and length, then pages by how they are declared."""
    draw, messages = random.Random(seed), Messages(folder)
    web = {size: _cases(messages, WEB, size, draw) for size in SIZES}
    every = [one for some in web.values() for one in some]
    for size, some in web.items():
        yield _row(f"not declared, encodings of the web, {size} characters", some, [()] * len(some), 0.97)
    for encoding in ("iso2022_jp", "cp866", "mac-cyrillic"):
        some = [
            one
            for size in SIZES
            for one in _cases(messages, {**WEB, **OLD}, size, draw) + _cases(messages, OLD, size, draw)
            if one[0] == encoding
        ]
        yield _row(f"not declared, {encoding}", some, [()] * len(some), 0.9)
    western = [one for size in SIZES for one in _cases(messages, OLD, size, draw) if one[0] in ("cp850", "mac-roman")]
    yield _row("not declared, cp850 and mac-roman", western, [()] * len(western))
    yield _row("declared rightly", every, [(one[0],) for one in every], 0.99)
    yield _row("declared utf-8, and is not", every, [("utf-8",)] * len(every), 0.97)
    yield _row("declared iso-8859-1, by a server's default", every, [("iso-8859-1",)] * len(every), 0.95)
    wrong = [(draw.choice([name for name in ("windows-1251", "shift_jis", "windows-1252", "koi8-r") if name != one[0]]),) for one in every]
    yield _row("declared as another encoding", every, wrong, 0.9)
    yield _row("header utf-8, meta right", every, [("utf-8", one[0]) for one in every], 0.99)
    yield _row("header right, meta utf-8", every, [(one[0], "utf-8") for one in every], 0.99)


def _cases(messages: Messages, encodings: Mapping[str, Sequence[str]], size: int, draw: random.Random) -> list[Case]:
    """Texts that an encoding has all characters of but for a few, which are left out, and that are not ASCII."""
    found = []
    for locale, names in encodings.items():
        for encoding in names:
            for _ in range(EACH):
                whole = unicodedata.normalize("NFC", messages.text(locale, size, draw))
                data = whole.encode(encoding, "ignore")
                text = data.decode(encoding)
                if len(text) >= 0.97 * len(whole) and not text.isascii():
                    found.append((encoding, text, data))
    return found


def _row(name: str, cases: Sequence[Case], declared: Sequence[Sequence[str]], asked: float | None = None) -> Row:
    """Decode bytes with what HTTP's header and <meta> state for them, and compare."""
    good = 0
    for (_, text, data), stated in zip(cases, declared, strict=True):
        decoded = decode(data, *stated)
        good += decoded is not None and decoded.text == text
    return Row(name, len(cases), good, len(cases) - good, asked=asked)
