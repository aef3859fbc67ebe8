"""Personal data and secrets, replaced by placeholders.

Each expression begins with a literal or a class that few texts are full of, and repeats within bounds: the time is linear in the text.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from importlib.resources import files

from maxlm.config.fields import Section
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.phones import WORD_BEGINS, WORD_ENDS, find_phones
from maxlm.corpus.filters.secret_keys import TABLES, find_keys
from maxlm.corpus.filters.statistics import statistics_of

Span = tuple[int, int]  # of characters
Find = Callable[[str, int], Iterator[Span]]  # text and its hints -> places from left to right, without overlap
# Fullwidth digits, letters and signs of Japanese and Chinese texts, each of which stands for one character of ASCII.
FULLWIDTH = re.compile("[０-９Ａ-Ｚａ-ｚ]")
NARROW = {
    code: code - 0xFEE0 for code in (*range(0xFF10, 0xFF1A), *range(0xFF20, 0xFF3B), *range(0xFF41, 0xFF5B), *map(ord, "＋－（）．／"))
}
LONGEST_LOCAL_PART = 64  # characters before the @ (RFC 5321, 4.5.3.1.1)
LOCAL_PART_CHARACTERS = frozenset("._%+-'&")

AT = re.compile(r"@(?<=[\w%+'&-]@)(?!\d{1,2}x\.)(?:[^\W_](?:[\w-]{0,62})\.){1,8}[^\W\d_][\w-]{1,62}")
TOP_LEVEL_DOMAINS = frozenset(
    name
    for line in files(__package__).joinpath("top_level_domains.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
    for name in line.split()
)
ESCAPE = re.compile(r"\\(?:[nrt]|f[BIRP])(?=\w)")
LOGIN_BEFORE = re.compile(r"(?://(?:[^\s/@:]{0,64}:)?|\w/|\$\{?|(?<!\w)(?:ssh|scp|sftp|rsync|ssh-copy-id)[ \t][^\n@]{0,60})\Z")
LOGIN_AFTER = re.compile(r":[\w~/.]|\(|/\w|\[(?:[-:\d'\"]|[a-z_]\w{0,15}\])")  # or a call, or an element of an array
# A product of arrays or an attribute in a program (q@k.mT, a@self.weight.data, A@b.re, pose@camera.center)
PRODUCT = re.compile(
    r"(?:[A-Za-z_]@[A-Za-z_]\.(?!(?:com|org|edu|gov)\Z)\w+|(?:.*@)?self\..*|.*[a-z][A-Z]\w*"
    r"|(?:\w*_)?(?:rotation|translation|transform|matrix|pose|basis|weights?|projection|vector)@[A-Za-z_]\w*\.(?!(?:com|org|edu|gov|net)\Z)\w+"
    r"|[A-Za-z_]\w*@\w+\.(?:center|data|zero|read|call|save|search|map|now|here|open))\Z"
)
MESSAGE_ID = re.compile(r"(?:message-id|in-reply-to|references|msgid|mid):?[^\n]{0,80}<?\Z|\bid <\Z", re.IGNORECASE)

IPV4 = re.compile(r"(?<![\w.-])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w-]|\.\w)")
IPV6 = re.compile(  # 2000::/3, global unicast (RFC 4291, 2.4), also after a word and a colon; a colon may follow
    r"(?:(?<![\w:.])|" + "|".join(rf"(?<=[g-zG-Z][\da-fA-F]{{{n}}}:)" for n in range(5)) + ")"
    r"[23][0-9a-fA-F]{3}(?::[0-9a-fA-F]{0,4}){2,7}(?!\w|:\w)"
)
NO_IPV6 = re.compile(r"\d{4}(?::\d{1,2}){2,7}|\d{4}::\d{0,4}|.{0,6}")  # dates with times, slices
IPV6_DOCUMENTATION = ipaddress.ip_network("3fff::/20")  # RFC 9637, which Python 3.11 does not know
RESOLVERS = frozenset(("1.1.1.1", "1.0.0.1", "4.2.2.1", "4.2.2.2", "8.8.8.8", "8.8.4.4", "9.9.9.9"))  # addresses that look like versions
NUMBERED_BEFORE = re.compile(  # a version, an object identifier or a section stands here
    r"(?:\b(?:v|ver|ec|versions?|vers|releases?|released|rel|standards-version|oids?|sections?|sec|chapter|clause|appendix|table|figure|item"
    r"|firmware|driver|build|kernel|linux|upgraded? to|updated? to|bump(?:ed|s)?(?: \S{1,40})? to|since|before|until"
    r"|upstream|debian|revision|rev|patch|release:|new)\W{0,3}|§ ?|(?<!addr)(?<!src)(?<!dst)(?<!host)==)\Z",
    re.IGNORECASE,
)
NETWORK_BEFORE = re.compile(
    rf"(?:{WORD_BEGINS}(?:ip|ips|ipv4|inet|addr|addrs|address|addresses|adresse|host|hosts|server|servers|dns|nameservers?|ping|traceroute"
    r"|whois|dig|gateway|routers?|route|subnet|network|networks|netmask|proxy|client|peer|listen|bind|telnet|curl|remote|forwarded-for|src"
    r"|dst|source|destination|relay|node|firewall|via|IN\s{1,8}A)"
    r"(?:[\s:=(\"'\[!]|\b(?:is|at|to|of|the|from|as|on)\b|\baddr(?:ess)?\b){1,10}|://|@|\[|\d bytes from )\Z",
    re.IGNORECASE,
)
NETWORK_AFTER = re.compile(
    r":\d{2,5}\b|/(?:[89]|[12]\d|3[0-2])\b(?![./])|\s+(?:[a-z0-9-]{1,40}\.){1,4}[a-z]{2,}\s*$| port \d| - [\w-]{1,32} \[", re.MULTILINE
)
LARGE_OCTET = 100  # few versions have a first part of this size, or two parts

IBAN_LENGTHS = {entry[:2]: int(entry[2:]) for entry in TABLES["iban_lengths"].split()}
IBAN = re.compile(r"(?<![^\W_])[A-Z]{2}\d\d(?:[ -]?[A-Z0-9]{4}){2,8}(?:[ -]?[A-Z0-9]{1,3})?(?![^\W_])")
# Payment cards: ISO/IEC 7812, leading digits and lengths as the networks publish them.
CARD = re.compile(
    r"(?<![\w.,+/-])(?<!\d[ -])(?<!\b[\da-fA-F]{4} )"  # no row of hexadecimal numbers
    r"(?:\d{4}([ -])\d{4}\1\d{4}\1\d{4}|3\d{3}([ -])\d{6}\2\d{5}|3[068]\d{2}([ -])\d{6}\3\d{4}|\d{13,19})"
    r"(?![\w+/-]|[., ]\d| [\da-fA-F]{4}\b)"
)
CARD_NETWORKS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|(?:6011|65\d\d|64[4-9]\d)\d{12}|35\d{14}|62\d{14,17}"
)
CARD_WORDS = re.compile(
    rf"(?:{WORD_BEGINS}(?:(?:credit|debit)?cards?|visa|mastercard|master card|amex|american express|discover|jcb|diners|maestro|credit"
    rf"|debit|cc|pan|kartennummer|kreditkarten?(?:nummer)?|carte|tarjeta|carta|cart[aã]o|карт\w{{0,3}}){WORD_ENDS}"
    r"|卡号|卡號|信用卡|银行卡|カード番号|카드)[^\n]{0,40}\Z",
    re.IGNORECASE,
)


def find_emails(text: str, hints: int = scan.ALL_HINTS) -> Iterator[Span]:
    """E-mail addresses. A name without a domain that there is (user@localhost, logo@2x.png), and a login (user@host:path) is none."""
    done = 0
    for match in AT.finditer(text) if "@" in text else ():
        start = at = match.start()
        while start > max(done, at - LONGEST_LOCAL_PART) and (text[start - 1].isalnum() or text[start - 1] in LOCAL_PART_CHARACTERS):
            start -= 1
        if escape := ESCAPE.match(text, max(0, start - 1)):
            start = escape.end()  # "\\njane@" in a program, "\\fIjane@" in a manual page
        while start < at and text[start] in ".-'&%+":
            start += 1
        end = _domain_end(text, match)
        before = text[max(0, start - 100) : start]
        if (
            start == at
            or end is None
            or PRODUCT.match(text, start, end)
            or LOGIN_AFTER.match(text, end)
            or LOGIN_BEFORE.search(before)
            or MESSAGE_ID.search(before)
        ):
            continue
        yield start, end
        done = end


def _domain_end(text: str, match: re.Match[str]) -> int | None:
    """End of the domain: labels up to the last top-level domain; None without a top-level domain."""
    name = match[0].rstrip("-_")
    while "." in name:
        last = name.rpartition(".")[2].lower()
        if last in TOP_LEVEL_DOMAINS or last.startswith("xn--"):
            return match.start() + len(name)
        name = name.rpartition(".")[0]
    return None


def find_ip_addresses(text: str, hints: int = scan.ALL_HINTS) -> Iterator[Span]:
    """Public IPv4 addresses: no private, loopback, reserved and documentation addresses, versions and identifiers."""
    if hints & scan.HINT_IPV4:
        yield from (match.span() for match in IPV4.finditer(text) if _is_public(match[0]) and _is_ipv4(text, match))


def find_ipv6_addresses(text: str, hints: int = scan.ALL_HINTS) -> Iterator[Span]:
    """Public IPv6 addresses."""
    if hints & scan.HINT_IPV6:
        for match in IPV6.finditer(text):
            address = match[0] if match[0].endswith("::") else match[0].removesuffix(":")
            if not NO_IPV6.fullmatch(address) and _is_public(address):
                yield match.start(), match.start() + len(address)


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast and parsed not in IPV6_DOCUMENTATION


def _is_ipv4(text: str, match: re.Match[str]) -> bool:
    """True for an address, False for a version or another number of four parts."""
    before = text[max(0, match.start() - 60) : match.start()]
    if NUMBERED_BEFORE.search(before):
        return False
    large = [int(part) >= LARGE_OCTET for part in match[0].split(".")]
    if large[0] or sum(large) >= 2 or match[0] in RESOLVERS:
        return True
    return NETWORK_BEFORE.search(before) is not None or NETWORK_AFTER.match(text, match.end()) is not None


def find_ibans(text: str, hints: int = scan.ALL_HINTS) -> Iterator[Span]:
    """International bank account numbers (ISO 13616) of a country's length with the right check digits."""
    for match in IBAN.finditer(text) if hints & scan.HINT_DIGITS else ():
        end = match.end()
        while end > match.start():  # words in capitals may follow
            number = re.sub(r"[ -]", "", text[match.start() : end])
            wanted = IBAN_LENGTHS.get(number[:2], 0)
            if len(number) <= wanted:
                break
            end -= 1
        if len(number) == wanted and text[end - 1].isalnum() and (end == match.end() or text[end] in " -") and _mod97(number) == 1:
            yield match.start(), end


