"""Personal data and secrets, replaced by placeholders.

Each expression begins with a literal or a class that few texts are full of, and repeats within bounds: the time is linear in the text.
"""

import ipaddress
import re
from collections.abc import Callable

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import scan
from maxlm.corpus.filters.settings import PersonalDataSettings
from maxlm.corpus.filters.statistics import statistics_of

EMAIL, IP_ADDRESS, PHONE, KEY = "<EMAIL>", "<IP_ADDRESS>", "<PHONE>", "<KEY>"
PLACEHOLDERS = {"masked_email": EMAIL, "masked_ip": IP_ADDRESS, "masked_phone": PHONE, "masked_key": KEY}
LONGEST_LOCAL_PART = 64  # characters before the @ (RFC 5321, 4.5.3.1.1)
LOCAL_PART_CHARACTERS = frozenset("._%+-'&")

AT = re.compile(r"@(?<=[\w%+'&-]@)(?:[^\W_](?:[\w-]{0,62})\.){1,8}[^\W\d_][\w-]{1,62}")
IPV4 = re.compile(r"(?<![\w.-])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w-]|\.\w)")
IPV6 = re.compile(r"(?<![\w:.])[23][0-9a-fA-F]{3}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")  # 2000::/3, global unicast (RFC 4291, 2.4)
_DIGITS = r"(?:[ .\-/\u00a0]{0,3}\(?\d{1,9}\)?)"
PHONES = (
    re.compile(rf"\+(?<!\w\+)\d{{1,4}}{_DIGITS}{{1,7}}(?!\w)"),
    re.compile(r"(?<![\w.+-])(?:1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[ .-]\d{4}(?![\w-]|\.\d)"),  # North American plan
)
LABELLED_PHONE = re.compile(
    r"\b((?:telephone|telefon|phone|mobile|mobil|handy|tel|fax|call)\b\.?[ \t]?(?:number|no\.|nr\.)?[ \t]{0,2}:?[ \t]{0,2})"
    rf"(\+?\(?\d{{1,9}}\)?{_DIGITS}{{0,7}})(?!\w)",
    re.IGNORECASE,
)
KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
KEY_ENDS = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
LONGEST_KEY = 20_000  # characters
# Forms of tokens: the issuers' documentation, as collected in gitleaks' rules. The literal that each begins with is looked for first.
KEYS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("AKIA", re.compile(r"AKIA(?<!\wAKIA)[0-9A-Z]{16}(?!\w)")),
    ("ASIA", re.compile(r"ASIA(?<!\wASIA)[0-9A-Z]{16}(?!\w)")),
    ("AIza", re.compile(r"AIza(?<!\wAIza)[\w-]{35}(?![\w-])")),
    ("ghp_", re.compile(r"ghp_(?<!\wghp_)[A-Za-z0-9]{36}(?!\w)")),
    ("gho_", re.compile(r"gho_(?<!\wgho_)[A-Za-z0-9]{36}(?!\w)")),
    ("ghs_", re.compile(r"ghs_(?<!\wghs_)[A-Za-z0-9]{36}(?!\w)")),
    ("github_pat_", re.compile(r"github_pat_(?<!\wgithub_pat_)\w{22,100}(?!\w)")),
    ("glpat-", re.compile(r"glpat-(?<!\wglpat-)[\w-]{20,100}(?![\w-])")),
    ("xox", re.compile(r"xox(?<!\wxox)[abeoprs]-(?=[\w-]{0,60}\d)[\w-]{10,200}(?![\w-])")),
    ("sk-", re.compile(r"sk-(?<![\w-]sk-)(?=[\w-]{0,60}\d)[\w-]{32,200}(?![\w-])")),
    ("sk_live_", re.compile(r"sk_live_(?<!\wsk_live_)\w{16,100}(?!\w)")),
    ("npm_", re.compile(r"npm_(?<!\wnpm_)[A-Za-z0-9]{36}(?!\w)")),
    ("pypi-", re.compile(r"pypi-(?<!\wpypi-)[\w-]{50,250}(?![\w-])")),
    ("hf_", re.compile(r"hf_(?<!\whf_)[A-Za-z]{34}(?!\w)")),
    ("eyJ", re.compile(r"eyJ(?<![\w-]eyJ)[\w-]{10,2000}\.eyJ[\w-]{10,4000}\.[\w-]{10,1000}(?![\w-])")),  # JSON Web Token
)
ASSIGNED = re.compile(
    r"\b((?:api[_-]?key|secret[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd)"
    r"[\"']?[ \t]{0,2}[:=][ \t]{0,2}[\"']?)(?=[\w/+=-]{0,40}\d)[\w/+=-]{12,200}",
    re.IGNORECASE,
)
ASSIGNED_WORDS = ("key", "secret", "token", "passw")
KEYS_WITHOUT_HINT = tuple((literal, pattern) for literal, pattern in KEYS if literal == "eyJ")


