"""URLs as they are compared: with lists of domains and URLs, and with each other."""

import contextlib
import re
from urllib.parse import urlsplit

# What urlsplit() splits in the same way, at seven times the speed.
PLAIN_URL = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]{0,4})?((?:/[!-\"$->@-~]*)?)(?:[?#][!-~]*)?\Z")
OTHER_SCHEME = re.compile(r"[a-z][a-z0-9+-]*:(?!//|[0-9]*(?:[/?#]|\Z))", re.IGNORECASE)  # mailto:, urn:, data:; a port is none
HOST = re.compile(r"[^\s.][^\s]*\.(?:[^\W\d_]{2,}|xn--[a-z0-9-]+)")  # of a URL without a scheme
DEFAULT_PORTS = {"http": 80, "https": 443}
# Parameters that tell where a visitor came from (Google Analytics, "URL builders"; click identifiers of advertisers).
TRACKING = re.compile(r"(utm_[^=]*|gclid|dclid|fbclid|msclkid|mc_[ce]id)(=|\Z)", re.IGNORECASE)


def split_url(url: str) -> tuple[str, str]:
    """Host (ASCII, lower case, without www.) and path (without / at the end) of a URL or of a host name; empty where it has none."""
    plain = PLAIN_URL.match(url)
    if plain is not None:
        return plain[1].rstrip(".").lower().removeprefix("www."), plain[2].rstrip("/")
    url = url.strip()
    try:
        parts = urlsplit(url if "://" in url else f"//{url.removeprefix('//')}")
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        return "", url
    if not host.isascii():
        with contextlib.suppress(UnicodeError):  # no name that a resolver knows: compared as it is
            host = host.encode("idna").decode("ascii")
    return host.lower().removeprefix("www."), parts.path.rstrip("/")


def is_url(text: str) -> bool:
    """True for a text with a scheme and a host or path, or with a host that has a dot; False for `null`, `N/A`, `-` or `about:blank`."""
    _, sign, rest = text.partition("://")
    if sign:
        return any(map(str.isalnum, rest))
    return not OTHER_SCHEME.match(text.strip()) and HOST.fullmatch(split_url(text)[0]) is not None


def url_key(url: str) -> str:
    """The URL as deduplication compares it: without http:// or https:// and their default ports, www., the fragment, tracking parameters
    and slashes at the end of the path; the host in lower case and ASCII. Path and other parameters stay as they are.
    """
    host, path = split_url(url)
    try:
        parts = urlsplit(url.strip() if "://" in url else f"//{url.strip().removeprefix('//')}")
        port = parts.port
    except ValueError:
        return url.strip()
    if not host or OTHER_SCHEME.match(url.strip()):
        return url.strip()
    scheme = "" if parts.scheme in ("", *DEFAULT_PORTS) else f"{parts.scheme}://"
    place = "" if port is None or port == DEFAULT_PORTS.get(parts.scheme or "http") else f":{port}"
    query = "&".join(one for one in parts.query.split("&") if one and not TRACKING.match(one))
    return f"{scheme}{host}{place}{path}{'?' if query else ''}{query}"
