"""Text of bytes in any encoding, and its normal form."""

import codecs
import importlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from maxlm.base.errors import UserError
from maxlm.base.installing import install_command

UTF8_SHARE = 4  # valid characters per wrong byte from which damaged UTF-8 is likelier than another encoding
PIECE = 16384  # characters that are normalised at once, up to the next line feed
SAMPLE = 65536  # bytes that an encoding is detected from
BINARY_SHARE = 0.02  # of characters that are controls, above which a record is no text
REPLACED_SHARE = 0.05  # of characters that are U+FFFD, above which a record is unreadable

_HIGH = bytes(range(128, 256))
_REPLACEMENT = "\ufffd"
_NO_CHARSETS = ("utf-7", "idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined")
_CONTROL_BYTES = bytes(set(range(32)) - {9, 10}) + b"\x7f"
_NO_TEXT = bytes(set(_CONTROL_BYTES) - set(b"\b\v\f\r\x1b"))
_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be"))
_BOMS_16 = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))

# C1 controls, line and paragraph separators, the deprecated format characters U+206A to U+206F, the byte order mark, interlinear
# annotations (both sets as in ftfy's remove_control_chars) and surrogates.
_RARE = re.compile("[\x80-\x9f\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff]")
_DELETED = dict.fromkeys([*(set(range(32)) - {9, 10}), 0x7F, *range(0x80, 0xA0), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD)])
# A C1 control is a byte of Windows-1252 taken for Latin-1 (WHATWG Encoding, "windows-1252"), NEL among them.
_C1 = {code: bytes([code]).decode("cp1252") for code in range(0x80, 0xA0) if code not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)}
_SHOWN = re.compile(f"[^\\s{re.escape(''.join(chr(code) for code in _DELETED if code not in _C1))}]")
_C1_SIGN = re.compile("[\x80-\x9f]")
_TERMINAL = re.compile("\x1b\\[[0-9;?]*[A-Za-z]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)")
_OVERSTRIKE = re.compile("[^\n\b]\b")  # how formatted manual pages print bold and underlined text
# Of short texts chardet often takes an accent for a Cyrillic or Hebrew letter. Latin scripts are told by ASCII letters next to other bytes:
# then encodings of one byte a letter for other scripts are out.
_ASCII_TAG = re.compile(rb"<[^<>\x80-\xff]{0,1000}>")
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_LATIN_WORD = re.compile(rb"[A-Za-z][\x80-\xff]+|[\x80-\xff]+[A-Za-z]")
_OTHER_SCRIPTS = {*(f"cp{page}" for page in (866, 874, 1251, 1253, 1255, 1256)), *(f"iso8859-{part}" for part in (5, 6, 7, 8))}
_OTHER_SCRIPTS |= {"koi8-r", "koi8-u", "mac-cyrillic"}
# Encodings of DOS and old Macintoshes that occur in texts, and the fewest bytes beyond ASCII from which they are detected.
_OLD = re.compile(r"cp(?!874)[1-8]\d\d|cp1006|cp1125|mac-.*|kz1048|ptcp154|koi8-t|hp-roman8")
_OLD_FOUND = ("cp437", "cp850", "cp852", "cp857", "cp858", "cp866", "mac-roman", "mac-latin2", "mac-cyrillic")
OLD_BYTES = 3
# Capital letters of one of these are small letters of the other, and texts in capitals are taken for it: the letters decide, not case.
_CYRILLIC = ("cp1251", "koi8-r", "koi8-u", "cp866", "iso8859-5", "mac-cyrillic")
_FREQUENT = "оаеинтрсвлкі"  # three quarters of the letters of Russian, Ukrainian, Bulgarian and Belarusian texts
# Encodings by the names of smaller ones, which pages state for them (WHATWG Encoding, "Names and labels").
_WIDER = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874", "big5": "cp950"}
_WIDER |= {"shift_jis": "cp932", "euc_kr": "cp949", "gb2312": "gb18030", "gbk": "gb18030", "iso2022_jp": "iso2022_jp_ext"}
_ESCAPED = {b"\x1b$)C": "iso2022_kr", b"\x1b$@": "iso2022_jp_ext", b"\x1b$B": "iso2022_jp_ext", b"\x1b$(": "iso2022_jp_ext"}
_SEVEN_BITS = ("iso2022_jp_ext", "iso2022_kr", "hz")
TIE = 0.999  # of the likeliest encoding's confidence, from which Windows-1252 is taken
DOUBT = 0.15  # confidence of the likeliest encoding up to which a short text tells little: Windows-1252 is taken if it is about as likely
SURE = 0.65  # of the likeliest encoding's confidence, which a stated encoding has where it is the right one
_BREAKS = re.compile("\r\n?|[\x0b\x0c\u2028\u2029]")

