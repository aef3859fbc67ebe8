"""Keys, tokens and passwords in text, by the forms that their issuers give them."""

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from maxlm.corpus.filters import scan

KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
KEY_ENDS = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
LONGEST_KEY = 20_000  # characters
TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("personal_data.toml").read_text("utf-8"))
TOKENS = [(literal, re.compile(pattern)) for literal, pattern in TABLES["tokens"]]
AWS_SECRET = re.compile(
    r"(?<![A-Za-z0-9/+_.-])(?=[^\n]{0,39}[a-z])(?=[^\n]{0,39}[A-Z])(?=[^\n]{0,39}\d)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_-])"
)
AWS_WORDS = ("aws", "amazon", "secret", "akia", "asia", "<key>")
AWS_DISTANCE = 120  # characters between a word and a secret
URL_PASSWORD = re.compile(r"://([^\s/:@\"'<>]{0,64}):([^\s/@\"'<>]{3,128})@(?=[\w\[$])")
ASSIGNED = re.compile(
    r"(?:(?:api[_-]?key|secret[_-]?(?:access[_-]?)?key|(?:access|auth|session|refresh)[_-]?token|client[_-]?secret|password|passwd)"
    r"[\"']?[ \t]{0,2}(?::=|=>|[:=])[ \t]{0,2}|authorization[\"']?[ \t]{0,2}[:=,][ \t]{0,2}[\"']?(?:bearer|basic|token)[ \t]{1,2})"
    r"[\"']?((?=[\w/+=-]{0,40}\d)[\w/+=-]{12,200})(?![\w(.\[])",
    re.IGNORECASE,
)
ASSIGNED_WORDS = ("key", "secret", "token", "passw", "authorization")
PLACEHOLDER = re.compile(
    r"(?:(?:my|your|the|some|a|super|db|test|user|sample|example)?[-_]?)*(?:pass(?:word|wd|wrd|phrase)?|pwd?|pw|secret|token|key|mot_?de_?passe|passwort)"
    r"[-_]?\d*|x+|\*+|\.+|[$%{(\[<#].*|.*[})\]>]|.*(?:%s|\$\{).*|foo|bar|baz|\d{1,5}",
    re.IGNORECASE,
)


def find_keys(text: str, hints: int = scan.ALL_HINTS) -> Iterator[tuple[int, int]]:
    """Private keys, tokens, passwords in URLs and assigned ones, from left to right."""
    spans = [*_private_keys(text)]
    if "://" in text and "@" in text:
        spans += [match.span(2) for match in URL_PASSWORD.finditer(text) if not PLACEHOLDER.fullmatch(match[2]) and match[2] != match[1]]
    if hints & scan.HINT_TOKEN:
        for literal, pattern in TOKENS:
            if literal in text:
                spans += [match.span(match.lastindex or 0) for match in pattern.finditer(text)]
        lower = text.lower()
        if any(word in lower for word in AWS_WORDS):
            for match in AWS_SECRET.finditer(text):
                before = text[max(0, match.start() - AWS_DISTANCE) : match.start()].lower()
                spans += [match.span()] * any(word in before for word in AWS_WORDS)
        if any(word in lower for word in ASSIGNED_WORDS):
            spans += [match.span(1) for match in ASSIGNED.finditer(text) if _is_secret(match[1])]
    done = 0
    for start, end in sorted(spans):
        if start >= done:
            yield start, end
            done = end


def _is_secret(value: str) -> bool:
    """True for an assigned value with two digits or more, or padded base64, that is no word with a number, no number and no placeholder."""
    digits = sum(map(str.isdigit, value))
    return (
        (digits >= 2 or value.endswith("="))
        and not PLACEHOLDER.fullmatch(value)
        and not re.fullmatch(r"[A-Za-z]+(?:[-_/][A-Za-z]+)*[-_/]?\d{1,4}|\d[\d-]*", value)
    )


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    begin, end = KEY_BEGINS.search(text) if "PRIVATE KEY" in text else None, None
    while begin is not None:
        if end is None or end.start() < begin.end():
            end = KEY_ENDS.search(text, begin.end())
        if end is None:
            break
        last = begin.end()
        if end.start() - begin.end() <= LONGEST_KEY:
            last = end.end()
            yield begin.start(), last
        begin = KEY_BEGINS.search(text, last)
