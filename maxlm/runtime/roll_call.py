"""The processes of a run meet at process 0 before jax starts, so that whoever did not come, or was told something else, is named.

jax's own service answers all of these by ending the process, with pages that name a number. Each process says who it is over a line of
its own (`maxlm.runtime.line`). Where they share a secret, nobody else takes part, and one that was told something else ends all. Without
one, anybody could say so: it is refused, and process 0 goes on waiting.
"""

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from maxlm.config.errors import ExitCode, UserError
from maxlm.runtime.cluster_env import Place, called, host_and_port
from maxlm.runtime.line import MAKE_SECRET, MAX_BYTES, MAX_NAME, SECRET, Line, LineError, Message, StrangerError
from maxlm.runtime.listening import MAX_VISITORS, Listening, OutOfFilesError
from maxlm.runtime.meeting import Meeting

RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would be a burden to whoever knows their names
ANSWER_SECONDS = 2.0  # for one that waits to answer that it is still there
ROUND_TRIP_SECONDS = 5.0  # for a connection, and for a greeting
MAX_TOLD = 5  # refusals that are told of
_TICK_SECONDS = 0.2
Say = Callable[[str], None]


class NotMetError(UserError):
    """Not all hosts are there. No input need be wrong, so the exit code is another."""

    exit_code = ExitCode.HOST_LOST


def meet(place: Place, seconds: float, secret: bytes = b"", say: Say = lambda text: None) -> Meeting:
    """Wait for all processes of `place`'s cluster, up to `seconds`; `say` is told whom process 0 refused.

    Raises UserError: process 0 cannot be reached, or at all of them alike: not all came, or they were told different things.
    """
    if place.process != 0:
        return _go_there(place, seconds, secret)
    if not secret:
        say(f"{SECRET} is not set, so anybody who reaches {place.address} may take part; set the same on all hosts: {MAKE_SECRET}")
    return _wait_for_all(place, seconds, secret, say)


@dataclass
class _Seat:
    """A process that has come, when it was asked whether it is still there, and when it answered: times of `time.monotonic`."""

    line: Line
    host: str
    asked: float | None = None
    answered: float | None = None
    rival: "_Seat | None" = None  # that says it is the same process

    def ask(self) -> None:
        """Ask whether it is still there, unless it was asked."""
        if self.asked is None:
            self.asked = time.monotonic()
            with contextlib.suppress(OSError):  # it is as one that does not answer
                self.line.send("ask")

    def forget_answer(self) -> None:
        """Let it be asked again."""
        self.asked = self.answered = None

    @property
    def overdue(self) -> bool:
        return self.asked is not None and self.answered is None and time.monotonic() > self.asked + ANSWER_SECONDS


