"""Sizes that a mesh may split, by the table of logical axes (`LOGICAL_AXES`). Read by the rules of the config and by the search for a
layout. No jax here.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from maxlm.config.schema import Config
from maxlm.config.sections.mesh import LOGICAL_AXES, LogicalAxis


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class Dim(NamedTuple):
    """A size that the mesh splits."""

    field: str  # the setting that gives it
    size: int
    axis: LogicalAxis


def dims(config: Config) -> Iterator[Dim]:
    """Every size that a mesh may split, in the order of the table."""
    for axis in LOGICAL_AXES.values():
        for field in axis.sizes:
            size: Any = config
            for name in field.split("."):
                size = getattr(size, name, None)
            if isinstance(size, int):
                yield Dim(field, size, axis)


def largest(config: Config, axis: str, sizes: Mapping[str, int] | None = None) -> int:
    """Largest size that a mesh axis may have, together with the other axes of `sizes`; all its divisors are possible too."""
    others = {**(sizes or {}), axis: 1}
    parts = [(dim.size, math.prod(others.get(other, 1) for other in dim.axis.mesh)) for dim in dims(config) if axis in dim.axis.mesh]
    return math.gcd(*(size // math.gcd(size, product) for size, product in parts))
