"""Telephone numbers in text: layouts by expressions, validity by libphonenumber's tables of all countries (package phonenumberslite)."""

import re
from collections.abc import Iterable, Iterator

import phonenumbers

from maxlm.corpus.filters import scan

# A word in text, snake_case, camelCase
WORD_BEGINS = r"(?:(?<![^\W_])|(?-i:(?<=[a-z]{2})(?=[A-Z])))"
WORD_ENDS = r"(?:(?![^\W_])|(?-i:(?<=[a-z])(?=[A-Z])))"

_GROUPS = r"(?:[ .\-/\u00a0]{0,3}\(?\d{1,9}\)?)"
INTERNATIONAL = re.compile(rf"\+(?<![\w+]\+)\(?\d{{1,4}}\)?{_GROUPS}{{1,7}}(?![^\W_])")
NORTH_AMERICAN = re.compile(
    r"(?<![\w.+/-])(?:1[ .-])?(?:\([2-9]\d\d\)[ -]?[2-9]\d\d[ .-]\d{4}|[2-9]\d\d([.-])[2-9]\d\d\1\d{4})(?![\w-]|[./]\d)"
)
TRUNK = re.compile(  # national numbers of other countries in groups: 0 and an area code
    r"(?<![\w.+/:-])(?<!\d )(?:\(0\d{1,4}\) ?|0\d{1,4}(?: ?/ ?|[ -]))\d{2,8}(?:[ -]\d{2,4}){0,4}(?![\w/:-]|[ .,]\d)"
)
NUMBER = re.compile(rf"(?<![\w.,+-])\+?\(?\d{{1,9}}\)?{_GROUPS}{{0,7}}(?![^\W_])")
LABEL = re.compile(
    rf"(?:{WORD_BEGINS}(?:((?:(?:mobile|cell(?:ular)?)[ _-]?)?(?:tele)?phones?|t[eé]l[eé]phones?|tel[eé]fonos?|telefones?|telefon|telefoon"
    r"|contact[ _-](?:nos?|numbers?|nr)"
    r"|(?:tele)?fax(?:es)?|whatsapp|hotline|helpline|t[eé]ls?|tlf|tfno|тел|телефон\w{0,3}|факс|τηλ|τηλέφωνο|هاتف)"
    r"|(mobile|mobil|mobiel|m[oó]vil|celular|cellulare|cell|gsm|ph)|handy|portable|call|dial)(?:\(s\))?"
    rf"{WORD_ENDS}|(電話|电话|手机|手機|携帯|传真|傳真|전화|휴대폰))"
    r"([^\d\n+(]{0,24})\Z",
    re.IGNORECASE,
)
PROSE = re.compile(r"[\w ,.:'’-]*")  # between a word for a telephone and a number
NO_PHONE = re.compile(r"\d{1,3}[.,]\d+|\d{5}-\d{4}|\d{1,2}([-./])\d{1,2}\1\d{2,4}|\d{4}([-./])\d{1,2}\2\d{1,2}")  # decimals, ZIP+4, dates
_YEAR = r"(?:1[5-9]|20)\d\d"
DATE = re.compile(rf"\(?{_YEAR}(?:([-./])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])|[ /-]{{1,3}}{_YEAR})(?!\d)")  # or two years
PAIR = re.compile(r"\(?(?:\d{3}[ ./-]\d{3}|\d{4}[ ./-]\d{3,4})\)?")  # also a size of a screen, two speeds
LONGEST_LABEL = 40  # characters before a number
EXPLICIT = re.compile(  # between a word for a telephone and a number: a colon, or a word for a number
    rf"[^\n]{{0,22}}(?:[:=：]|{WORD_BEGINS}(?:numbers?|nos?|nr|num){WORD_ENDS}|号码?|號碼?|番号|번호)[^\n]{{0,4}}|[\"']?>|\.[ \t]{{0,2}}",
    re.IGNORECASE,
)
ABBREVIATIONS = ("tel", "tél", "tlf", "тел")  # of a number rather than of a device
LOCAL = re.compile(r"\d{3}[ -]\d{4}|\d{2,4}(?:[ -]\d{2}){2,3}|\d{3,4}[ -]\d{3,4}")
_NOT_WORDS = r"(?<![^\W_])(?:pages?|pp?|lines?|isbn|issn|serial|ticket|bug|case|order|part|range|port|id|rfc|doi|accession)\W{0,3}"
NOT_BEFORE = re.compile(rf"(?:{_NOT_WORDS}|[$€£#=*<>^]\s?|(?:\b[\da-f]{{2}}>?\s){{2}})\Z", re.IGNORECASE)
NOT_BEFORE_EXPLICIT = re.compile(rf"{_NOT_WORDS}\Z", re.IGNORECASE)  # phone_number=2125552187
NOT_AFTER = re.compile(r"\s?(?:[eE][-+]?\d|[%*=^]|px\b|bytes?\b|times\b|\.\d)")
FEWEST, MOST = 7, 15  # digits (ITU-T E.164)
FEWEST_NATIONAL = 9  # digits of a national number without a label; with fewer, times and code points are more frequent
SHORTEST_PLAIN = 10  # characters of "+" and digits without any space up to which they are an integer rather than a telephone number


