"""What every rule says when a config breaks it."""

from typing import Any

from maxlm.hardware.topologies import either

Problem = tuple[str, Any, str, str]  # field, value, rule, fix


def divisors(number: int, most: int = 8) -> str:
    """The largest divisors of `number`, as a choice in words."""
    found = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return either([str(d) for d in found[-most:]])
