"""A report that follows its runs: a page on a port of this machine, made anew while they write."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from maxlm.config.errors import UserError
from maxlm.telemetry.report.load import Run, check_distinct, load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import encodable
from maxlm.telemetry.text_server import Text, TextServer

HOST = "127.0.0.1"  # other machines come through a tunnel of ssh, which asks them who they are
NAMES = frozenset({"127.0.0.1", "localhost"})
LEAST_S = 2.0  # between two pages
BUSY = 0.1  # of the time, at most, goes into pages: the training beside it keeps the rest
ANSWER_S = 60.0  # for a page through a slow tunnel


class LiveReport:
    """The newest page, its version, and `problem`: why it is not of now, or "". Reading them in another thread is safe."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Make the first page. Raises UserError."""
        check_distinct(run_dirs)
        self._run_dirs = run_dirs
        self._seen: list[tuple[int, int] | None] = []
        self._runs: dict[Path, Run] = {}  # as last read
        self._failed: dict[Path, str] = {}  # sentences about folders that cannot be read
        self._since: dict[Path, str] = {}  # time from which on
        self.page = self.version = self.problem = ""
        self._make_page(list(_state(run_dirs)))

    def update(self) -> float:
        """Make a new page if a file has changed; return the seconds that it took. A run that cannot be read is shown as it last was; after
        any other failure the page stays. Either is the `problem`.
        """
        began = time.monotonic()
        try:
            seen = list(_state(self._run_dirs))
            if seen == self._seen and not self.problem:
                return 0.0
            self._make_page(seen)
        except Exception as error:
            self.problem = f"the report cannot be made: {_line(error)}"
        return time.monotonic() - began

    def _make_page(self, seen: list[tuple[int, int] | None]) -> None:
        failed = dict(filter(None, map(self._read, self._run_dirs)))
        if seen != self._seen or failed != self._failed:
            shown = [self._runs[path] for path in self._run_dirs]
            noted = [replace(run, notes=[*run.notes, failed[run.path]]) if run.path in failed else run for run in shown]
            version = str(time.time_ns())
            self.page = render(noted, version)
            self.version = version
        self._seen = seen  # as it was before reading: what is written meanwhile makes the next page; after a failure, the next attempt
        self._failed, self.problem = failed, "; ".join(failed.values())

    def _read(self, path: Path) -> tuple[Path, str] | None:
        """Read a run; if that fails, the folder and a sentence about it. Raises UserError for one that has never been read."""
        try:
            self._runs[path] = load_run(path)
        except Exception as error:
            if path not in self._runs:
                raise
            since = self._since.setdefault(path, time.strftime("%H:%M UTC", time.gmtime()))
            return path, f"{encodable(self._runs[path].name)} cannot be read since {since}: {_line(error)}"
        self._since.pop(path, None)
        return None


def serve(run_dirs: Sequence[Path], port: int, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Show the runs until a signal ends the process; `port` 0 is any free one. Raises UserError for what is no run, and a port in use."""
    report = LiveReport(run_dirs)
    server = TextServer(HOST, port, names=NAMES, request_s=ANSWER_S)
    try:
        server.bind()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--port {port}: {HOST}:{port} cannot be listened at ({reason}); give another, or none for any free one") from error
    state = Text("text/plain; charset=utf-8", lambda: f"{report.version}\n{report.problem}".rstrip("\n"))
    server.start({"/": Text("text/html; charset=utf-8", lambda: report.page), "/version": state})
    say(f"http://{HOST}:{server.address[1]}/ shows the report as it grows; ctrl-C ends it")
    try:
        follow(report, server, warn)
    finally:
        server.close()


def follow(report: LiveReport, server: TextServer, warn: Callable[[str], None]) -> None:
    """Keep the page new while anyone asks for it. What cannot be read is told once."""
    asked, told, took_s = 0, "", 0.0
    while True:
        time.sleep(max(LEAST_S, took_s / BUSY))
        if server.served == asked:
            continue
        asked = server.served
        took_s = report.update()
        if report.problem not in ("", told):
            warn(f"maxlm: {report.problem}; what was read before stays")
        told = report.problem


def _line(error: Exception) -> str:
    return encodable(str(error)).partition("\n")[0] or type(error).__name__


def _state(run_dirs: Sequence[Path]) -> Iterator[tuple[int, int] | None]:
    """Time and size of each file that a report reads and that grows; None for one that is missing."""
    for path in run_dirs:
        run = RunDirectory(path, primary=False)
        results = sorted(run.evaluations.glob("*.json")) if run.evaluations.is_dir() else []
        for file in (run.config, run.metrics, run.events, run.routing, run.supervisor, run.samples, *results):
            try:
                found = file.stat()
            except OSError:
                yield None
            else:
                yield found.st_mtime_ns, found.st_size