class _Gathering:
    """State of process 0 while it waits for the others."""

    def __init__(self, place: Place, secret: bytes, listening: Listening, say: Say) -> None:
        self._place, self._trusted, self._listening, self._say = place, bool(secret), listening, say
        self._own = _own_name()
        self.seats: dict[int, _Seat] = {}
        self.conflict = ""  # why no process can go on
        self.refused: list[str] = []  # the first few who did not take part, and why
        self._n_refused = 0

    def complete(self) -> bool:
        """True if all have come, and have answered since that they are still there."""
        if len(self.seats) < self._place.count - 1:
            return False
        for seat in self.seats.values():
            seat.ask()
        return all(seat.answered is not None for seat in self.seats.values())

    def hosts(self) -> list[str]:
        """Names by process number, of those that have come; "" for others."""
        return [self._own, *(self.seats[number].host if number in self.seats else "" for number in range(1, self._place.count))]

    def turn(self, seconds: float) -> None:
        """Hear whoever comes or answers within `seconds`. Raises OutOfFilesError."""
        visitors, ready = self._listening.wait(min(seconds, _TICK_SECONDS))
        for visitor, said in visitors:
            if isinstance(said, StrangerError):
                self._refuse(visitor.line, f"a connection from {visitor.address}: {said}")
            elif said["kind"] != "hello":
                self._refuse(visitor.line, f"a connection from {visitor.address}: it did not say who it is")
            else:
                self._arrived(visitor.line, visitor.address, said)
        for number, seat in list(self.seats.items()):
            if seat.line in ready:
                self._heard(number, seat)
            if seat.overdue:
                self._vacate(number)

    def _arrived(self, line: Line, address: str, hello: Message) -> None:
        number, host, count = hello["process"], hello["host"], hello["count"]
        if count != self._place.count:
            why = f"{host} was told of {count} processes, and {self._own} of {self._place.count}: start all with the same number."
            self._disagrees(line, address, why)
        elif number == 0:
            self._disagrees(line, address, _same_number(number, self._own, host))
        elif number in self.seats:
            seat = self.seats[number]
            if seat.rival is not None:
                line.close()  # it tries again
            elif seat.answered is not None and time.monotonic() < seat.answered + ANSWER_SECONDS:
                self._disagrees(line, address, _same_number(number, seat.host, host))
            else:
                seat.rival = _Seat(line, host)
                seat.forget_answer()
                seat.ask()
        else:
            self._seat(number, _Seat(line, host))

    def _heard(self, number: int, seat: _Seat) -> None:
        try:
            message = seat.line.poll()
        except LineError:
            self._vacate(number)
            return
        if message is None or message["kind"] != "here":
            return
        seat.answered = time.monotonic()
        if seat.rival is not None:
            rival, seat.rival = seat.rival, None
            self._disagrees(rival.line, rival.line.peer(), _same_number(number, seat.host, rival.host))

    def _seat(self, number: int, seat: _Seat) -> None:
        seat.line.limit = MAX_BYTES
        self.seats[number] = seat
        self._listening.watch(seat.line)

    def _vacate(self, number: int) -> None:
        """Forget one that died or vanished while it waited; it, or its rival, may take its place again."""
        seat = self.seats.pop(number)
        self._listening.forget(seat.line)
        seat.line.close()
        for other in self.seats.values():
            other.forget_answer()
        if seat.rival is not None:
            self._seat(number, seat.rival)

    def _disagrees(self, line: Line, address: str, why: str) -> None:
        """Refuse a process that was told something else: an end for all if it shares the secret, else for itself alone."""
        if self._trusted:
            self.conflict = why
        self._refuse(line, f"{address}: {why}", why)

    def _refuse(self, line: Line, what: str, why: str = "") -> None:
        """`what` is said here, `why` there: nothing to strangers."""
        if line.greeted:
            with contextlib.suppress(OSError):
                line.send("refused", why=why, wrong=True)
        line.close()
        self._n_refused += 1
        if self._n_refused <= MAX_TOLD:
            self.refused.append(what)
            if not self.conflict:
                self._say(f"refused {what}{' (more are not told of)' if self._n_refused == MAX_TOLD else ''}")


def _wait_for_all(place: Place, seconds: float, secret: bytes, say: Say) -> Meeting:
    _allow(_files(place.count))
    until = time.monotonic() + seconds
    with _open(place, until, secret) as listening:
        gathering = _Gathering(place, secret, listening, say)
        try:
            while not gathering.conflict and not gathering.complete():
                left = until - time.monotonic()
                if left <= 0:
                    _end_all(gathering, _who_is_missing(place, gathering, listening, seconds), wrong=False)
                gathering.turn(left)
        except OutOfFilesError:
            raise UserError(
                f"{called(_own_name(), place.process)} may not open as many files as {place.count} processes need: "
                f"raise ulimit -n to {_files(place.count)}."
            ) from None
    if gathering.conflict:
        _end_all(gathering, gathering.conflict, wrong=True)
    hosts = gathering.hosts()
    lines = {number: seat.line for number, seat in gathering.seats.items()}
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.send("met", hosts=hosts)
    return Meeting(place, hosts, lines)


