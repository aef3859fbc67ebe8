"""Compiled programs on disk, each bound to its key: what does not carry its key's digest is no entry. Losing one costs only time.

A file that is damaged, half written or renamed to another key is compiled again; it is never loaded.
"""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from maxlm.config.paths import read_file
from maxlm.telemetry.atomic import replacing

_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 2**31


def seal(key: str, content: bytes) -> bytes:
    """`content` after the digest of key and content."""
    return hashlib.sha256(key.encode() + b"\0" + content).digest() + content


def unseal(key: str, sealed: bytes) -> bytes | None:
    """The content that `seal` was given with `key`; None if these bytes are anything else."""
    content = sealed[_DIGEST:]
    return content if sealed == seal(key, content) else None


def folder() -> Path:
    """`planning` in $MAXLM_CACHE_DIR, by default ~/.cache/maxlm."""
    return Path(os.environ.get("MAXLM_CACHE_DIR") or Path.home() / ".cache" / "maxlm") / "planning"


def read(key: str) -> tuple[dict[str, Any], str] | None:
    """(figures, text) of the program as written; None if absent or damaged."""
    try:
        content = unseal(key, read_file(_path(key), _MOST_BYTES))
    except OSError:
        return None
    return None if content is None else tuple(json.loads(gzip.decompress(content)))


def write(key: str, figures: dict[str, Any], text: str) -> None:
    """Write `figures` and `text`. A folder that is not writable is ignored."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with replacing(_path(key)) as file:
            file.write(seal(key, gzip.compress(json.dumps([figures, text]).encode(), mtime=0)))
    except OSError:
        return


def _path(key: str) -> Path:
    return folder() / f"{key}.program"
