"""Measure of tools/corpus_quality.py: personal data planted in real text are masked, and other masked text is personal data.

Planted: valid instances made from a seed, in the layouts that people write, within lines of documentation and source code. Real finds are
compared with those that a person has judged (masking_judged.txt holds a hash of each, no data); a note says how many are not judged.
Also planted: numbers and names that look like personal data, none of which may be masked.
"""

import hashlib
import random
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import phonenumbers

from corpora.quality import Row, package_files
from maxlm.corpus.filters.personal_data import IBAN_LENGTHS, KINDS
from maxlm.corpus.filters.phones import REGIONS

PACKAGES = [
    "debian-faq",
    "debian-reference-en",
    "debian-reference-de",
    "debian-reference-fr",
    "harden-doc",
    "git-doc",
    "manpages-dev",
    "mutt",
    "postfix-doc",
    "shorewall-doc",
    "kea-doc",
    "slapd",
    "mgetty-docs",
    "units",
    "jargon-text",
    "weechat-doc",
    "devscripts",
    "nmap",
    "minicom",
    "haproxy-doc",
    "unbound",
]
FILES = r"usr/share/(?:doc|man|info|units|nmap|devscripts)/.*(?<!\.dia)"
SAMPLE_CHARACTERS = 400_000  # of one package
JUDGED = Path(__file__).with_name("masking_judged.txt")
PER_KIND = 400  # planted instances
LETTERS = string.ascii_letters + string.digits

Draw = random.Random


def measure(folder: Path, seed: int) -> Iterator[Row]:
    """Rows of recall on planted instances and precision by kind, and of what must stay."""
    draw = random.Random(seed)
    texts = list(real_texts(folder, draw))
    judged = {tuple(line.split()[:2]): line.split()[2] == "true" for line in JUDGED.read_text().splitlines() if line[:1] != "#"}
    false, real, unknown = Counter[str](), Counter[str](), Counter[str]()
    for kind, find in sorted({(kind, value) for text in texts for kind, value in finds(text)}):
        verdict = judged.get((kind, digest(find)))
        real[kind] += 1
        unknown[kind] += verdict is None
        false[kind] += verdict is False
    for name, (kind, make) in PLANTED.items():
        instances = [make(draw) for _ in range(PER_KIND)]
        found = sum(
            planted in set(finds(_within(draw, texts, line))) for line, planted in ((line, (kind, value)) for line, value in instances)
        )
        yield Row(name, PER_KIND, found, 0, asked=0.95)
    for kind in KINDS:
        known = real[kind] - unknown[kind]
        note = f"of {real[kind]:,} distinct real finds {known:,} are judged"
        yield Row(f"{kind}: real finds", 0, known - false[kind], false[kind], asked=0.95, note=note)
    for name, make_other in OTHERS.items():
        left = sum(not finds(make_other(draw)[0]) for _ in range(PER_KIND))
        yield Row(f"left as it is: {name}", PER_KIND, left, 0, asked=0.99)


def real_texts(folder: Path, draw: Draw) -> Iterator[str]:
    """Texts of packages, the first 400,000 characters of each package's."""
    left: dict[str, int] = defaultdict(lambda: SAMPLE_CHARACTERS)
    for package, _, content in package_files(folder, PACKAGES, FILES):
        if left[package] <= 0 or b"\0" in content:
            continue
        text = content.decode("utf-8", "replace")[:40_000]
        left[package] -= len(text)
        yield text


def finds(text: str) -> list[tuple[str, str]]:
    """Kind and text of each place that is masked."""
    return [(kind, text[start:end]) for kind, (_, searches) in KINDS.items() for find in searches for start, end in find(text, 31)]


