"""The processes of a run meet at process 0 before jax starts, and hear of each other's end: who did not come, who crashed, who was lost.

jax's own service answers all of these by ending the process, with pages that name a number. Here every process keeps a TCP connection to
process 0 for as long as it runs. One that dies closes it; a host that the network loses answers the kernel's probes no more; whoever ends
in order, or crashes, says so before. All processes then end with the same line. One that hangs is left to jax's heartbeat.
"""

import contextlib
import errno
import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from maxlm.config.errors import ExitCode, UserError
from maxlm.runtime.places import Place, called

SILENCE_SECONDS = 30  # that a host may not answer before it is held to be lost
HELLO_SECONDS = 2.0  # for a visitor to say who it is
RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would be a burden to whoever knows their names
SETTLE_SECONDS = 2.0  # in which the news of a lost host overtakes the errors that it causes in the others
PART_SECONDS = 5.0  # that process 0 stays, at most, for the others to end before jax's service does, which would cut them short
_LONGEST = 2**20  # bytes of a line: the names of all hosts


class NotMetError(UserError):
    """Not all hosts are there. No input need be wrong, so the exit code is another."""

    exit_code = ExitCode.HOST_LOST


class Meeting:
    """Processes that have met, until they part."""

    def __init__(self, place: Place, hosts: Sequence[str], lines: Mapping[int, socket.socket]) -> None:
        """`hosts`: names by process number; `lines`: to process 0, or from it to each other one."""
        self.hosts = tuple(hosts)
        self._place, self._lines = place, dict(lines)
        self._parted = threading.Event()
        threading.Thread(target=self._listen, name="maxlm-roll-call", daemon=True).start()

    def part(self, why: str | None = None, code: int = 1) -> None:
        """Tell the others that this process ends: in order, or because of `why`, upon which all end with `code`.

        Does not return where it turns out that another one was lost or crashed before, and that ends this process, too.
        """
        if why is not None and code not in (ExitCode.WRONG_INPUT, ExitCode.STOPPED):
            time.sleep(SETTLE_SECONDS)  # most likely it comes of another's end, which is on its way
        self._parted.set()
        self._tell({"end": why, "code": code} if why is not None else {"bye": True})
        if why is not None:
            self._see_them_off()

    def name(self) -> str:
        """Of this process."""
        return self._name(self._place.process)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    self._heard(key.data, _hear(key.fileobj, None))

    def _heard(self, number: int, said: dict[str, Any] | str) -> None:
        """`said`: what process `number` told, or in words how its line ended."""
        if self._parted.is_set() or (isinstance(said, dict) and "bye" in said):
            return
        if isinstance(said, str):
            said = {"end": f"lost {self._name(number)}: {said}", "code": ExitCode.HOST_LOST}
        self._lines.pop(number, None)
        self._tell(said)
        if said["code"] == ExitCode.WRONG_INPUT and self._parted.wait(
            SETTLE_SECONDS
        ):  # what is wrong there is wrong here, and is said by the main thread
            return
        sys.stderr.write(f"maxlm: {said['end']}\n")
        sys.stderr.flush()
        self._see_them_off()
        os._exit(said["code"])  # the main thread may wait for the lost one for ever

    def _see_them_off(self) -> None:
        """Process 0 is the last to go: jax's service ends with it, and that ends the others before they have said why."""
        until = time.monotonic() + PART_SECONDS
        for line in list(self._lines.values()) if self._place.process == 0 else ():
            while (left := until - time.monotonic()) > 0 and not isinstance(_hear(line, left), str):
                pass

    def _tell(self, what: Mapping[str, Any]) -> None:
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                _say(line, what)

    def _name(self, number: int) -> str:
        return called(self.hosts[number], number)


def meet(place: Place, seconds: float) -> Meeting:
    """Wait for all processes of `place`'s cluster, up to `seconds`.

    Raises UserError: process 0 cannot be reached, or at all of them alike: not all came, or they were told different things.
    """
    return _wait_for_all(place, seconds) if place.process == 0 else _go_there(place, seconds)


def _wait_for_all(place: Place, seconds: float) -> Meeting:
    _allow(_files(place.count))
    until = time.monotonic() + seconds
    own = socket.gethostname()
    lines: dict[int, socket.socket] = {}
    hosts = {0: own}
    refusal, wrong, refused = "", True, []
    with _open(place, until) as listener:
        while not refusal and not _all_there(lines, hosts, place.count):
            visitor = _visitor(listener, until, place)
            if visitor is None:
                refusal, wrong = _who_is_missing(place, hosts, seconds), False
                break
            line, number, host, count = visitor
            if count != place.count:
                refusal = f"{host} was told of {count} processes, and {own} of {place.count}: start all with the same number."
            elif not 0 < number < place.count or (number in lines and _is_there(lines[number])):
                first = hosts.get(number, own)
                refusal = f"{first} and {host} both say that they are process {number}: give each process a number of its own, from 0 on."
            else:
                lines[number], hosts[number] = line, host
                continue
            refused.append(line)
    everyone = [hosts.get(number, "") for number in range(place.count)]
    answer = {"refused": refusal, "wrong": wrong} if refusal else {"hosts": everyone}
    for line in [*lines.values(), *refused]:
        with contextlib.suppress(OSError):
            _say(line, answer)
    if refusal:
        raise UserError(refusal) if wrong else NotMetError(refusal)
    return Meeting(place, everyone, lines)