class PersonalDataFilter:
    """Mask e-mail addresses, public IP addresses, telephone numbers and keys. Metadata `masked_email` and so on: how many."""

    name = "personal_data"

    def __init__(self, settings: PersonalDataSettings) -> None:
        kinds: tuple[tuple[bool, str, Callable[[str, int], tuple[str, int]]], ...] = (
            (settings.key, "masked_key", mask_keys),
            (settings.email, "masked_email", mask_emails),
            (settings.ip, "masked_ip", mask_ip_addresses),
            (settings.phone, "masked_phone", mask_phones),
        )
        self.masks = [(name, mask) for wanted, name, mask in kinds if wanted]

    def __call__(self, document: Document) -> Document | Removed:
        text, counts, hints = document.text, dict[str, int](), statistics_of(document.text).hints
        changed = True
        while changed:  # until nothing is found: what stood beside something masked may be judged in another way
            changed = False
            for name, mask in self.masks:
                text, n = mask(text, hints)
                if n:
                    counts[name], changed = counts.get(name, 0) + n, True
            hints = scan.ALL_HINTS
        if not counts:
            return document
        cuts = tuple(Removed(document.id, self.name, name, _around(text, PLACEHOLDERS[name]), {"masked": n}) for name, n in counts.items())
        return Document(document.id, text, {**document.metadata, **counts}, (*document.cuts, *cuts))


def _around(text: str, placeholder: str) -> str:
    """Text on both sides of the first placeholder, which a person can judge it by without the data it stands for."""
    place = text.find(placeholder)
    return text[max(0, place - 80) : place + 80]


def mask_emails(text: str, hints: int = scan.ALL_HINTS) -> tuple[str, int]:
    """The text with e-mail addresses replaced, and their number. A name without a domain (user@localhost) stays."""
    if "@" not in text:
        return text, 0
    pieces, done = [], 0
    for match in AT.finditer(text):
        start = at = match.start()
        while start > max(done, at - LONGEST_LOCAL_PART) and (text[start - 1].isalnum() or text[start - 1] in LOCAL_PART_CHARACTERS):
            start -= 1
        if start == at:
            continue
        pieces += [text[done:start], EMAIL]
        done = match.end()
    return ("".join([*pieces, text[done:]]), len(pieces) // 2) if pieces else (text, 0)


def mask_ip_addresses(text: str, hints: int = scan.ALL_HINTS) -> tuple[str, int]:
    """The text with public IPv4 and IPv6 addresses replaced, and their number."""
    n = 0
    for hint, pattern in ((scan.HINT_IPV4, IPV4), (scan.HINT_IPV6, IPV6)):
        if hints & hint:
            text, n = _substitute(pattern, _mask_ip, text, n)
    return text, n


def mask_phones(text: str, hints: int = scan.ALL_HINTS) -> tuple[str, int]:
    """The text with telephone numbers replaced, and their number: 7 to 15 digits (ITU-T E.164), 6 where labelled."""
    n = 0
    if hints & scan.HINT_PHONE:
        for pattern in PHONES:
            text, n = _substitute(pattern, _mask_phone, text, n)
    if hints & scan.HINT_LABELLED_PHONE:
        text, n = _substitute(LABELLED_PHONE, _mask_labelled, text, n)
    return text, n


def mask_keys(text: str, hints: int = scan.ALL_HINTS) -> tuple[str, int]:
    """The text with keys, tokens and assigned passwords replaced, and their number."""
    text, n = _mask_private_keys(text)
    for literal, pattern in KEYS if hints & scan.HINT_TOKEN else KEYS_WITHOUT_HINT:
        if literal in text:
            text, n = _substitute(pattern, _mask_key, text, n)
    if hints & scan.HINT_TOKEN:
        lower = text.lower()
        if any(word in lower for word in ASSIGNED_WORDS):
            text, n = _substitute(ASSIGNED, _mask_assigned, text, n)
    return text, n


def _mask_private_keys(text: str) -> tuple[str, int]:
    pieces: list[str] = []
    done = 0
    begin, end = KEY_BEGINS.search(text) if "PRIVATE KEY" in text else None, None
    while begin is not None:
        if end is None or end.start() < begin.end():
            end = KEY_ENDS.search(text, begin.end())
        if end is None:
            break
        last = begin.end()
        if end.start() - begin.end() <= LONGEST_KEY:
            pieces += [text[done : begin.start()], KEY]
            done = end.end()
            last = done
        begin = KEY_BEGINS.search(text, last)
    return ("".join([*pieces, text[done:]]), len(pieces) // 2) if pieces else (text, 0)


def _substitute(pattern: re.Pattern[str], mask: Callable[[re.Match[str]], str], text: str, n: int) -> tuple[str, int]:
    """The text with matches replaced, and `n` plus the number of those that changed."""
    changed = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal changed
        masked = mask(match)
        changed += masked != match[0]
        return masked

    return pattern.sub(replace, text), n + changed


def _mask_ip(match: re.Match[str]) -> str:
    try:
        return IP_ADDRESS if ipaddress.ip_address(match[0]).is_global else match[0]
    except ValueError:
        return match[0]


def _mask_key(match: re.Match[str]) -> str:
    return KEY


def _mask_assigned(match: re.Match[str]) -> str:
    return match[1] + KEY


def _mask_phone(match: re.Match[str]) -> str:
    return PHONE if 7 <= sum(map(str.isdigit, match[0])) <= 15 else match[0]


def _mask_labelled(match: re.Match[str]) -> str:
    return match[1] + PHONE if 6 <= sum(map(str.isdigit, match[2])) <= 15 else match[0]
