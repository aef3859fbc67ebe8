"""Decision which processes of a cluster go on without the others: a pure function of who is present.

Two groups that cannot see each other must never both go on, since they would write the same checkpoints. So a group needs more than half of
the configured processes, or half of them with process 0. Any two such groups have a process in common, and a process is in one group at a
time: no step, and no save, of a group can end once one of its processes has gone over to another.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from maxlm.cluster.environment import ProcessSpec


@dataclass(frozen=True)
class Quorum:
    """Rules of one cluster. A unit is `together` processes in a row, of use only all together: of a slice, of a node, or a single one."""

    count: int  # configured processes
    together: int
    min_processes: int
    fits: Callable[[int], bool]  # True if there is a mesh for so many units
    wait_s: float  # for those that are absent
    grow_after_s: float
    digest: str = ""  # of code and config: one that comes back with another must not end the run that goes on
    absent: frozenset[int] = frozenset()  # processes without which the run went on before: they are not waited for again

    def going_on(self, present: Collection[int], coordinator: int = 0) -> tuple[int, ...]:
        """Numbers of the processes that go on if only these are there: the unit of the `coordinator` if it is complete, then the others
        ascending; () if none may.
        """
        units = [first for first in range(0, self.count, self.together) if all(first + n in present for n in range(self.together))]
        units.sort(key=lambda first: first // self.together != coordinator // self.together)  # stable
        for many in range(len(units), 0, -1):
            numbers = tuple(first + n for first in units[:many] for n in range(self.together))
            if self.allows(numbers) and self.fits(many):
                return numbers
        return ()

    def allows(self, numbers: Collection[int]) -> bool:
        """True if these are enough, whatever the others do."""
        if len(numbers) < self.min_processes:
            return False
        return 2 * len(numbers) > self.count or (2 * len(numbers) == self.count and 0 in numbers)


def candidates(spec: ProcessSpec, together: int = 1, most: int = 8) -> dict[int, str]:
    """Process number -> address of those that may coordinate, in the order in which they are tried: the first process of `most` hosts, from
    all parts of the cluster, so that the loss of a slice leaves some; of a unit of `together`, as the first of those that go on is. Process
    0 alone if the names of the others are not known.
    """
    port = spec.address.rpartition(":")[2]
    first = {host: number for number, host in reversed(list(enumerate(spec.hosts)))}
    numbers = sorted(number for number in first.values() if number % together == 0)
    chosen = sorted({numbers[place * len(numbers) // most] for place in range(most)}) if len(numbers) > most else numbers
    others = {number: f"{spec.hosts[number]}:{port}" for number in chosen if number != 0}
    return {0: spec.address, **others}