def _all_there(lines: dict[int, socket.socket], hosts: dict[int, str], count: int) -> bool:
    """Whether all have come and are still there. Those who died while they waited are forgotten, and may come again."""
    if len(lines) == count - 1:
        for number in [number for number, line in lines.items() if not _is_there(line)]:
            lines.pop(number).close()
            del hosts[number]
    return len(lines) == count - 1


def _who_is_missing(place: Place, hosts: Collection[int], seconds: float) -> str:
    missing = [str(number) for number in range(place.count) if number not in hosts]
    return (
        f"{len(hosts)} of {place.count} processes met at {place.address} within {seconds:.0f} s; process {', '.join(missing[:8])}"
        f"{' and others' if len(missing) > 8 else ''} did not come: see the logs of those hosts, and that {place.count} is right."
    )


def _go_there(place: Place, seconds: float) -> Meeting:
    """A line to process 0. One that is closed without an answer was a run that is ending there: another try."""
    began = time.monotonic()
    said: dict[str, Any] | str = "nothing"
    pause = RETRY_SECONDS
    while isinstance(said, str):
        left = began + seconds - time.monotonic()
        if left <= 0:
            raise NotMetError(
                f"this is {place}, and {place.address} did not answer for {seconds:.0f} s ({said}): "
                "see that process 0 was started, that every host knows that name, and that no firewall closes the port."
            )
        try:
            line = _line_to(place, min(5.0, left))
            said = _hear(line, seconds + HELLO_SECONDS)  # process 0 may have begun to wait just now
            while isinstance(said, dict) and "still there" in said:
                _say(line, {"here": True})
                said = _hear(line, seconds + HELLO_SECONDS)
        except OSError as error:
            said = error.strerror or str(error)
        if isinstance(said, str):
            time.sleep(min(pause, max(0.0, left)) * (1 + place.process % 7 / 10))  # not all at the same moment
            pause = min(1.3 * pause, 10 * RETRY_SECONDS)
    if "refused" in said:
        raise UserError(said["refused"]) if said["wrong"] else NotMetError(said["refused"])
    return Meeting(place, said["hosts"], {0: line})


def _line_to(place: Place, seconds: float) -> socket.socket:
    """A line to process 0, which has heard who this is. Raises OSError."""
    host, _, port = place.address.rpartition(":")
    line = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    if line.getsockname() == line.getpeername():  # TCP joins a port that nobody listens at to itself, once in a while
        line.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    _probe_often(line)
    _say(line, {"process": place.process, "count": place.count, "host": socket.gethostname()})
    return line


def _open(place: Place, until: float) -> socket.socket:
    port = int(place.address.rpartition(":")[2])
    while True:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=place.count)
            return socket.create_server(("", port), backlog=place.count)
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"this is {place}, and cannot wait for the others at port {port}: {error.strerror}; is another run on this host?"
                ) from error
            time.sleep(RETRY_SECONDS)


def _visitor(listener: socket.socket, until: float, place: Place) -> tuple[socket.socket, int, str, int] | None:
    """The next process that comes: its line, number, host, and of how many it was told. None when time is up; others are sent away."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            line, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise UserError(
                    f"{called(socket.gethostname(), place.process)} may not open as many files as {place.count} processes need: "
                    f"raise ulimit -n to {_files(place.count)}."
                ) from error
            continue
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            _probe_often(line)
            said = _hear(line, HELLO_SECONDS)
            if isinstance(said, dict):
                return line, int(said["process"]), str(said["host"]), int(said["count"])
        line.close()
    return None


def _probe_often(line: socket.socket) -> None:
    """Let the kernel ask the other one's whether it is there, so that silence means a lost host, whatever Python is busy with."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = SILENCE_SECONDS // 6
    for option, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _files(count: int) -> int:
    """That process 0 of `count` may have open: one a process here, as many in jax's service, and its own."""
    return 2 * count + 1024


def _allow(files: int) -> None:
    """Raise the limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else min(hard, files), hard))


def _is_there(line: socket.socket) -> bool:
    """Whether the other end of a line still waits: a host that vanished is one of which its kernel cannot tell."""
    with contextlib.suppress(OSError):
        _say(line, {"still there": True})
        return isinstance(_hear(line, HELLO_SECONDS), dict)
    return False


def _say(line: socket.socket, what: Mapping[str, Any]) -> None:
    line.settimeout(HELLO_SECONDS)
    line.sendall(json.dumps(what).encode() + b"\n")


def _hear(line: socket.socket, seconds: float | None) -> dict[str, Any] | str:
    """The next thing said on `line` within `seconds`, or in words why there is none."""
    line.settimeout(seconds)
    heard = b""
    try:
        while not heard.endswith(b"\n") and len(heard) < _LONGEST:
            there = line.recv(2**16, socket.MSG_PEEK)  # two may have been said; the second is heard next time
            if not there:
                return "it has ended without a word"
            heard += line.recv(there.find(b"\n") + 1 or len(there))
        said = json.loads(heard)
    except ConnectionResetError:
        return "it has ended without a word"
    except OSError:
        return f"nothing came from it for {seconds or SILENCE_SECONDS:.0f} s"
    except ValueError:
        return "something else answers there"
    return said if isinstance(said, dict) else "something else answers there"
