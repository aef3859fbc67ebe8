"""Compiled programs on disk: a JSON file of figures and the compressed text of the program, by key. Losing them costs only time."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from maxlm.telemetry.atomic import replacing


def folder() -> Path:
    """`planning` in $MAXLM_CACHE_DIR, by default ~/.cache/maxlm."""
    return Path(os.environ.get("MAXLM_CACHE_DIR") or Path.home() / ".cache" / "maxlm") / "planning"


def read(key: str) -> tuple[dict[str, Any], str] | None:
    """(figures, text) as written; None if absent or damaged."""
    try:
        figures = json.loads((folder() / f"{key}.json").read_text(encoding="utf-8"))
        text = gzip.decompress((folder() / f"{key}.hlo.gz").read_bytes()).decode()
    except (OSError, ValueError, EOFError, zlib.error):
        return None
    return (figures, text) if isinstance(figures, dict) else None


def write(key: str, figures: dict[str, Any], text: str) -> None:
    """Write `figures` and `text`. A folder that is not writable is ignored."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with replacing(folder() / f"{key}.hlo.gz") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
        with replacing(folder() / f"{key}.json") as file:  # last: if it exists, both do
            file.write(json.dumps(figures).encode())
    except OSError:
        return
