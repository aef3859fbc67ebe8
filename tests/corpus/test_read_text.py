"""Decoding and the normal form of text."""

import random
import unicodedata

import pytest

from maxlm.documents.text import decode, normalise, wide_encoding

ALPHABET = (
    "aZ \n\t\r\0\b\x0b\x0c\x1b[31m\x7f\x80\x85\x93\xa0Ãâ€™Â©éàe\u0301\u212b\ufeff\u2028\ud83d\ude00\ud800ß漢字РС°ё√‚Ä\ufffd\ufffa😀가"
)
SENTENCES = {
    "cp1251": "Съешь ещё этих мягких французских булок, да выпей чаю. Москва — столица России.",
    "koi8-r": "Съешь ещё этих мягких французских булок, да выпей чаю. Москва столица России.",
    "cp1252": "L'été dernier, à la fenêtre, nous étions très heureux ; ça a été une journée formidable où l'âme s'élève.",
    "shift_jis": "これは日本語の文章です。東京は日本の首都であり、世界最大級の都市のひとつである。",
    "gb18030": "北京是中华人民共和国的首都,是中国的政治、文化和国际交往中心。这里有许多历史遗迹。",
    "big5": "臺北市是中華民國的首都,位於臺灣北部,是政治、經濟與文化的中心。",
    "euc_kr": "서울특별시는 대한민국의 수도이자 최대 도시이다. 한강을 끼고 있으며 많은 사람이 살고 있다.",
    "iso8859-7": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και η μεγαλύτερη πόλη της χώρας.",
    "cp1250": "Příliš žluťoučký kůň úpěl ďábelské ódy a šel domů přes řeku.",
}


def test_normal_form_is_normal_and_a_fixed_point():
    """For any text: NFC, no control characters, UTF-8 can encode it, and normalising again changes nothing."""
    chance = random.Random(7)
    for _ in range(1500):
        text = normalise("".join(chance.choices(ALPHABET, k=chance.randrange(40))))
        assert normalise(text) == text
        assert unicodedata.is_normalized("NFC", text)
        assert not [char for char in text if unicodedata.category(char) == "Cc" and char not in "\t\n"]
        text.encode()


def test_long_texts_are_normalised_by_pieces(monkeypatch):
    """The normal form of a long text is that of its pieces, wherever they are cut."""
    chance = random.Random(11)
    for _ in range(300):
        text = "".join(chance.choices(ALPHABET + "\n\n\n", k=chance.randrange(200)))
        monkeypatch.setattr("maxlm.documents.text.PIECE", 10**9)
        whole = normalise(text)
        for piece in (0, 1, 30):
            monkeypatch.setattr("maxlm.documents.text.PIECE", piece)
            assert normalise(text) == whole
    title = "\x1b]0;a\nb\x07"  # an escape sequence that goes over lines
    assert normalise(title * 20) == ""


@pytest.mark.parametrize(
    "text", ["plain ASCII\n\twith tabs", "L’été, « déjà » vu… c’est ça", "ﬁ “quotes” ｆｕｌｌ １２", "漢字かな", "a  b \n\n\n", "&lt;p&gt;"]
)
def test_clean_text_stays_the_same_object(text):
    assert normalise(text) is text


@pytest.mark.parametrize("text", [*SENTENCES.values(), "naïve café – ‘quoted’ “text”…", "Größe: 5 €"])
def test_mojibake_is_undone(text):
    """UTF-8 that was read as Windows-1252 comes back, wherever that leaves every byte a character."""
    broken = "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in text.encode())
    assert normalise(f"First line.\n{broken}") == f"First line.\n{unicodedata.normalize('NFC', text)}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\r\nb\rc\x0cd\u2028e", "a\nb\nc\nd\ne"),
        ("\x1b[1mbold\x1b[0m", "bold"),
        ("N\bNA\bAM\bME\bE _\bu_\bn", "NAME un"),
        ("\ud83d\ude00 \ud800", "😀 \ufffd"),
        ("nul\0 bel\a bom\ufeff", "nul bel bom"),
        ("e\u0301", "é"),
        ("\x93so\x94 \x85", "“so” …"),
    ],
)
def test_what_is_mended(before, after):
    assert normalise(before) == after


@pytest.mark.parametrize("encoding", SENTENCES)
def test_legacy_encodings_are_detected(encoding):
    text = SENTENCES[encoding]
    decoded = decode(text.encode(encoding))
    assert decoded is not None and decoded.text == text and decoded.replaced == 0


@pytest.mark.parametrize("encoding", ["cp1251", "koi8-r"])
@pytest.mark.parametrize("case", [str.upper, str.lower, str.capitalize])
def test_cyrillic_capitals_are_not_taken_for_small_letters_of_another_encoding(encoding, case):
    for text in ("отношение, друг и отец в городе на реке", SENTENCES["koi8-r"]):
        decoded = decode(case(text).encode(encoding))
        assert decoded is not None and decoded.text == case(text)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_unicode_encodings(encoding):
    text = "A text with an é and a € in it, long enough."
    decoded = decode(text.encode(encoding))
    assert decoded is not None and decoded.text == text