def find_phones(text: str, hints: int = scan.ALL_HINTS) -> Iterator[tuple[int, int]]:
    """Telephone numbers that exist by the numbering plans: international, North American and national ones in groups, and labelled ones."""
    spans: list[tuple[int, int]] = []
    if hints & scan.HINT_PHONE:
        spans += _valid(text, (match.span() for match in INTERNATIONAL.finditer(text)), (None,))
        spans += _valid(text, (match.span() for match in NORTH_AMERICAN.finditer(text)), ("US",))
    if hints & scan.HINT_DIGITS:
        spans += _valid(text, (match.span() for match in TRUNK.finditer(text) if _is_national(match[0])), TRUNK_REGIONS, whole=True)
        spans += _labelled(text)
    done = 0
    for start, end in sorted(spans):
        if start >= done:
            yield start, end
            done = end


TRUNK_REGIONS = tuple(  # where national numbers begin with 0
    re.findall(
        r"\w\w",
        "GB DE FR IT NL BE CH AT AU NZ JP KR ZA SE FI TR UA RO IL IE AR IN ID TH EG NG CN TW MY PH VN PK IR SA AE KE BD",
    )
)
REGIONS = (
    "US",
    *TRUNK_REGIONS,
    *re.findall(r"\w\w", "ES PT PL CZ SK HU GR DK NO RU KZ BR MX CL CO PE SG HK MA BG HR RS SI LT LV EE IS LU CY MT"),
)


def _valid(
    text: str,
    spans: Iterable[tuple[int, int]],
    regions: Iterable[str | None],
    whole: bool = False,
    not_before: re.Pattern[str] = NOT_BEFORE,
) -> Iterator[tuple[int, int]]:
    """Numbers among `spans`, without the last groups of digits if that makes one valid and it needs not be `whole`."""
    for start, end in spans:
        if not_before.search(text, max(0, start - 12), start) or NO_PHONE.fullmatch(text, start, end):
            continue
        if text[end - 1] == ")" and text.count("(", start, end) < text.count(")", start, end):
            end -= 1  # of a parenthesis around the number
        if text[start] == "+" and end - start <= SHORTEST_PLAIN and text[start + 1 : end].isdigit():
            continue
        while end > start and not is_valid(text[start:end], regions):
            end = start if whole else _last_group(text, start, end)
        if end > start and not NOT_AFTER.match(text, end):
            yield start, end


def _last_group(text: str, start: int, end: int) -> int:
    """End of the number without its last group of digits; `start` if one group is left."""
    place = end - 1
    while place > start and (text[place].isdigit() or text[place] == ")"):
        place -= 1
    while place > start and not text[place - 1].isdigit() and text[place - 1] != ")":
        place -= 1
    return place


def is_valid(number: str, regions: Iterable[str | None]) -> bool:
    """True for a number that one of the regions' numbering plans has. None: of the number's own country code."""
    if not FEWEST <= sum(map(str.isdigit, number)) <= MOST or number.count("(") != number.count(")"):
        return False
    number = re.sub(r"(?<=\d)[ \u00a0]?\(0\)", "", number)  # +49 (0)30
    for region in regions:
        try:
            if phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                return True
        except phonenumbers.NumberParseException:
            continue
    return False


def _is_national(number: str) -> bool:
    """False for few digits, and for groups of four each, which are times and code points."""
    return number[0] == "(" or (sum(map(str.isdigit, number)) >= FEWEST_NATIONAL and not re.fullmatch(r"\d{4}(?: \d{4})+", number))


def _labelled(text: str) -> Iterator[tuple[int, int]]:
    """Numbers after a word for a telephone: `explicit` ones after a colon or a word for a number, `marked` ones also without them."""
    for match in NUMBER.finditer(text):
        start, end = match.span()
        number = match[0]
        if end - start < FEWEST or sum(map(str.isdigit, number)) < FEWEST - 1 or NOT_AFTER.match(text, end) or DATE.match(number):
            continue
        label = LABEL.search(text, max(0, start - LONGEST_LABEL), start)
        if label is None:
            continue
        word, mobile, between = label[1] or label[3], label[2], label[4]
        explicit = EXPLICIT.fullmatch(between) is not None
        if not explicit and text[label.start() - 1 : label.start()] == "_":
            continue  # an identifier such as new_fax, of a program
        marked = word is not None and (explicit or not between.strip(" \t"))
        if PAIR.fullmatch(number) and not explicit and (word or "").lower() not in ABBREVIATIONS:
            continue
        if marked and LOCAL.fullmatch(number):
            yield start, end
        elif (
            marked
            or (PROSE.fullmatch(between) and (not number.isdigit() or number[0] == "0"))
            or (mobile and explicit and end - start >= SHORTEST_PLAIN)
        ):
            regions = (None,) if number[0] == "+" else REGIONS
            yield from _valid(text, [(start, end)], regions, not_before=NOT_BEFORE_EXPLICIT if explicit else NOT_BEFORE)
