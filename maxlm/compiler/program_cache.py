"""Compiled programs on disk, each bound to its key: a file without the digest of its key is ignored. Losing an entry costs only time.

A file that is damaged, half written or renamed to another key is compiled again; it is never loaded.
"""

import functools
import gzip
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from maxlm.base.atomic import replacing
from maxlm.base.paths import expand_home, read_file, user_path

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 2**31


def seal(key: str, content: bytes) -> bytes:
    """`content` after the digest of key and content."""
    return hashlib.sha256(key.encode() + b"\0" + content).digest() + content


def unseal(key: str, sealed: bytes) -> bytes | None:
    """The content that `seal` was given with `key`; None if these bytes are anything else."""
    content = sealed[_DIGEST:]
    return content if sealed == seal(key, content) else None


def default_root() -> Path | None:
    """~/.cache/maxlm; None without a home folder, as for a container's user without a passwd entry. Logs the missing folder once."""
    try:
        return Path(expand_home("~")) / ".cache" / "maxlm"
    except ValueError:
        _say_no_home()
        return None


@functools.cache
def _say_no_home() -> None:
    _log.warning("no home folder is known, so compiled programs are not kept: set HOME, or JAX_COMPILATION_CACHE_DIR and MAXLM_CACHE_DIR")


def folder() -> Path | None:
    """`planning` in $MAXLM_CACHE_DIR, by default ~/.cache/maxlm. Raises UserError for a `~user` that is not known."""
    given = os.environ.get("MAXLM_CACHE_DIR")
    root = user_path(given) if given else default_root()
    return None if root is None else root / "planning"


def read(key: str) -> tuple[dict[str, Any], str] | None:
    """(figures, text) of the program as written; None if absent or damaged."""
    try:
        content = None if (path := _path(key)) is None else unseal(key, read_file(path, _MOST_BYTES))
    except OSError:
        return None
    return None if content is None else tuple(json.loads(gzip.decompress(content)))


def write(key: str, figures: dict[str, Any], text: str) -> None:
    """Write `figures` and `text`. A folder that is not writable is ignored."""
    try:
        if (path := _path(key)) is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(seal(key, gzip.compress(json.dumps([figures, text]).encode(), mtime=0)))
    except OSError:
        return


def _path(key: str) -> Path | None:
    return None if (place := folder()) is None else place / f"{key}.program"
