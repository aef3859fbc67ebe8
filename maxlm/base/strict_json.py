"""Strict JSON lines: NaN and infinity become null; when reading, a torn line is skipped."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pydantic_core import PydanticSerializationError, from_json, to_json

from maxlm.base.paths import open_regular


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON, in one line without `indent`: arrays of one element become numbers, unknown types their text."""
    try:
        return to_json(value, indent=indent, inf_nan_mode="null", fallback=_plain).decode()
    except PydanticSerializationError:  # of text that is no UTF-8, such as the path of a folder in an error's message
        return to_json(_encodable(value), indent=indent, inf_nan_mode="null", fallback=_plain).decode()


def encodable(text: str) -> str:
    """`text` with ? for lone surrogates, which JSON and names of files may hold, and UTF-8 may not."""
    return text.encode(errors="replace").decode()


def _encodable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return encodable(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else str(value)  # numpy and jax scalars


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for a number that a float can hold; in records before they are written also NaN and infinity."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max)


def is_finite(value: Any) -> TypeGuard[int | float]:
    """True for a number as our files hold it."""
    return is_number(value) and math.isfinite(value)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines; {} for a line that is none, as a killed process leaves behind."""
    return (item for _, item in read_lines(path))


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Objects as in `read_objects`, each with its line, newline included."""
    with open_regular(path) as file:
        for line in file:
            if line.strip():
                yield line, read_object(line)


def read_object(line: bytes) -> dict[str, Any]:
    """The object of a line; {} if it is none."""
    try:
        value = from_json(line)
    except ValueError:  # also for a lone surrogate, which json takes: it is four times as slow
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            return {}
    return value if isinstance(value, dict) else {}