# UTF-8 read as another encoding leaves a lead byte with a continuation byte after it, both as characters of that encoding. Clean text
# holds such a pair by chance only: the pairs decide which lines ftfy sees, which takes 50 to 500 times as long as these expressions.
_LATIN_TAIL = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
_CYRILLIC_TAIL = "".join(sorted({bytes([code]).decode("cp1251", "ignore") for code in range(0x80, 0xC0)}))
_LATIN_MOJIBAKE = re.compile(f"[\u00c2-\u00f4][{_LATIN_TAIL}]")
_CYRILLIC_MOJIBAKE = re.compile(f"[РС][{re.escape(_CYRILLIC_TAIL)}][РС]")
_MAC_MOJIBAKE = re.compile("√[©†°§¶ß®™´¨≠ÆØ]|‚Ä")
_MOJIBAKE = (_LATIN_MOJIBAKE, _CYRILLIC_MOJIBAKE, _MAC_MOJIBAKE)
# Bytes in UTF-8 without which an expression cannot match. They begin with one byte, so that looking for them takes a tenth of the time.
_SIGNS: tuple[tuple[re.Pattern[str], tuple[re.Pattern[bytes], ...]], ...] = (
    (
        _RARE,
        (re.compile(rb"\xc2[\x80-\x9f]"), re.compile(rb"\xef(?:\xbb\xbf|\xbf[\xb9-\xbc])"), re.compile(rb"\xe2(?:\x80[\xa8\xa9]|\x81)")),
    ),
    (_LATIN_MOJIBAKE, (re.compile(rb"\xc3[\x82-\xb4][\xc2\xc5\xc6\xcb\xe2]"),)),
    (_CYRILLIC_MOJIBAKE, (re.compile(rb"\xd0[\xa0\xa1].{2,3}\xd0[\xa0\xa1]", re.DOTALL),)),
    (_MAC_MOJIBAKE, (re.compile(rb"\xe2(?:\x88\x9a|\x80\x9a)"),)),
)


