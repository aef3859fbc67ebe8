"""Rendezvous of the processes of a run at process 0, before jax starts, so that a missing or misconfigured process is named.

jax's own service would abort all processes, with pages of output that name a number. Here each process identifies itself over a message
socket. With a shared secret no other process takes part, and a process with another configuration ends all. Without a secret its claim
cannot be trusted: it is refused, and process 0 goes on waiting. jax's service listens one port above, which is free once all have met.

With a `Quorum` the lowest of a few candidates that is there coordinates in place of process 0. A process is a member of one group at a
time: a candidate that finds another gives its own group up first. A candidate with an incomplete unit gives way to the next once the
others may go on: it no longer listens, and joins as those do that are no candidates.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from maxlm.base.errors import WRONG_PATH, ExitCode, UnavailableError, UserError
from maxlm.cluster import message_socket, progress_file
from maxlm.cluster.coordinator import (
    MAX_PENDING,
    PING_SECONDS,
    Coordinator,
    Meeting,
    RendezvousError,
    ReturningProcesses,
    Say,
    SupersededError,
    listen,
)
from maxlm.cluster.environment import ProcessSpec, host_and_port, process_label, service_address
from maxlm.cluster.message_socket import SECRET, AuthenticationError, ConnectionLostError, Message, MessageSocket, own_name
from maxlm.cluster.process_group import ProcessGroup
from maxlm.cluster.quorum import Quorum, candidates

RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would overload the name service
OWN_FILES = 1024  # that process 0 may open in addition to its sockets
ROUND_TRIP_SECONDS = 5.0  # for a connection
ASK_SECONDS = 2.0  # for a connection to another candidate, and for its answer
PAUSE_SECONDS = 1.0  # between two rounds of such questions
FOUND_SECONDS = 15.0  # for a coordinator that has just answered; it sends a ping every SIGN_SECONDS while it waits for others
SILENCE_SECONDS = 60.0  # of a coordinator, for a process that waits for its run; it sends a ping every second


class FinishedError(UserError):
    """The run that this process waited for is done."""

    exit_code = ExitCode.DONE


class TakenError(RendezvousError):
    """Another process had the number of this one as long as it tried."""


class ElsewhereError(Exception):
    """Another process coordinates."""


def join(
    spec: ProcessSpec, seconds: float, secret: bytes = b"", say: Say = lambda text: None, quorum: Quorum | None = None
) -> ProcessGroup:
    """Wait for all processes of the cluster, up to `seconds`; `say` prints a line for each connection that the coordinator refuses.

    With a `quorum`, enough processes go on without the others after its time, under numbers of their own; one that comes back meanwhile
    waits until it may join.

    Raises UserError: process 0 cannot be reached, or at all processes alike: some did not come, or their configurations differ.
    """
    addresses = {0: spec.address} if quorum is None else candidates(spec, quorum.together)
    seconds += 0 if quorum is None else quorum.wait_s
    seeker = _Seeker(spec, secret, "" if quorum is None else quorum.digest, say)
    if spec.process not in addresses:
        return seeker.connect(addresses, seconds, forever=True)
    if not secret:
        fix = f"set the same on all hosts: {message_socket.MAKE_SECRET}"
        say(f"{SECRET} is not set, so anybody who reaches {addresses[spec.process]} may take part; {fix}")
    began = time.monotonic()
    while True:
        coordinator = Coordinator(spec, own_name(), secret, say, quorum, began)
        lookout = Lookout(spec, addresses, secret, seeker.digest, coordinator.superseded)
        try:
            if not coordinator.superseded.is_set():
                return _coordinate(replace(spec, address=addresses[spec.process]), coordinator, seconds, quorum)
        except SupersededError:
            pass
        finally:
            lookout.close()
        if coordinator.gave_way:
            others = {number: address for number, address in addresses.items() if number != spec.process}
            return seeker.connect(others, seconds, forever=True)
        try:
            return seeker.connect(lookout.found(), FOUND_SECONDS, forever=False, taken_s=seconds)
        except ElsewhereError:  # perhaps here: it has given way
            continue
        except TakenError:
            raise
        except RendezvousError:  # it is gone again
            began = time.monotonic()


def _coordinate(spec: ProcessSpec, coordinator: Coordinator, seconds: float, quorum: Quorum | None) -> ProcessGroup:
    """`spec`: with the address of this process, not of process 0."""
    _raise_file_limit(spec)
    with contextlib.ExitStack() as open_sockets:
        until = time.monotonic() + seconds
        listener = open_sockets.enter_context(_open_listener(spec, until))
        service = replace(spec, address=service_address(spec.address))
        with _open_listener(service, until, met_before=True):  # else an attempt that is about to end may still have the port
            met = asyncio.run(coordinator.meet(listener, until - time.monotonic()))
        codes = {str(number): code for number, code in met.codes.items()}
        for one in met.sockets.values():
            one.try_send("members", hosts=met.hosts, numbers=met.numbers, codes=codes)
        group = _group(spec, met)
        group.service_bind = listener.getsockname()[0]
        if quorum is not None and len(met.numbers) < spec.count:
            open_sockets.pop_all()  # they stay open
            group.returning = ReturningProcesses(coordinator, listener, met.numbers)
    return group


def _group(spec: ProcessSpec, met: Meeting) -> ProcessGroup:
    """The group, by the numbers that its processes have in it: places among its configured numbers."""
    place = {number: index for index, number in enumerate(met.numbers)}
    own = replace(spec, count=len(place), process=place[spec.process])
    group = ProcessGroup(own, met.hosts, {place[number]: one for number, one in met.sockets.items()}, configured=met.numbers)
    group.codes_before = {place[number]: code for number, code in met.codes.items() if number in place}
    return group


def connect(spec: ProcessSpec, address: str, secret: bytes, seconds: float, digest: str, *, asks: bool = False) -> MessageSocket:
    """Connect to the process that waits at `address`, and send the hello. Raises OSError."""
    connection = socket.create_connection(host_and_port(address), timeout=seconds)
    if connection.getsockname() == connection.getpeername():  # TCP may connect a port without a listener to itself
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    messages = MessageSocket(connection)
    about = {"process": spec.process, "count": spec.count, "host": own_name(), "code": progress_file.current().last_code}
    messages.send("hello", token=message_socket.token(secret), asks=asks, digest=digest, **about)
    return messages


class Lookout:
    """Asks the other candidates, in a thread, until one of them coordinates; `superseded` is set then. The first round is over at once if
    none has a lower number; else when the constructor returns.
    """

    def __init__(self, spec: ProcessSpec, addresses: Mapping[int, str], secret: bytes, digest: str, superseded: threading.Event) -> None:
        self._spec, self._secret, self._digest, self._superseded = spec, secret, digest, superseded
        self._others = {number: address for number, address in addresses.items() if number != spec.process}
        self._found: dict[int, str] = {}
        self._closed = threading.Event()
        if any(number < spec.process for number in self._others):
            self._ask_all()
        if self._others and not superseded.is_set():
            threading.Thread(target=self._watch, name="maxlm-lookout", daemon=True).start()

    def found(self) -> dict[int, str]:
        """Number and address of the process that coordinates."""
        return dict(self._found)

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PAUSE_SECONDS) and not self._superseded.is_set():
            self._ask_all()

    def _ask_all(self) -> None:
        with ThreadPoolExecutor(len(self._others)) as pool:
            answers = list(pool.map(self._ask, self._others.values()))
        for (number, address), answer in zip(self._others.items(), answers, strict=True):
            if answer in ("running", "refused", "taken") or (  # the last two: by a run that goes on, for a reason that it will say
                answer == "meeting" and number < self._spec.process
            ):
                self._found = {number: address}
                self._superseded.set()
                return

    def _ask(self, address: str) -> str:
        """Kind of the answer; "" without one."""
        with contextlib.suppress(OSError, ConnectionLostError):
            connection = connect(self._spec, address, self._secret, ASK_SECONDS, self._digest, asks=True)
            with contextlib.closing(connection):
                return str(connection.receive(time.monotonic() + ASK_SECONDS)["kind"])
        return ""


@dataclass(frozen=True)
class _Seeker:
    """A process that looks for the one that coordinates."""

    spec: ProcessSpec
    secret: bytes
    digest: str
    say: Say

    def connect(self, addresses: Mapping[int, str], seconds: float, *, forever: bool, taken_s: float = 0.0) -> ProcessGroup:
        """Return the group of the first of `addresses` that coordinates. A connection that is closed without an answer belonged to a run
        that is ending there: try again, and `forever` anew if it had made this process wait.

        `taken_s`: seconds for which to try again, if more than `seconds`, while another process has the number of this one. Raises
        UserError; ElsewhereError if not `forever`.
        """
        began, pause = time.monotonic(), RETRY_SECONDS
        until = began + seconds
        reason = untrusted = ""
        taken: dict[int, str] = {}  # last answers that say so
        while (left := until - time.monotonic()) > 0:
            for number, address in addresses.items():
                taken.pop(number, None)
                try:
                    patience = ROUND_TRIP_SECONDS if len(addresses) == 1 else ASK_SECONDS
                    connection = connect(self.spec, address, self.secret, min(patience, left), self.digest)
                    answer = self._answer(connection, time.monotonic() + seconds + PING_SECONDS)  # it may have begun to wait just now
                except AuthenticationError as error:
                    untrusted = str(error)
                    continue
                except (OSError, ConnectionLostError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    continue
                kind = answer["kind"]
                if kind == "members":
                    codes = {int(digits): code for digits, code in answer["codes"].items()}
                    met = Meeting(tuple(answer["numbers"]), tuple(answer["hosts"]), {number: connection}, codes)
                    return _group(replace(self.spec, address=address), met)
                if kind == "finished":
                    raise FinishedError(f"the run is done: {self.spec} was not needed any more.")
                if kind == "refused":
                    raise UserError(answer["reason"]) if answer["wrong"] else RendezvousError(answer["reason"])
                if kind == "taken":
                    taken[number] = answer["reason"]
                    until = max(until, min(time.monotonic() + seconds, began + taken_s))
                elif kind == "elsewhere":
                    if not forever:
                        raise ElsewhereError
                    reason = "another process coordinates"
                else:
                    if not forever:
                        raise RendezvousError(f"the run at {address} has ended.")
                    began, pause = time.monotonic(), RETRY_SECONDS
                    until = began + seconds
            left = until - time.monotonic()
            time.sleep(max(0.0, min(pause * (1 + self.spec.process % 7 / 10), left)))  # spread over time
            pause = min(1.3 * pause, 10 * RETRY_SECONDS)
        if taken:
            waited = time.monotonic() - began
            raise TakenError(f"this is {self.spec}, which could not join for {waited:.0f} s: {' '.join(taken.values())}")
        raise RendezvousError(
            f"this is {self.spec}, and {' and '.join(addresses.values())} did not answer for {seconds:.0f} s ({untrusted or reason}): "
            "see that process 0 was started, that every host can resolve that name, and that no firewall closes the port."
        )

    def _answer(self, connection: MessageSocket, until: float) -> Message:
        """Answer pings, and return the message that ends the wait: `members`, `refused`, `finished`, `taken` or `elsewhere`; `ended` if a
        run that had made this process wait has ended. Raises ConnectionLostError or OSError.
        """
        waits = False
        while True:
            try:
                message = connection.receive(time.monotonic() + SILENCE_SECONDS if waits else until)
            except ConnectionLostError:
                if not waits:
                    raise
                return {"kind": "ended"}
            if message["kind"] == "ping":
                connection.send("pong")
                until = max(until, time.monotonic() + FOUND_SECONDS)
            elif message["kind"] == "running" and not waits:
                waits = True
                self.say("a run goes on without this process: waiting until it takes it in")
            elif message["kind"] == "stranger":
                raise message_socket.other_secret(self.secret)
            else:
                break
        expected = message["kind"] in ("refused", "finished", "taken", "elsewhere")
        if message["kind"] == "members":
            numbers: list[int] = message["numbers"]
            unique = len(set(numbers)) == len(numbers) == len(message["hosts"])
            expected = unique and self.spec.process in numbers[1:] and max(numbers) < self.spec.count
        if not expected:
            raise AuthenticationError(message_socket.OTHER_PROTOCOL)
        return message


def _open_listener(spec: ProcessSpec, until: float, *, met_before: bool = False) -> socket.socket:
    """Listen at the address of `spec`, once it is free. `met_before`: for the port of jax's service, one above the run's own.

    Raises UserError; UnavailableError if that may help.
    """
    host, port = host_and_port(spec.address)
    while True:
        try:
            return listen(host, port, spec.count + MAX_PENDING)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            hint = "is another run on this host?" if error.errno == errno.EADDRINUSE else "choose another port."
            where = f"port {port}, one above the port of this run" if met_before else f"port {port}"
            began_before = progress_file.current().last_code is not None  # so the port was right
            passes = met_before or (error.errno == errno.EADDRINUSE and began_before)
            kind = UnavailableError if passes and error.errno not in WRONG_PATH else UserError
            raise kind(f"this is {spec}, and cannot wait for the others at {where}: {error.strerror}; {hint}") from error


def _raise_file_limit(spec: ProcessSpec) -> None:
    """Raise the limit of open files; every process takes a socket of process 0 here and one in jax's service. Raises UserError."""
    files = 2 * spec.count + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = files if hard == resource.RLIM_INFINITY else min(hard, files)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * spec.count:
        label = process_label(own_name(), spec.process)
        raise UserError(f"{label} may not open as many files as {spec.count} processes need: raise ulimit -n to {files}.")
