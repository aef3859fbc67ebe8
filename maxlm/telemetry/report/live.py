"""A report that follows its runs: a page on a port of this machine, made anew while they write."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from maxlm.base.errors import UserError
from maxlm.base.strict_json import encodable
from maxlm.telemetry.report.load import check_distinct, load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.run_dir import RunDirectory

HOST = "127.0.0.1"  # other machines connect through a tunnel of ssh, which authenticates them
NAMES = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)  # a site with another name that resolves to here gets no answer
LEAST_S = 2.0  # between two pages
BUSY = 0.1  # share of the time that goes into pages, at most: training keeps the rest
ANSWER_S = 60.0  # that a connection may be silent: a slow tunnel takes its time

log = logging.getLogger(__name__)


class LiveReport:
    """The newest page, its version, and `problem`: the reason why it is not newer, or "". Reading them in another thread is safe."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Make the first page. Raises UserError."""
        check_distinct(run_dirs)
        self._run_dirs = run_dirs
        self.page = self.version = self.problem = ""
        self._make_page(list(_state(run_dirs)))

    def update(self) -> float:
        """Make a new page if a file has changed; return the seconds that it took. After a failure the page stays, and the next call tries
        again.
        """
        began, seen = time.monotonic(), list(_state(self._run_dirs))
        if seen == self._seen and not self.problem:
            return 0.0
        try:
            self._make_page(seen)
        except Exception as error:
            self.problem = f"the report cannot be made: {encodable(str(error)).partition(chr(10))[0] or type(error).__name__}"
        return time.monotonic() - began

    def _make_page(self, seen: list[tuple[int, int] | None]) -> None:
        version = str(time.time_ns())
        self.page = render([load_run(path) for path in self._run_dirs], version)
        self.version, self.problem = version, ""
        self._seen = seen  # as it was before reading: a file written meanwhile makes the next page


class PageServer(ThreadingHTTPServer):
    """HTTP server of a live report: the page at `/`, its version and its problem at `/version`. `served` counts answers."""

    def __init__(self, report: LiveReport, port: int) -> None:
        """Listen at `port`, any free one if it is 0. Raises OSError."""
        self.report, self.served = report, 0
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep a broken connection out of the output."""
        log.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = ANSWER_S

    def do_GET(self) -> None:
        """Answer with the page, or with its version."""
        report = self.server.report
        texts = {"/": ("text/html", report.page), "/version": ("text/plain", f"{report.version}\n{report.problem}".rstrip("\n"))}
        hosts = self.headers.get_all("Host", [])
        code = 403 if len(hosts) != 1 or not NAMES.fullmatch(hosts[0]) else 200 if self.path in texts else 404
        kind, text = texts[self.path] if code == 200 else ("text/plain", "")
        self.server.served += code == 200
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def serve(run_dirs: Sequence[Path], port: int, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Show the runs until a signal ends the process; `port` 0 is any free one. Raises UserError for what is no run, and a port in use."""
    report = LiveReport(run_dirs)
    try:
        server = PageServer(report, port)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--port {port}: {HOST}:{port} cannot be listened at ({reason}); give another, or none for any free one") from error
    with server:
        threading.Thread(target=server.serve_forever, name="live-report", daemon=True).start()
        say(f"http://{HOST}:{server.server_port}/ shows the report as it grows; ctrl-C ends it")
        try:
            follow(report, server, warn)
        finally:
            server.shutdown()


def follow(report: LiveReport, server: PageServer, warn: Callable[[str], None]) -> None:
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
