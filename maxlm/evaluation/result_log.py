"""Results of finished requests, appended to a file as they come, so that an evaluation goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.evaluation.requests import Request
from maxlm.telemetry.atomic import AppendFile
from maxlm.telemetry.strict_json import dumps, read_objects


class ResultLog:
    """One file a set of requests and weights: a JSON line a finished request. A line that a kill has torn counts as missing."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of the file; None keeps nothing."""
        self.known: dict[int, dict[str, Any]] = {}
        self._file = None if path is None else AppendFile(path)
        if path is not None and path.is_file():
            for item in read_objects(path):
                if isinstance(item.get("request"), int) and None not in item.values():
                    self.known[item["request"]] = item

    def append(self, request: int, values: Mapping[str, Any]) -> None:
        """Add the result of a request. Raises OSError."""
        self.known[request] = dict(values)
        if self._file is not None:  # the newline comes first: it ends the remains of a torn line
            self._file.append(b"\n" + dumps({"request": request, **values}).encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def key_of(settings: Mapping[str, Any], requests: Sequence[Request]) -> str:
    """Digest of requests, in their order, and of all that their results depend on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for request in requests:
        digest.update(np.array([len(request.context), len(request.continuation)], np.int64).tobytes())
        digest.update(np.array(request.context + request.continuation, np.int64).tobytes())
    return digest.hexdigest()[:32]