def digest(value: str) -> str:
    """First 12 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _within(draw: Draw, texts: list[str], line: str) -> str:
    """`line` between two lines of a real text."""
    lines = draw.choice(texts).split("\n")
    place = draw.randrange(len(lines))
    return "\n".join([*lines[max(0, place - 3) : place], line, *lines[place : place + 3]])


def _chars(draw: Draw, n: int, alphabet: str = LETTERS) -> str:
    return "".join(draw.choices(alphabet, k=n))


def _digits(draw: Draw, n: int) -> str:
    return _chars(draw, n, string.digits)


def _said(draw: Draw, value: str, *frames: str) -> tuple[str, str]:
    return draw.choice(frames or ("{}", "Use {} for this.", "see {}, or ask.", "value = '{}'", "({})")).format(value), value


def _phone_number(draw: Draw) -> phonenumbers.PhoneNumber:
    """A valid number of one of the regions: an example of the numbering plan with other last digits."""
    while True:
        kind = draw.choice((phonenumbers.PhoneNumberType.FIXED_LINE, phonenumbers.PhoneNumberType.MOBILE))
        number = phonenumbers.example_number_for_type(draw.choice(REGIONS), kind)
        assert number is not None
        national = str(number.national_number)
        number.national_number = int(national[:-4] + _digits(draw, 4))
        if phonenumbers.is_valid_number(number):
            return number


def _phone(layout: str, *frames: str) -> Callable[[Draw], tuple[str, str]]:
    return lambda draw: _said(
        draw, phonenumbers.format_number(_phone_number(draw), getattr(phonenumbers.PhoneNumberFormat, layout)), *frames
    )


def _north_american(draw: Draw) -> tuple[str, str]:
    while True:
        area, office, line = draw.choice(("212", "415", "650", "312", "206", "617", "713", "404")), draw.randint(200, 999), _digits(draw, 4)
        layout = draw.choice(("({}) {}-{}", "{}-{}-{}", "{}.{}.{}", "1-{}-{}-{}", "+1 {} {} {}", "+1-{}-{}-{}", "({}){}-{}"))
        if phonenumbers.is_valid_number(phonenumbers.parse(f"{area}{office}{line}", "US")):
            return _said(draw, layout.format(area, office, line), "Call {} today.", "{}", "Office {}, second floor", "(voice: {})")


def _email(draw: Draw) -> tuple[str, str]:
    name = draw.choice(("jane.doe", "j_smith", "bob+lists", "müller", "info", "x.y-z", "k9")) + draw.choice(("", _digits(draw, 2)))
    host = draw.choice(("mail.", "", "cs.")) + _chars(draw, draw.randint(3, 9), string.ascii_lowercase)
    address = f"{name}@{host}.{draw.choice(('com', 'org', 'de', 'co.uk', 'fr', 'edu', 'io', 'jp', 'museum', 'online'))}"
    return _said(draw, address, "Jane <{}>", "write to {}.", "mailto:{}", 'author = "{}"', "{}", "E-Mail: {}")


def _ipv4(draw: Draw) -> tuple[str, str]:
    parts = (
        draw.choice((5, 23, 46, 62, 81, 93, 104, 151, 178, 185, 195, 212)),
        draw.randint(1, 254),
        draw.randint(0, 255),
        draw.randint(1, 254),
    )
    frames = (
        "from {} port 22",
        "ping {}",
        "http://{}/",
        "server {};",
        "{} - - [10/Oct/2000:13:55:36]",
        "ip = '{}'",
        "host {}",
        "{}:8080 is up",
    )
    return _said(draw, ".".join(map(str, parts)), *frames)


def _ipv6(draw: Draw) -> tuple[str, str]:
    groups = [draw.choice(("2a00", "2a02", "2600", "2607", "2400")), *(f"{draw.randrange(1, 65536):x}" for _ in range(7))]
    short = ":".join(groups[:3]) + "::" + groups[7]
    return _said(draw, draw.choice((":".join(groups), short)), "at {}", "{} up", "[{}]:443", "addr {}")


def _iban(draw: Draw) -> tuple[str, str]:
    country = draw.choice(sorted(IBAN_LENGTHS))
    account = _digits(draw, IBAN_LENGTHS[country] - 4)
    rest = int("".join(str(int(char, 36)) for char in f"{account}{country}00")) % 97
    number = f"{country}{98 - rest:02d}{account}"
    spaced = " ".join(number[i : i + 4] for i in range(0, len(number), 4))
    return _said(draw, draw.choice((number, spaced)), "IBAN {}", "Konto: {}.", "{}", "pay to {}, please")


def _card(draw: Draw) -> tuple[str, str]:
    start, length = draw.choice((("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("37", 15), ("6011", 16), ("34", 15)))
    body = start + _digits(draw, length - len(start) - 1)
    total = sum(sum(divmod(int(digit) * (2 if i % 2 == 0 else 1), 10)) for i, digit in enumerate(reversed(body)))
    number, sign = body + str(-total % 10), draw.choice(" -")
    cuts = (0, 4, 8, 12, 16) if length == 16 else (0, 4, 10, 15)
    grouped = sign.join(number[a:b] for a, b in pairwise(cuts))
    return draw.choice(
        (_said(draw, grouped, "{}", "charged {} twice", "No. {}"), _said(draw, number, "Visa {}", "credit card: {}", "card number {}"))
    )


def _token(make: Callable[[Draw], str], *frames: str) -> tuple[str, Callable[[Draw], tuple[str, str]]]:
    return "key", lambda draw: _said(draw, make(draw), *frames)


def _jwt(draw: Draw) -> str:
    return f"eyJ{_chars(draw, 33)}.eyJ{_chars(draw, 60)}.{_chars(draw, 43)}"


def _pem(draw: Draw) -> str:
    kind = draw.choice(("RSA ", "EC ", "OPENSSH ", ""))
    body = "\n".join(_chars(draw, 64, LETTERS + "+/") for _ in range(12))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


PLANTED: dict[str, tuple[str, Callable[[Draw], tuple[str, str]]]] = {  # name -> kind and what makes a line and the personal data in it
    "phone: international, grouped": ("phone", _phone("INTERNATIONAL")),
    "phone: international, E.164": ("phone", _phone("E164")),
    "phone: national, labelled": (
        "phone",
        _phone("NATIONAL", "Tel.: {}", "Phone: {}", "Fax {}", "Telefon: {}", "tél. {}", "telephone number {}"),
    ),
    "phone: North American": ("phone", _north_american),
    "email": ("email", _email),
    "ip: version 4": ("ip", _ipv4),
    "ip: version 6": ("ip", _ipv6),
    "iban": ("iban", _iban),
    "card": ("card", _card),
    "key: AWS": _token(lambda draw: "AKIA" + _chars(draw, 16, string.ascii_uppercase + string.digits)),
    "key: AWS secret": _token(
        lambda draw: "aB3" + _chars(draw, 37, LETTERS + "+/"), "aws_secret_access_key = {}", 'AWS_SECRET_ACCESS_KEY="{}"'
    ),
    "key: GitHub": _token(lambda draw: draw.choice(("ghp_", "gho_", "ghs_", "ghu_")) + _chars(draw, 36)),
    "key: GitLab": _token(lambda draw: "glpat-" + _chars(draw, 20)),
    "key: Slack": _token(lambda draw: f"xox{draw.choice('bp')}-{_digits(draw, 12)}-{_digits(draw, 12)}-{_chars(draw, 24)}"),
    "key: Slack hook": _token(
        lambda draw: f"T{_chars(draw, 8, string.ascii_uppercase)}/B{_chars(draw, 8, string.digits)}/{_chars(draw, 24)}",
        "https://hooks.slack.com/services/{}",
    ),
    "key: OpenAI": _token(lambda draw: draw.choice(("sk-", "sk-proj-")) + "a1" + _chars(draw, 46)),
    "key: Hugging Face": _token(lambda draw: "hf_" + _chars(draw, 34, string.ascii_letters)),
    "key: Google": _token(lambda draw: "AIza" + _chars(draw, 35)),
    "key: JSON web token": _token(_jwt),
    "key: private key": _token(_pem, "{}", "key = '''{}'''"),
    "key: password in a URL": _token(
        lambda draw: _chars(draw, draw.randint(8, 20), LETTERS + "!_-$"[:3]),
        "postgres://app:{}@db.internal:5432/x",
        "https://bob:{}@host.org/",
    ),
}
OTHERS: dict[str, Callable[[Draw], tuple[str, str]]] = {  # what looks like personal data and is none
    "decimals": lambda draw: _said(draw, f"{draw.choice('+-')}{draw.randint(0, 9)}.{_digits(draw, 10)} e-{draw.randint(1, 31)}", "k = {}"),
    "digits in groups of three": lambda draw: _said(
        draw, f"{draw.randint(1, 9)}.{_digits(draw, 3)} {_digits(draw, 3)} {_digits(draw, 4)}", "m {} kg"
    ),
    "integers": lambda draw: _said(draw, f"{draw.choice('+-')}{draw.randrange(10**9)}", "x = {}", "[{}, 0]"),
    "times in seconds": lambda draw: _said(draw, str(draw.randrange(10**9, 2 * 10**9)), "at {}", "call {} times"),
    "versions": lambda draw: _said(
        draw,
        ".".join(str(draw.randint(0, 30)) for _ in range(4)),
        "version {}",
        "upgrade to foo {}.",
        "Linux {} is out",
        "v{}",
        "OID {}",
        "pkg ({})",
    ),
    "sections": lambda draw: _said(draw, ".".join(str(draw.randint(1, 20)) for _ in range(4)), "{}. Title", "see section {}"),
    "dates": lambda draw: _said(
        draw, f"{draw.randint(1900, 2030)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}", "{} 12:34:56", "on {}"
    ),
    "ISBN": lambda draw: _said(draw, f"978-{draw.randint(0, 9)}-{_digits(draw, 4)}-{_digits(draw, 4)}-{_digits(draw, 1)}", "ISBN {}"),
    "DOI and arXiv": lambda draw: _said(
        draw, f"10.{_digits(draw, 4)}/s{_digits(draw, 5)}-{_digits(draw, 3)}", "doi:{}", "arXiv:2406.17557, {}"
    ),
    "coordinates": lambda draw: _said(draw, f"{draw.uniform(-90, 90):.5f}, {draw.uniform(-180, 180):.5f}", "at {}"),
    "hashes": lambda draw: _said(draw, _chars(draw, 40, "0123456789abcdef"), "commit {}", "sha1: {}"),
    "hexadecimal": lambda draw: _said(draw, " ".join(_digits(draw, 2) for _ in range(8)), "dump {}", "0000 {}"),
    "files and packages": lambda draw: _said(
        draw,
        draw.choice(("logo@2x.png", "foo@1.2.3", "@scope/pkg@4.5.6", "getty@tty1.service", "icon@3x.jpg", "git@github.com:a/b.git")),
        "use {}",
    ),
    "private addresses": lambda draw: _said(
        draw,
        draw.choice(("10.{}.{}.1", "192.168.{}.{}", "127.0.{}.{}", "192.0.2.{1}", "203.0.113.{1}")).format(
            draw.randint(0, 255), draw.randint(1, 254)
        ),
        "host {}",
    ),
    "16 digits": lambda draw: _said(draw, _digits(draw, 16), "id {}", "= {}", "ticket {}"),
}