def _end_all(gathering: _Gathering, why: str, *, wrong: bool) -> NoReturn:
    for seat in gathering.seats.values():
        with contextlib.suppress(OSError):
            seat.line.send("refused", why=why, wrong=wrong)
    raise UserError(why) if wrong else NotMetError(why)


def _same_number(number: int, first: str, second: str) -> str:
    return f"{first} and {second} both say that they are process {number}: give each process a number of its own, from 0 on."


def _who_is_missing(place: Place, gathering: _Gathering, listening: Listening, seconds: float) -> str:
    missing = [str(number) for number in range(1, place.count) if number not in gathering.seats]
    refused = f" Refused: {'; '.join(gathering.refused)}" if gathering.refused else ""
    return (
        f"{place.count - len(missing)} of {place.count} processes met at {place.address} within {seconds:.0f} s; "
        f"process {', '.join(missing[:8])}{' and others' if len(missing) > 8 else ''} did not come: see the logs of those hosts, "
        f"that {place.count} is right, and that {place.address} leads them to {' or '.join(listening.addresses())} here.{refused}"
    )


def _go_there(place: Place, seconds: float, secret: bytes) -> Meeting:
    """Connect to process 0. A line that is closed without an answer was a run that is ending there: another try."""
    until = time.monotonic() + seconds
    pause = RETRY_SECONDS
    why = stranger = ""
    while (left := until - time.monotonic()) > 0:
        try:
            line = _line_to(place, secret, min(ROUND_TRIP_SECONDS, left))
            answer = _answer(line, place, time.monotonic() + seconds + ANSWER_SECONDS)  # process 0 may have begun to wait just now
        except OSError as error:
            why = error.strerror or str(error)
        except StrangerError as error:
            stranger = str(error)
        except LineError as error:
            why = str(error)
        else:
            if answer["kind"] == "refused":
                raise UserError(answer["why"]) if answer["wrong"] else NotMetError(answer["why"])
            return Meeting(place, answer["hosts"], {0: line})
        left = until - time.monotonic()
        time.sleep(max(0.0, min(pause * (1 + place.process % 7 / 10), left)))  # not all at the same moment
        pause = min(1.3 * pause, 10 * RETRY_SECONDS)
    raise NotMetError(
        f"this is {place}, and {place.address} did not answer for {seconds:.0f} s ({stranger or why}): "
        "see that process 0 was started, that every host knows that name, and that no firewall closes the port."
    )


def _answer(line: Line, place: Place, until: float) -> Message:
    """`met` or `refused`. Raises LineError or OSError."""
    while (message := line.receive(until))["kind"] == "ask":
        line.send("here")
    if message["kind"] != "refused" and len(message.get("hosts", ())) != place.count:
        raise StrangerError("something else answers there")
    return message


def _line_to(place: Place, secret: bytes, seconds: float) -> Line:
    """A line to process 0, which has heard who this is. Raises OSError or LineError."""
    until = time.monotonic() + seconds
    connection = socket.create_connection(host_and_port(place.address), timeout=seconds)
    if connection.getsockname() == connection.getpeername():  # TCP joins a port that nobody listens at to itself, once in a while
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    line = Line(connection, secret, server=False)
    line.limit = MAX_BYTES
    line.wait_for_greeting(until)
    line.send("hello", process=place.process, count=place.count, host=_own_name())
    return line


def _own_name() -> str:
    return "".join(char for char in socket.gethostname() if char.isprintable())[:MAX_NAME] or "unnamed"


def _open(place: Place, until: float, secret: bytes) -> Listening:
    host, port = host_and_port(place.address)
    while True:
        try:
            return Listening(host, port, place.count + MAX_VISITORS, secret)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            hint = "is another run on this host?" if error.errno == errno.EADDRINUSE else "choose another port."
            raise UserError(f"this is {place}, and cannot wait for the others at port {port}: {error.strerror}; {hint}") from error


def _files(count: int) -> int:
    """That process 0 of `count` may have open: one a process here, as many in jax's service, and its own."""
    return 2 * count + 1024


def _allow(files: int) -> None:
    """Raise the limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else min(hard, files), hard))