def _mod97(number: str) -> int:
    return int("".join(str(int(char, 36)) for char in number[4:] + number[:4])) % 97


def find_cards(text: str, hints: int = scan.ALL_HINTS) -> Iterator[Span]:
    """Payment card numbers with the right check digit (Luhn), in groups, or after a word for a card."""
    for match in CARD.finditer(text) if hints & scan.HINT_DIGITS else ():
        digits = re.sub(r"\D", "", match[0])
        if not CARD_NETWORKS.fullmatch(digits) or not _luhn(digits) or len(set(digits)) < 2:
            continue
        if len(digits) < len(match[0]) or CARD_WORDS.search(text[max(0, match.start() - 60) : match.start()]):
            yield match.span()


def _luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(doubled) + sum(map(int, digits[::-2]))) % 10 == 0


KINDS: dict[str, tuple[str, tuple[Find, ...]]] = {  # setting -> placeholder and searches, in the order in which they run
    "key": ("<KEY>", (find_keys,)),
    "email": ("<EMAIL>", (find_emails,)),
    "iban": ("<IBAN>", (find_ibans,)),
    "card": ("<CARD>", (find_cards,)),
    "ip": ("<IP_ADDRESS>", (find_ip_addresses, find_ipv6_addresses)),
    "phone": ("<PHONE>", (find_phones,)),
}


