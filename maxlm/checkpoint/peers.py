"""Choice of the peer that holds a copy of a process's part of the state: one in another failure domain."""

from collections import Counter
from collections.abc import Sequence

import jax


def domains_of(devices: Sequence[jax.Device], hosts: Sequence[str], given: Sequence[int] | None) -> list[str]:
    """The failure domain of each process: as `given`, else its slice if there are several, else its host. Where that leaves no choice (all
    processes in one domain, or most of them), each process is one.
    """
    count = len(hosts)
    if given is not None:
        return [str(domain) for domain in given]
    slices = {device.process_index: str(getattr(device, "slice_index", 0)) for device in devices}
    for domains in ([slices.get(process, "0") for process in range(count)], list(hosts)):
        if _largest(domains) <= count // 2:
            return domains
    return [str(process) for process in range(count)]


def ring(domains: Sequence[str]) -> list[int]:
    """The process that holds the copy of each process: the one half-way round a ring that is ordered by domain, so in another domain.

    Raises ValueError where a domain has more than half of the processes.
    """
    count = len(domains)
    if _largest(domains) > count // 2:
        raise ValueError(f"one failure domain has {_largest(domains)} of {count} processes")
    order = sorted(range(count), key=lambda process: (domains[process], process))
    to = {process: order[(place + count // 2) % count] for place, process in enumerate(order)}
    return [to[process] for process in range(count)]


def device_moves(devices: Sequence[jax.Device], to: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) of each device, by position in `devices`: the devices of a process to those of its peer, in order.

    Raises ValueError where processes have different numbers of devices.
    """
    of: dict[int, list[int]] = {}
    for position, device in enumerate(devices):
        of.setdefault(device.process_index, []).append(position)
    if len({len(positions) for positions in of.values()}) != 1:
        raise ValueError("processes have different numbers of devices")
    return [move for process, positions in of.items() for move in zip(positions, of[to[process]], strict=True)]


def _largest(domains: Sequence[str]) -> int:
    return max(Counter(domains).values(), default=0)
