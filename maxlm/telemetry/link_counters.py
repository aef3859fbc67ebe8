"""Counters of the links of this host, sampled in the background: network interfaces, InfiniBand ports, NVIDIA's GPUs."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from maxlm.telemetry.link_use import LinkUse, Rates

PERIOD_S = 0.02  # between samples
WORD = 4  # bytes of a unit of InfiniBand's data counters
_SPEED = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Link:
    """One direction of a link: its name, its kind, and its bandwidth in bytes/s, if stated."""

    name: str
    kind: str
    limit: float | None = None


Read = Callable[[], Mapping[Link, float]]


class Sampler:
    """Samples `read` in a thread while the block runs. What it reads is bytes since some time, or with `rates` bytes/s."""

    def __init__(self, read: Read, period_s: float = PERIOD_S, *, rates: bool = False) -> None:
        self._read, self._period_s, self._rates = read, period_s, rates
        self._samples: list[tuple[float, Mapping[Link, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="link counters", daemon=True)

    def __enter__(self) -> "Sampler":
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._stop.wait(self._period_s):
            self._take()

    def _take(self) -> None:
        values = self._read()
        self._samples.append((time.monotonic(), values))  # not before: PCIe is read for 40 ms a GPU

    def uses(self, used_by: str = "") -> list[LinkUse]:
        """Use of every link that carried anything. A counter that went back, as after a reset, leaves an interval out."""
        links = dict.fromkeys(link for _, values in self._samples for link in values)
        found = [LinkUse.from_rates(link.name, link.kind, self._over_time(link), link.limit, used_by=used_by) for link in links]
        return [use for use in found if use.peak > 0]

    def _over_time(self, link: Link) -> Rates:
        seen = [(when, values[link]) for when, values in self._samples if link in values]
        times, values = (np.array(column) for column in zip(*seen, strict=True))
        seconds = np.diff(times)
        change = values[1:] * seconds if self._rates else np.diff(values)
        kept = (seconds > 0) & (change >= 0)
        return Rates(seconds[kept], change[kept] / seconds[kept])


def read_interfaces(root: Path = Path("/")) -> dict[Link, float]:
    """Bytes that network interfaces of this network namespace have sent and received; {} where the system does not count."""
    found: dict[Link, float] = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/net/dev").read_text().splitlines()[2:]:
            name, _, figures = line.partition(":")
            columns = figures.split()
            kind = "loopback" if name.strip() == "lo" else "ethernet"
            limit = _speed(root / "sys/class/net" / name.strip() / "speed")
            found[Link(f"{name.strip()} received", kind, limit)] = float(columns[0])
            found[Link(f"{name.strip()} sent", kind, limit)] = float(columns[8])
    return found


def read_ports(root: Path = Path("/")) -> dict[Link, float]:
    """Bytes that InfiniBand and RoCE ports have sent and received; these bypass the interfaces' counters."""
    found: dict[Link, float] = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError, ValueError):
            limit = _rate(port / "rate")
            for direction, counter in (("received", "port_rcv_data"), ("sent", "port_xmit_data")):
                count = int((port / "counters" / counter).read_text())
                found[Link(f"{port.parts[-3]}/{port.name} {direction}", "infiniband", limit)] = float(WORD * count)
    return found


def read_host(root: Path = Path("/")) -> dict[Link, float]:
    """Interfaces and ports together."""
    return read_interfaces(root) | read_ports(root)


@lru_cache
def _rate(path: Path) -> float | None:
    """Bytes/s of a port, which states it as `400 Gb/sec (4X NDR)`; None where it does not."""
    try:
        stated = _SPEED.match(path.read_text())
    except OSError:
        return None
    return float(stated[0]) * 1e9 / 8 if stated else None


@lru_cache
def _speed(path: Path) -> float | None:
    """Bytes/s of an interface, which states Mbit/s; None where it does not: a loopback, or one that is down (-1)."""
    try:
        speed = int(path.read_text())
    except (OSError, ValueError):
        return None
    return speed * 1e6 / 8 if speed > 0 else None
