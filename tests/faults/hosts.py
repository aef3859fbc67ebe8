"""Hosts in miniature: a network namespace each, with a name and an address of its own, joined by a bridge.

Needs root and iproute2.
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from small_run import child, command, environment

NOWHERE = "02:00:00:00:00:00"  # a link-layer address that nobody has
_numbers = itertools.count()  # of this process's sets of hosts
# NAME TABLE OWN COMMAND...: OWN is a folder that each host has one of its own of, or ""
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && { [ -z "$3" ] || mount --bind "$3-$1" "$3"; } && shift 3 && exec "$@"'


@functools.cache
def can_make_hosts() -> bool:
    """True if this machine lets us make hosts: by making one."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        return False
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), 1) as hosts:
            return hosts.start("host0", ["true"]).wait(30) == 0
    except (subprocess.SubprocessError, OSError):
        return False


class Hosts:
    """`count` hosts named host0, host1, ...; use in a `with`, at whose end their processes are gone."""

    def __init__(self, folder: Path, count: int, own: Path | None = None) -> None:
        """`own`: a folder that is another at each host, and outlives its processes; here it is at `own`-NAME."""
        self.names = [f"host{number}" for number in range(count)]
        self._mark = f"maxlm{os.getpid()}-{next(_numbers)}"
        self._own = own
        for path in [] if own is None else [own, *(self.own(name) for name in self.names)]:
            path.mkdir()
        self._table = folder / "hosts"
        self._table.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{n + 1} {name}\n" for n, name in enumerate(self.names)))

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            space = self._space(name)
            _ip("netns", "add", space)
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", name, "netns", self._switch)
            _ip("-n", space, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", self._switch, "link", "set", name, "up")
            self.mend(name)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill_all(name)
            subprocess.run(["ip", "netns", "delete", self._space(name)], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self._switch], check=False, capture_output=True)

    def start(self, name: str, command: Sequence[str], **how: Any) -> subprocess.Popen:
        """`command` on a host; `how` as `subprocess.Popen` takes it."""
        enter = [
            "ip",
            "netns",
            "exec",
            self._space(name),
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            ENTER,
            "sh",
            name,
            str(self._table),
            str(self._own or ""),
        ]
        return subprocess.Popen([*enter, *command], text=True, **how)

    def own(self, name: str) -> Path:
        """Where the host's own folder is here."""
        assert self._own is not None, "asked for when they were made"
        return self._own.with_name(f"{self._own.name}-{name}")

    def cut(self, name: str) -> None:
        """Nothing reaches the host, and nothing comes from it; its own link still looks up, as behind a switch that fails."""
        _ip("-n", self._switch, "link", "set", name, "nomaster")

    def mend(self, name: str) -> None:
        """The host is on the network."""
        _ip("-n", self._switch, "link", "set", name, "master", "bridge")

    def mute(self, name: str) -> None:
        """Nothing that the host sends arrives, and what others send to it does: its neighbours get addresses that nobody has."""
        for address in self._neighbours(name):
            _ip("-n", self._space(name), "neighbour", "replace", address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")

    def unmute(self, name: str) -> None:
        """Undo `mute`."""
        for address in self._neighbours(name):
            _ip("-n", self._space(name), "neighbour", "delete", address, "dev", "eth0")

    def slow_down(self, name: str, rate: str) -> None:
        """Limit the host's sending to `rate`, as tc writes it."""
        limit = ("rate", rate, "burst", "128kb", "latency", "200ms")
        subprocess.run(["tc", "-n", self._space(name), "qdisc", "add", "dev", "eth0", "root", "tbf", *limit], check=True)

    def speed_up(self, name: str) -> None:
        """Undo `slow_down`."""
        subprocess.run(["tc", "-n", self._space(name), "qdisc", "delete", "dev", "eth0", "root"], check=True)

    def kill_all(self, name: str) -> None:
        """kill -9 of every process on the host."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def pids(self, name: str) -> list[int]:
        """Processes of the host."""
        answer = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in answer.stdout.split()]

    def _neighbours(self, name: str) -> list[str]:
        return [f"10.77.0.{number + 1}" for number, other in enumerate(self.names) if other != name]

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    @property
    def _switch(self) -> str:
        return f"{self._mark}-switch"


class Run:
    """A run of `maxlm launch` on all hosts, started there as srun would."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        *settings: str,
        devices: int,
        of_host: Callable[[str], Mapping[str, str]] = lambda name: {},
        **extra: str,
    ) -> None:
        """`settings`: over small.yml in `folder`, which all hosts share, as they do in a cluster; `devices`: of each host; `extra`: more
        variables of the environment, and `of_host`: name -> those of a host.
        """
        self.hosts, self.folder, self.settings, self.devices = hosts, folder, settings, devices
        self.processes: dict[str, subprocess.Popen] = {}  # the supervisor of each host
        self._of_host, self.extra = of_host, extra
        for name in hosts.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the supervisor of a host, whose output is added to the host's log."""
        names = self.hosts.names
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(len(names)),
            "SLURM_STEP_NODELIST": f"host[0-{len(names) - 1}]",
            "SLURM_PROCID": str(names.index(name)),
        }
        with self._log(name).open("a") as log:
            self.processes[name] = self.hosts.start(
                name,
                command("launch", "--backoff", "1", "--", "train", "small.yml", *self.settings),
                cwd=self.folder,
                env=environment(self.devices, **slurm, **self.extra, **self._of_host(name)),
                stdout=log,
                stderr=log,
            )

    def within(self, name: str, *command: str) -> None:
        """Run a command in the mount namespace of the host's supervisor, and so of all that this runs."""
        subprocess.run(["nsenter", "--target", str(self.processes[name].pid), "--mount", *command], check=True, capture_output=True)

    def said(self, name: str) -> str:
        """Output of a host by now."""
        return self._log(name).read_text()

    def wait(self, there: Callable[[], bool], what: str, seconds: float = 240) -> float:
        """Until `there()`; returns the seconds that took."""
        began = time.monotonic()
        while not there():
            ended = {name: process.poll() for name, process in self.processes.items()}
            assert time.monotonic() < began + seconds, f"{what}: not within {seconds} s; {self._all_said()}"
            assert None in ended.values(), f"{what}: all have ended, {ended}; {self._all_said()}"
            time.sleep(0.02)
        return time.monotonic() - began

    def finish(self, seconds: float = 240) -> None:
        """Until all hosts are done, and in order."""
        for process in self.processes.values():
            assert process.wait(seconds) == 0, self._all_said()

    def kill(self, name: str) -> None:
        """kill -9 of what the supervisor of that host runs."""
        os.kill(child(self.processes[name]), 9)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _all_said(self) -> str:
        return "".join(f"\n--- {name}\n{self.said(name)[-3000:]}" for name in self.hosts.names)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
