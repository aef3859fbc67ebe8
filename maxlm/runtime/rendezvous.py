"""Rendezvous of the processes of a run at process 0, before jax starts, so that a missing or misconfigured process is named.

jax's own service would abort all processes, with pages of output that name a number. Here each process identifies itself over a message
socket. With a shared secret nobody else takes part, and a process with another configuration ends all. Without one, its claim cannot be
trusted: it is refused, and process 0 goes on waiting.

With a `Quorum` the lowest of a few candidates that is there coordinates in place of process 0. A process is a member of one group at a
time: a candidate that finds another gives its own group up first. One whose unit is incomplete gives way to the next once the others may go
on: it no longer listens, and joins as those do that are no candidates.
"""

import asyncio
import contextlib
import errno
import hmac
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from maxlm.config.errors import WRONG_PATH, ExitCode, UnavailableError, UserError
from maxlm.runtime import message_socket, progress_file
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port, process_label
from maxlm.runtime.coordinator import (
    MAX_PENDING,
    PING_SECONDS,
    Coordinator,
    Meeting,
    RendezvousError,
    Say,
    SupersededError,
    listen,
)
from maxlm.runtime.lookout import ASK_SECONDS, Lookout, open_socket, own_name
from maxlm.runtime.message_socket import SECRET, AuthenticationError, ConnectionLostError, Message, MessageSocket
from maxlm.runtime.process_group import ProcessGroup
from maxlm.runtime.quorum import Quorum, candidates
from maxlm.runtime.returning import ReturningProcesses

RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would overload the name service
SOON_SECONDS = 0.02  # the same, where process 0 is about to listen
OWN_FILES = 1024  # that process 0 may open beside its sockets
ROUND_TRIP_SECONDS = 5.0  # for a connection, and for a handshake
FOUND_SECONDS = 15.0  # for a coordinator that has just answered; it sends a ping every SIGN_SECONDS while it waits for others
SILENCE_SECONDS = 60.0  # of a coordinator whose run a process waits for; it sends a ping every second


class FinishedError(UserError):
    """The run that this process waited for is done."""

    exit_code = ExitCode.DONE


class RunEndedError(ConnectionLostError):
    """The run that this process waited for has ended, or its coordinator is lost."""


class TakenError(RendezvousError):
    """Another process had the number of this one as long as it tried."""


class NumberTakenError(ConnectionLostError):
    """Another process has the number of this one now."""


class ElsewhereError(ConnectionLostError):
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


def connect_again(spec: ProcessSpec, name: str, seconds: float, secret: bytes, say: Say) -> list[MessageSocket]:
    """Return one more connection to process 0, which waits at `spec.address` for them as before, or from it to each other process. The
    processes are those of the group `name`, and the last message on each was received. Raises UserError; UnavailableError if the port is
    taken.
    """
    until = time.monotonic() + seconds
    key = hmac.digest(secret, b"jax" + bytes.fromhex(name), "sha256")  # another run, or an earlier attempt, may meet at this port
    if spec.process != 0:
        _, met = _Seeker(spec, key, "", say).search({0: spec.address}, seconds, forever=True, pause=SOON_SECONDS)
        met.sockets[0].send("frames")
        return [met.sockets[0]]
    with contextlib.ExitStack() as open_sockets:
        # Given up sooner than the others give up process 0, so that all end for its reason.
        listeners = _open_listeners(spec, until - seconds / 2, again=True)
        met = _meet([open_sockets.enter_context(one) for one in listeners], Coordinator(spec, own_name(), key, say), until)
    for number, one in met.sockets.items():
        try:
            while one.receive(until)["kind"] != "frames":
                pass
        except ConnectionLostError as error:
            raise RendezvousError(f"lost {process_label(met.hosts[number], number)} while it joined: {error}") from None
    return list(met.sockets.values())


def _coordinate(spec: ProcessSpec, coordinator: Coordinator, seconds: float, quorum: Quorum | None) -> ProcessGroup:
    """`spec`: with the address of this process, not of process 0."""
    _raise_file_limit(spec)
    with contextlib.ExitStack() as open_sockets:
        until = time.monotonic() + seconds
        listeners = [open_sockets.enter_context(one) for one in _open_listeners(spec, until)]
        met = _meet(listeners, coordinator, until)
        group = _group(spec, met)
        if quorum is not None and len(met.numbers) < spec.count:
            open_sockets.pop_all()  # they stay open
            group.returning = ReturningProcesses(coordinator, listeners, met.numbers)
    return group


def _meet(listeners: list[socket.socket], coordinator: Coordinator, until: float) -> Meeting:
    """The meeting, of which all members have been told."""
    met = asyncio.run(coordinator.meet(listeners, until - time.monotonic()))
    for one in met.sockets.values():
        codes = {str(number): code for number, code in met.codes.items()}
        one.try_send("members", hosts=met.hosts, numbers=met.numbers, codes=codes, group=met.group)
    return met