def test_some_wrong_bytes_leave_utf8_what_it_is():
    decoded = decode("Съешь ещё этих булок".encode() + b" \xff " + "да выпей чаю".encode())
    assert decoded == ("Съешь ещё этих булок \ufffd да выпей чаю", "utf-8", 1)


def test_noise_is_no_text():
    """Random bytes are decoded as nothing, or hold control characters that tell."""
    data = random.Random(3).randbytes(5000)
    decoded = decode(data)
    assert decoded is None or sum(unicodedata.category(char) == "Cc" for char in decoded.text) > 200
    assert wide_encoding(b"plain text, and no more than that") is None


@pytest.mark.parametrize("declared", ["utf-7", "base64", "no-such", "\0", "rot13", "idna"])
def test_a_declared_encoding_that_is_none_does_no_harm(declared):
    decoded = decode(b"caf\xe9 au lait, tr\xe8s bon \xe0 boire", declared)
    assert decoded is not None and decoded.text == "café au lait, très bon à boire"


def test_shortcut_by_bytes_misses_nothing():
    """Wherever an expression for what must be mended matches, the bytes that stand for it are found first."""
    from maxlm.documents.text import _SIGNS

    seen = set()
    for code in [*range(0x80, 0x3000), *range(0xFEF0, 0x10000)]:
        for text in (chr(code), f"Ã{chr(code)}", f"{chr(code)}€", f"Р{chr(code)}Р", f"С{chr(code)}С", f"√{chr(code)}", "‚Ä"):
            for number, (pattern, signs) in enumerate(_SIGNS):
                if not any(0xD800 <= ord(char) < 0xE000 for char in text) and pattern.search(text):
                    seen.add(number)
                    assert any(sign.search(text.encode()) for sign in signs), (text, pattern)
    assert len(seen) == len(_SIGNS)


@pytest.mark.parametrize(
    ("text", "encoding", "declared"),
    [
        *((SENTENCES[encoding], encoding, "utf-8") for encoding in ("cp1252", "cp1251", "koi8-r", "cp1250", "shift_jis", "big5", "euc_kr")),
        ("A page of English with one café in it. " * 9, "cp1252", "utf-8"),  # few accents: they stayed U+FFFD
        (SENTENCES["cp1251"], "cp1251", "iso-8859-1"),  # a server's default
        (SENTENCES["koi8-r"], "koi8-r", "windows-1251"),
        (SENTENCES["cp1252"], "cp1252", "windows-1251"),
        (SENTENCES["shift_jis"], "euc_jp", "x-sjis"),
    ],
)
def test_a_wrong_declaration_does_not_hide_the_encoding(text, encoding, declared):
    decoded = decode(text.encode(encoding), declared)
    assert decoded is not None and (decoded.text, decoded.replaced) == (text, 0)


@pytest.mark.parametrize(
    ("text", "encoding", "label"),
    [
        (SENTENCES["shift_jis"], "iso2022_jp", "ISO-2022-JP"),
        (SENTENCES["shift_jis"], "iso2022_jp", None),
        (SENTENCES["euc_kr"], "iso2022_kr", None),
        (SENTENCES["gb18030"], "hz", "hz-gb-2312"),
        (SENTENCES["koi8-r"], "cp866", "ibm866"),
        (SENTENCES["koi8-r"], "cp866", None),
        (SENTENCES["koi8-r"], "mac-cyrillic", "x-mac-cyrillic"),
        (SENTENCES["shift_jis"] + "①㈱", "cp932", "x-sjis"),
        (SENTENCES["gb18030"] + "镕", "gb18030", "gb2312"),
        (SENTENCES["big5"] + "碁喺", "big5hkscs", "big5"),
        ("Česká káva za 5 € — žádná", "cp1250", "x-cp1250"),
        ("สวัสดีชาวโลก “ประเทศไทย”", "cp874", "tis-620"),
        ("So für 5 €", "iso8859-15", "iso-8859-15"),
    ],
)
def test_labels_of_pages_are_those_of_the_standard(text, encoding, label):
    """Labels of WHATWG's Encoding standard, the wider encoding that each one means, and those that tell by their bytes."""
    decoded = decode(text.encode(encoding), label)
    assert decoded is not None and (decoded.text, decoded.replaced) == (text, 0)


def test_of_two_declarations_the_likely_one_counts():
    """HTTP header and <meta>: the header's, unless the bytes say that it is wrong."""
    russian, german = SENTENCES["cp1251"].encode("cp1251"), "Größe: fünf Euro für die Äpfel".encode("cp1252")
    assert decode(russian, "iso-8859-1", "windows-1251") == (SENTENCES["cp1251"], "cp1251", 0)
    assert decode(russian, "windows-1251", "utf-8") == (SENTENCES["cp1251"], "cp1251", 0)
    assert decode(german, "iso-8859-1", "windows-1251") == (german.decode("cp1252"), "cp1252", 0)


def test_terminal_escapes_are_not_japanese():
    """A log that switches character sets has no text in ISO-2022."""
    assert decode(b"\x1b(B\x1b[m plain \x1b$ text") == ("\x1b(B\x1b[m plain \x1b$ text", "utf-8", 0)
