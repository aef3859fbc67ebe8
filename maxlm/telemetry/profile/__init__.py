"""A trace of `jax.profiler`, reduced to one page: where the time of a training step goes, by part of the model."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from maxlm.base.atomic import replacing, write_text
from maxlm.base.errors import error_kind
from maxlm.telemetry.profile.attribution import Profile, profile_of
from maxlm.telemetry.profile.page import Facts, render
from maxlm.telemetry.profile.scopes import TITLES
from maxlm.telemetry.profile.xplane import Trace
from maxlm.telemetry.run_dir import PROFILE_PAGE

PAGE, VIEWER_FILE, TRACE = PROFILE_PAGE, "trace.json.gz", "trace.xplane.pb"

__all__ = ["PAGE", "TRACE", "VIEWER_FILE", "Facts", "Profile", "reduce_trace"]


def reduce_trace(trace: Path, folder: Path, facts: Facts) -> Profile:
    """Write the page and the viewer's file of a trace (.xplane.pb) to `folder`. Raises UserError for a trace that cannot be read, or a
    folder that cannot be written.
    """
    opened = Trace(trace)
    profile, warned = profile_of(opened), [f"The profiler warns: {warning}" for warning in opened.warnings]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_viewer_file(folder / VIEWER_FILE, profile)
        write_text(folder / PAGE, render(profile, replace(facts, notes=(*facts.notes, *warned))))
    except OSError as error:
        raise error_kind(error)(f"{folder}: the profile cannot be written ({error.strerror or error}); choose another folder.") from error
    return profile


def _write_viewer_file(path: Path, profile: Profile) -> None:
    """Write a timeline in Chrome's trace event format, which Perfetto opens: the longest operations by device and line, and the marks of
    the training loop on the host. Raises OSError.
    """
    with replacing(path) as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as stream:
        stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(_events(profile)):
            stream.write(event if number == 0 else f",\n{event}")
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