def _group(spec: ProcessSpec, met: Meeting) -> ProcessGroup:
    """The group, by the numbers that its processes have in it: places among its configured numbers."""
    place = {number: index for index, number in enumerate(met.numbers)}
    own = replace(spec, count=len(place), process=place[spec.process])
    group = ProcessGroup(own, met.hosts, {place[number]: one for number, one in met.sockets.items()}, configured=met.numbers)
    group.name = met.group
    group.codes_before = {place[number]: code for number, code in met.codes.items() if number in place}
    return group


@dataclass(frozen=True)
class _Seeker:
    """A process that looks for the one that coordinates."""

    spec: ProcessSpec
    secret: bytes
    digest: str
    say: Say

    def connect(self, addresses: Mapping[int, str], seconds: float, *, forever: bool, taken_s: float = 0.0) -> ProcessGroup:
        """Return the group of the first of `addresses` that coordinates; see `search`."""
        address, met = self.search(addresses, seconds, forever=forever, taken_s=taken_s)
        return _group(replace(self.spec, address=address), met)

    def search(
        self, addresses: Mapping[int, str], seconds: float, *, forever: bool, pause: float = RETRY_SECONDS, taken_s: float = 0.0
    ) -> tuple[str, Meeting]:
        """Connect to the first of `addresses` that coordinates. A connection that is closed without an answer belonged to a run that is
        ending there: try again, and `forever` anew if it had made this process wait.

        `pause`: seconds after the first attempt, which grow; `taken_s`: those for which to try again, if more than `seconds`, while another
        process has the number of this one. Raises UserError; ElsewhereError if not `forever`.
        """
        began = time.monotonic()
        until = began + seconds
        reason = untrusted = ""
        taken: dict[int, str] = {}  # last answers that say so
        while (left := until - time.monotonic()) > 0:
            for number, address in addresses.items():
                taken.pop(number, None)
                try:
                    patience = ROUND_TRIP_SECONDS if len(addresses) == 1 else ASK_SECONDS
                    connection = open_socket(self.spec, address, self.secret, min(patience, left), self.digest)
                    answer = self._answer(connection, time.monotonic() + seconds + PING_SECONDS)  # it may have begun to wait just now
                except RunEndedError:
                    if not forever:
                        raise RendezvousError(f"the run at {address} has ended.") from None
                    began, pause = time.monotonic(), RETRY_SECONDS
                    until = began + seconds
                except ElsewhereError as error:
                    if not forever:
                        raise
                    reason = str(error)
                except OSError as error:
                    reason = error.strerror or str(error)
                except AuthenticationError as error:
                    untrusted = str(error)
                except NumberTakenError as error:
                    taken[number] = str(error)
                    until = max(until, min(time.monotonic() + seconds, began + taken_s))
                except ConnectionLostError as error:
                    reason = str(error)
                else:
                    return address, self._meeting(answer, number, connection)
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

    def _meeting(self, answer: Message, number: int, connection: MessageSocket) -> Meeting:
        if answer["kind"] == "finished":
            raise FinishedError(f"the run is done: {self.spec} was not needed any more.")
        if answer["kind"] == "refused":
            raise UserError(answer["reason"]) if answer["wrong"] else RendezvousError(answer["reason"])
        codes = {int(digits): code for digits, code in answer["codes"].items()}
        return Meeting(tuple(answer["numbers"]), tuple(answer["hosts"]), {number: connection}, codes, answer["group"])

    def _answer(self, connection: MessageSocket, until: float) -> Message:
        """Return the message `members`, `refused` or `finished`; answer pings before. Raises ConnectionLostError or OSError."""
        waits = False
        while True:
            try:
                message = connection.receive(time.monotonic() + SILENCE_SECONDS if waits else until)
            except ConnectionLostError as error:
                raise (RunEndedError(str(error)) if waits else error) from None
            if message["kind"] == "ping":
                connection.send("pong")
                until = max(until, time.monotonic() + FOUND_SECONDS)
            elif message["kind"] == "running" and not waits:
                waits = True
                self.say("a run goes on without this process: waiting until it takes it in")
            elif message["kind"] == "elsewhere":
                raise ElsewhereError("another process coordinates")
            elif message["kind"] == "taken":
                raise NumberTakenError(message["reason"])
            else:
                break
        expected = _is_valid(message, self.spec) if message["kind"] == "members" else message["kind"] in ("refused", "finished")
        if not expected:
            raise AuthenticationError(message_socket.OTHER_PROTOCOL)
        return message


def _is_valid(members: Message, spec: ProcessSpec) -> bool:
    numbers: list[int] = members["numbers"]
    unique = len(set(numbers)) == len(numbers) == len(members["hosts"])
    return unique and spec.process in numbers[1:] and max(numbers) < spec.count


def _open_listeners(spec: ProcessSpec, until: float, *, again: bool = False) -> list[socket.socket]:
    """Listen at the address of `spec`, once it is free. `again`: the group has met, and can meet anew.

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
            where = f"port {port}, one above that of this run" if again else f"port {port}"
            passes = again or (error.errno == errno.EADDRINUSE and progress_file.last_code() is not None)  # the port was right before
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
