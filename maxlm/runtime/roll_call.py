"""The processes of a run meet at process 0 before jax starts, and hear of each other's end: who did not come, who crashed, who was lost.

jax's own service answers all of these by ending the process, with pages that name a number. Here every process keeps a TCP connection to
process 0 for as long as it runs. One that dies closes it; a host that the network loses answers the kernel's probes no more; whoever ends
in order, or crashes, says so before. All processes then end with the same line. One that hangs is left to jax's heartbeat.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from maxlm.config.errors import UserError
from maxlm.runtime.places import Place

LOST = 6  # exit code of a run that lost a host
SILENCE_SECONDS = 30  # that a host may not answer before it is held to be lost
HELLO_SECONDS = 2.0  # for a visitor to say who it is
RETRY_SECONDS = 0.2
SETTLE_SECONDS = 2.0  # in which the news of a lost host overtakes the errors that it causes in the others
_LONGEST = 2**20  # bytes of a line: the names of all hosts


class Meeting:
    """Processes that have met, until they part."""

    def __init__(self, place: Place, hosts: Sequence[str], lines: Mapping[int, socket.socket]) -> None:
        """`hosts`: names by process number; `lines`: to process 0, or from it to each other one."""
        self.hosts = tuple(hosts)
        self._place, self._lines = place, dict(lines)
        self._parted = threading.Event()
        threading.Thread(target=self._listen, name="maxlm-roll-call", daemon=True).start()

    def part(self, crash: str | None = None) -> None:
        """Tell the others that this process ends: in order, or because of `crash`, upon which all end.

        Does not return where it turns out that another one was lost or crashed before, and that ends this process, too.
        """
        if crash is not None:
            time.sleep(SETTLE_SECONDS)  # most likely it comes of another's end, which is on its way
        self._parted.set()
        self._tell({"end": f"{self._name(self._place.process)} crashed: {crash}", "code": 1} if crash else {"bye": True})

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
            said = {"end": f"lost {self._name(number)}: {said}", "code": LOST}
        self._tell(said)
        sys.stderr.write(f"maxlm: {said['end']}\n")
        sys.stderr.flush()
        os._exit(said["code"])  # the main thread may wait for the lost one for ever

    def _tell(self, what: Mapping[str, Any]) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                _say(line, what)

    def _name(self, number: int) -> str:
        return f"{self.hosts[number]} (process {number})"


def meet(place: Place, seconds: float) -> Meeting:
    """Wait for all processes of `place`'s cluster, up to `seconds`.

    Raises UserError: process 0 cannot be reached, or at all of them alike: not all came, or they were told different things.
    """
    return _wait_for_all(place, seconds) if place.process == 0 else _go_there(place, seconds)


def _wait_for_all(place: Place, seconds: float) -> Meeting:
    until = time.monotonic() + seconds
    own = socket.gethostname()
    lines: dict[int, socket.socket] = {}
    hosts = {0: own}
    refusal, refused = "", []
    with _open(place, until) as listener:
        while not refusal and not _all_there(lines, hosts, place.count):
            visitor = _visitor(listener, until)
            if visitor is None:
                refusal = _who_is_missing(place, hosts, seconds)
                break
            line, number, host, count = visitor
            if count != place.count:
                refusal = f"{host} was told of {count} processes, and {own} of {place.count}: start all with the same number."
            elif number in hosts and (number == 0 or _is_alive(lines[number])):
                refusal = f"{hosts[number]} and {host} both say that they are process {number}: give each process a number of its own."
            else:
                lines[number], hosts[number] = line, host
                continue
            refused.append(line)
    answer = {"refused": refusal} if refusal else {"hosts": [hosts[number] for number in range(place.count)]}
    for line in [*lines.values(), *refused]:
        with contextlib.suppress(OSError):
            _say(line, answer)
    if refusal:
        raise UserError(refusal)
    return Meeting(place, answer["hosts"], lines)


def _all_there(lines: dict[int, socket.socket], hosts: dict[int, str], count: int) -> bool:
    """Whether all have come. Those who died while they waited are forgotten, and may come again."""
    if len(lines) == count - 1:
        for number in [number for number, line in lines.items() if not _is_alive(line)]:
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
    host, _, port = place.address.rpartition(":")
    began = time.monotonic()
    said: dict[str, Any] | str = "nothing"
    while isinstance(said, str):
        left = began + seconds - time.monotonic()
        if left <= 0:
            raise UserError(
                f"this is {place}, and {place.address} did not answer for {seconds:.0f} s ({said}): "
                "see that process 0 was started, that every host knows that name, and that no firewall closes the port."
            )
        try:
            line = socket.create_connection((host.strip("[]"), int(port)), timeout=min(5.0, left))
            if line.getsockname() == line.getpeername():  # TCP joins a port that nobody listens at to itself, once in a while
                line.close()
                continue
            _probe_often(line)
            _say(line, {"process": place.process, "count": place.count, "host": socket.gethostname()})
            said = _hear(line, seconds + HELLO_SECONDS)  # process 0 may have begun to wait just now
        except OSError as error:
            said = error.strerror or str(error)
        if isinstance(said, str):
            time.sleep(RETRY_SECONDS)
    if "refused" in said:
        raise UserError(said["refused"])
    return Meeting(place, said["hosts"], {0: line})


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


def _visitor(listener: socket.socket, until: float) -> tuple[socket.socket, int, str, int] | None:
    """The next process that comes: its line, number, host, and of how many it was told. None when time is up; others are sent away."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            line, _ = listener.accept()
            _probe_often(line)
            said = _hear(line, HELLO_SECONDS)
            if isinstance(said, dict) and {"process", "host", "count"} <= said.keys():
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


def _is_alive(line: socket.socket) -> bool:
    """Whether the other end of a line that has nothing to say is still there."""
    line.settimeout(0)
    try:
        return line.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
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