def optional(module: str, what: str, package: str = "maxlm[corpus]") -> Any:
    """A module that `package` brings, by default the extra `corpus`. Raises UserError if it is not installed; `what`: needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0] if package == "maxlm[corpus]" else package
        command = install_command("corpus") if package == "maxlm[corpus]" else f"pip install {package}"
        raise UserError(f"{what} needs the package {name}, which is not installed: {command}.") from error


class Decoded(NamedTuple):
    """Text of bytes. `encoding`: a Python codec; `replaced`: bytes sequences that it could not decode, each now U+FFFD."""

    text: str
    encoding: str
    replaced: int


def bom_encoding(head: bytes) -> tuple[str, int] | None:
    """Encoding that a byte order mark states, and the mark's length in bytes."""
    return next(((encoding, len(mark)) for mark, encoding in (*_BOMS, *_BOMS_16) if head.startswith(mark)), None)


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by where the NUL bytes of `head` are: most characters of most texts are ASCII or share their upper byte."""
    head = head[: len(head) // 4 * 4]
    if len(head) < 8 or b"\0" not in head:
        return None
    shares = [head[start::4].count(0) * 4 / len(head) for start in range(4)]
    zeros = [share > 0.7 for share in shares]
    if sum(zeros) == 3 and (not zeros[0] or not zeros[3]):
        return "utf-32-le" if not zeros[0] else "utf-32-be"
    if max(shares[0], shares[2]) < 0.05 and min(shares[1], shares[3]) > 0.3:
        return "utf-16-le"
    if max(shares[1], shares[3]) < 0.05 and min(shares[0], shares[2]) > 0.3:
        return "utf-16-be"
    return None


def decode(data: bytes, *declared: str | None) -> Decoded | None:
    """Decode `data` of any encoding; None if none fits.

    In order: byte order mark; the escape sequences of ISO-2022; UTF-8; UTF-16 and UTF-32 by their NUL bytes; UTF-8 with a few wrong bytes;
    the first of `declared` (of an HTTP header, then of a <meta> tag) that chardet does not find unlikely; chardet's likeliest. One that
    fails on some bytes is left for the next. docs/lab/corpus.md has the shares of texts that come out as they were written.
    """
    marked = bom_encoding(data)
    if marked is not None:
        data = data[marked[1] :]
        if marked[0] != "utf-8":
            return _lossy(data, marked[0])
    stated = list(dict.fromkeys(codec for name in declared if (codec := _codec(name)) not in (None, "utf-8")))
    if data.isascii() and (seven := _seven_bits(data, stated)) is not None:
        return seven
    try:
        return Decoded(data.decode(), "utf-8", 0)
    except UnicodeDecodeError:
        pass
    wide = wide_encoding(data[:4096])
    if wide is not None:
        return _lossy(data, wide)
    lenient = _lossy(data, "utf-8")
    ascii_bytes = len(data.translate(None, _HIGH))
    if len(lenient.text) - ascii_bytes - lenient.replaced >= UTF8_SHARE * lenient.replaced:
        return lenient
    best = lenient
    for encoding in _candidates(data, stated):
        found = _lossy(data, encoding)
        best = found if found.replaced < best.replaced else best
        if not best.replaced:
            break
    return best if best.replaced <= REPLACED_SHARE * len(best.text) else None


def _seven_bits(data: bytes, stated: list[str]) -> Decoded | None:
    """Text in a seven-bit encoding, found by its escape sequences or stated; None for plain ASCII."""
    if b"\x1b$" not in data and (b"~{" not in data or "hz" not in stated):
        return None
    for encoding in [*(codec for sign, codec in _ESCAPED.items() if sign in data), *(one for one in stated if one in _SEVEN_BITS)]:
        found = _lossy(data, encoding)
        if found.replaced <= (REPLACED_SHARE * len(found.text) if encoding in stated else 0):
            return found
    return None


def normalise(text: str) -> str:
    """Normal form of a text: NFC, line breaks as \\n, no control characters but \\t and \\n, no lone surrogates, mojibake undone (ftfy).

    Terminal escapes and overstruck characters lose their control sequences, form feeds become line breaks, lone surrogates U+FFFD. Quotes,
    ligatures, full-width forms, HTML entities and spaces stay as they are. Idempotent.
    """
    if _is_normal(text):
        return text
    if len(text) > 2 * PIECE and "\x1b]" not in text:  # the one sequence that may hold line feeds
        return "".join(_settled(piece) for piece in _pieces(text))
    return _settled(text)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of whole lines, so that one character of millions does not cost a pass over all of them."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def _settled(text: str) -> str:
    for _ in range(8):  # what one pass uncovers (mojibake of mojibake) is for the next one; texts settle in two
        if _is_normal(text):
            break
        before, text = text, _pass(text)
        if text == before:
            break
    return text


def problem_of(text: str) -> str | None:
    """Reason why a text, normalised or as stored, makes no document: "empty", "binary" or "encoding"; None if it makes one."""
    if is_blank(text):
        return "empty"
    if not text.isprintable() and control_share(text) > BINARY_SHARE:
        return "binary"
    if not text.isascii() and text.count(_REPLACEMENT) > REPLACED_SHARE * len(text):
        return "encoding"
    return None


def is_blank(text: str) -> bool:
    """True if `text` has nothing but white space and signs that normalisation deletes, such as terminal escapes and byte order marks."""
    if not text or text.isspace():
        return True
    if "\x1b" in text or "\b" in text:
        text = _without_terminal_signs(text)
    return "\0" not in text and _SHOWN.search(text) is None  # NUL bytes are no text


def control_share(text: str) -> float:
    """Share of characters that are controls which no text file has: all of C0 but white space, escape and backspace."""
    data = text.encode("utf-8", "replace")
    return (len(data) - len(data.translate(None, _NO_TEXT))) / max(1, len(text))


def _is_normal(text: str) -> bool:
    """False if any pass may change `text`. 500 MB/s for ASCII."""
    try:
        data = text.encode()
    except UnicodeEncodeError:  # surrogates
        return False
    if len(data.translate(None, _CONTROL_BYTES)) != len(data):
        return False
    if len(data) == len(text):
        return True
    if any(any(sign.search(data) for sign in signs) and pattern.search(text) for pattern, signs in _SIGNS):
        return False
    return unicodedata.is_normalized("NFC", text)


def _pass(text: str) -> str:
    rare = _RARE.search(text) is not None
    if rare:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs of surrogates
    if "\r" in text or "\x0b" in text or "\x0c" in text or rare:
        text = _BREAKS.sub("\n", text)
    text = _without_terminal_signs(text)
    suspect = [] if text.isascii() else [pattern for pattern in _MOJIBAKE if pattern.search(text)]
    if suspect:
        repair = optional("ftfy", "text in a mistaken encoding").fix_encoding
        lines = text.split("\n")
        text = "\n".join(_BREAKS.sub("\n", repair(one)) if any(sign.search(one) for sign in suspect) else one for one in lines)
        rare = True
    if rare and _C1_SIGN.search(text):  # translate() takes fifty times as long
        text = text.translate(_C1)
    if rare or not text.isprintable():
        data = text.encode("utf-8")
        stripped = data.translate(None, _CONTROL_BYTES)
        text = text if len(stripped) == len(data) else stripped.decode()
        text = text.translate(_DELETED) if _RARE.search(text) else text
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def _without_terminal_signs(text: str) -> str:
    """`text` without terminal escapes and overstruck characters."""
    if "\x1b" in text:
        text = _TERMINAL.sub("", text)
    while "\b" in text and (struck := _OVERSTRIKE.sub("", text)) != text:
        text = struck
    return text


def _lossy(data: bytes, encoding: str) -> Decoded:
    text = data.decode(encoding, "replace")
    there_before = data.count(b"\xef\xbf\xbd") if encoding == "utf-8" else 0
    replaced = text.count(_REPLACEMENT) - there_before
    if replaced and encoding == "cp950":  # Hong Kong's characters are in another extension of Big5
        other = _lossy(data, "big5hkscs")
        return other if other.replaced < replaced else Decoded(text, encoding, replaced)
    return Decoded(text, encoding, replaced)


def _candidates(data: bytes, stated: list[str]) -> Iterator[str]:
    """Encodings to try, the likeliest first: `stated` encodings that chardet does not find unlikely by the lines beyond ASCII, then
    chardet's own.
    """
    chardet = optional("chardet", "text that is not UTF-8")
    lines, size = [], 0
    for line in re.findall(rb"[^\n]*[\x80-\xff][^\n]*\n?", data[: 64 * SAMPLE]):
        lines.append(line[:SAMPLE])
        size += len(lines[-1])
        if size >= SAMPLE:
            break
    sample = _ASCII_TAG.sub(b" ", b"".join(lines) or data[:SAMPLE])  # chardet would believe a <meta> tag
    ranked = chardet.detect_all(sample, encoding_era=~chardet.EncodingEra.MAINFRAME, ignore_threshold=True)
    found: dict[str, float] = {}
    for one in ranked:
        if (codec := _codec(one["encoding"])) is not None and (codec in _OLD_FOUND or not _OLD.fullmatch(codec)):
            found.setdefault(codec, one["confidence"])
    most = max(found.values(), default=0.0)
    yield from (codec for codec in stated if codec not in _SEVEN_BITS and found.get(codec, 0.0) >= SURE * most)
    if 2 * len(_LATIN_WORD.findall(sample)) >= len(_HIGH_RUN.findall(sample)):
        found = {codec: share for codec, share in found.items() if codec not in _OTHER_SCRIPTS}
    if len(sample) - len(sample.translate(None, _HIGH)) < OLD_BYTES:
        found = {codec: share for codec, share in found.items() if codec not in _OLD_FOUND}
    if found:
        best = max(found, key=lambda codec: found[codec])
        if found.get("cp1252", 0.0) >= (TIE if found[best] > DOUBT else SURE) * found[best]:
            best = "cp1252"
        if best in _CYRILLIC:
            letters = {codec: Counter(sample.decode(codec, "replace").lower()) for codec in (best, *_CYRILLIC)}
            best = max(letters, key=lambda codec: sum(letters[codec][letter] for letter in _FREQUENT))
        yield best
    yield from stated


@cache
def _codec(name: str | None) -> str | None:
    """The Python codec that decodes text stated to be in `name`, a label of WHATWG's Encoding standard or a name of Python's."""
    label = (name or "").strip()
    whatwg = optional("resiliparse.parse.encoding", "text that is not UTF-8").map_encoding_to_html5
    try:
        found = codecs.lookup(whatwg(label, False) or label.removeprefix("x-")).name
        "".encode(found)
    except (LookupError, ValueError):  # ValueError: a NUL in the name
        return None
    return None if found in _NO_CHARSETS else _WIDER.get(found, found)
