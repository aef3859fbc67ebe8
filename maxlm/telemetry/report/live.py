"""A report that follows its runs: a page on a port of this machine, made anew while they write."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maxlm.config.errors import UserError
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.text_server import Text, TextServer

HOST = "127.0.0.1"  # other machines come through a tunnel of ssh, which asks them who they are
NAMES = frozenset({"127.0.0.1", "localhost"})
LEAST_S = 2.0  # between two pages
BUSY = 0.1  # of the time, at most, goes into pages: the training beside it keeps the rest
ANSWER_S = 60.0  # for a page through a slow tunnel


class LiveReport:
    """The newest page, and its version. Reading them in another thread is safe."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Make the first page. Raises UserError."""
        self._run_dirs = run_dirs
        self._seen: list[tuple[int, int] | None] = []
        self.page = self.version = ""
        self.update()

    def update(self) -> float:
        """Make a new page if a file has changed; return the seconds that it took. Raises UserError, and the page stays."""
        began, seen = time.monotonic(), list(_state(self._run_dirs))
        if self.page and seen == self._seen:
            return 0.0
        version = str(time.time_ns())
        self.page = render([load_run(path) for path in self._run_dirs], version)
        self.version = version
        self._seen = seen  # as it was before reading: what is written meanwhile makes the next page; after a failure, the next attempt
        return time.monotonic() - began


def serve(run_dirs: Sequence[Path], port: int, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Show the runs until a signal ends the process; `port` 0 is any free one. Raises UserError for what is no run, and a port in use."""
    report = LiveReport(run_dirs)
    server = TextServer(HOST, port, names=NAMES, request_s=ANSWER_S)
    try:
        server.bind()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--port {port}: {HOST}:{port} cannot be listened at ({reason}); give another, or none for any free one") from error
    server.start({"/": Text("text/html; charset=utf-8", lambda: report.page), "/version": Text("text/plain", lambda: report.version)})
    say(f"http://{HOST}:{server.address[1]}/ shows the report as it grows; ctrl-C ends it")
    try:
        follow(report, server, warn)
    finally:
        server.close()


def follow(report: LiveReport, server: TextServer, warn: Callable[[str], None]) -> None:
    """Keep the page new while anyone asks for it. A run that cannot be read is told once; its last page stays."""
    asked, told, took_s = 0, "", 0.0
    while True:
        time.sleep(max(LEAST_S, took_s / BUSY))
        if server.served == asked:
            continue
        asked = server.served
        try:
            took_s, told = report.update(), ""
        except (UserError, OSError) as error:
            if str(error) != told:
                warn(f"maxlm: {error}; the page of before stays")
            told = str(error)


def _state(run_dirs: Sequence[Path]) -> Iterator[tuple[int, int] | None]:
    """Time and size of each file that a report reads and that grows; None for one that is missing."""
    for path in run_dirs:
        run = RunDirectory(path, primary=False)
        results = sorted(run.evaluations.glob("*.json")) if run.evaluations.is_dir() else []
        for file in (run.config, run.metrics, run.events, run.routing, run.supervisor, *results):
            try:
                found = file.stat()
            except OSError:
                yield None
            else:
                yield found.st_mtime_ns, found.st_size
