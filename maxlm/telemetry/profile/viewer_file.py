"""A timeline in Chrome's trace event format, gzipped, as Perfetto and chrome://tracing open it."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.profile.attribution import Profile
from maxlm.telemetry.profile.scopes import TITLES

_CHUNK = 2000  # events that are written at a time


def write_viewer_file(path: Path, profile: Profile) -> None:
    """Write the longest operations, by device and line, and what the training loop marks on the host. Raises OSError."""
    with replacing(path) as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as stream:
        stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        lines: list[str] = []
        first = True
        for event in _events(profile):
            lines.append(event)
            if len(lines) == _CHUNK:
                stream.write(("" if first else ",\n") + ",\n".join(lines))
                first, lines = False, []
        if lines:
            stream.write(("" if first else ",\n") + ",\n".join(lines))
        stream.write(f'\n],"otherData":{{"events_left_out":{profile.drawn.left_out}}}}}\n')


def _events(profile: Profile) -> Iterator[str]:
    drawn = profile.drawn
    for number, name in enumerate(drawn.track):
        yield json.dumps({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
    yield json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "devices"}})
    yield json.dumps({"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "training loop"}})
    tails = [
        json.dumps({"name": op.name, "cat": op.scope, "args": {"part": TITLES[op.scope], "phase": op.phase, "op_name": op.where}})[1:]
        for op in profile.ops
    ]
    if drawn.row:
        order = drawn.start[0].argsort(kind="stable")
        for start, length, row, track in zip(
            *(held[0][order].tolist() for held in (drawn.start, drawn.length, drawn.row, drawn.on)), strict=True
        ):
            yield f'{{"ph":"X","pid":1,"tid":{track},"ts":{start / 1e6:.6f},"dur":{length / 1e6:.6f},{tails[row]}'
    for name, spans in profile.host.items():
        for start, end in zip(spans.start_M.tolist(), spans.end_M.tolist(), strict=True):
            yield json.dumps({"ph": "X", "pid": 2, "tid": 0, "ts": start / 1e6, "dur": (end - start) / 1e6, "name": name})
