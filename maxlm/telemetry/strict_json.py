"""Strict JSON lines: NaN and infinity become null; when reading, a torn line is skipped."""

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """`value` in JSON types: arrays of one element become numbers, unknown types their text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # numpy and jax scalars
        return plain(value.item())
    return str(value)


def dumps(value: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """Objects of a file of JSON lines; None for a line that is none, as a killed process leaves behind."""
    return (item for _, item in read_lines(path))


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Objects as in `read_objects`, each with its line, newline included."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line, _object(line)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None