class PersonalDataSettings(Section):
    """Personal data are replaced by placeholders: <EMAIL>, <IP_ADDRESS>, <PHONE>, <IBAN>, <CARD>, <KEY>."""

    email: bool = True
    """Mask e-mail addresses; logins such as user@host:path stay."""
    ip: bool = True
    """Mask public IPv4 and IPv6 addresses; private, loopback, reserved and documentation addresses stay."""
    phone: bool = True
    """Mask telephone numbers of a numbering plan: international, North American, in national groups, and after a label such as Tel."""
    iban: bool = True
    """Mask bank account numbers with right check digits (ISO 13616)."""
    card: bool = True
    """Mask payment card numbers with a right check digit, in groups or after a word for a card."""
    key: bool = True
    """Mask private keys, tokens and passwords of known form, and passwords in URLs."""


class PersonalDataFilter:
    """Mask e-mail and public IP addresses, telephone, account and card numbers, and keys. Metadata `masked_email` and so on: number."""

    name = "personal_data"

    def __init__(self, settings: PersonalDataSettings) -> None:
        self.kinds = [(f"masked_{kind}", *found) for kind, found in KINDS.items() if getattr(settings, kind)]

    def __call__(self, document: Document) -> Document | Removed:
        text, counts, hints = document.text, dict[str, int](), statistics_of(document.text).hints
        changed = True
        while changed:  # until nothing is found: a placeholder changes the context of its neighbours
            changed = False
            for name, placeholder, searches in self.kinds:
                for find in searches:
                    wide = not text.isascii() and FULLWIDTH.search(text) is not None
                    spans = find(text.translate(NARROW), scan.ALL_HINTS) if wide else find(text, hints)
                    text, n = substitute(text, spans, placeholder)
                    if n:
                        counts[name], changed = counts.get(name, 0) + n, True
            hints = scan.ALL_HINTS
        if not counts:
            return document
        placeholders = {name: placeholder for name, placeholder, _ in self.kinds}
        cuts = tuple(Removed(document.id, self.name, name, _around(text, placeholders[name]), {"masked": n}) for name, n in counts.items())
        return Document(document.id, text, {**document.metadata, **counts}, (*document.cuts, *cuts))


def substitute(text: str, spans: Iterator[Span], placeholder: str) -> tuple[str, int]:
    """The text with `spans` replaced, and their number."""
    pieces, done = [], 0
    for start, end in spans:
        pieces += [text[done:start], placeholder]
        done = end
    return ("".join([*pieces, text[done:]]), len(pieces) // 2) if pieces else (text, 0)


def _around(text: str, placeholder: str) -> str:
    """Text on both sides of the first placeholder, which a person can judge it by without the data it stands for."""
    place = text.find(placeholder)
    return text[max(0, place - 80) : place + 80]
