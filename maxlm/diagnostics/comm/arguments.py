"""Arguments of `maxlm bench-comm`, sizes as in nccl-tests (`64KB` is 64 x 1024 bytes), and durations as text. Imports no jax: errors are
instant.
"""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import count, takewhile

from maxlm.base.errors import UserError

OF_COLLECTIVES = ("operation", "smallest", "largest")
OF_TRAINING = ("topology", "slices", "steps")
UNITS = ("B", "KB", "MB", "GB", "TB")
STEP = 4
LARGEST, LARGEST_ON_CPU = "1GB", 4 * 2**20  # where the command line states none
NAMES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")


def parse(text: str, option: str) -> int:
    """Parse bytes. Raises UserError that names `option`."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None or not int(match[1]):
        raise UserError(f"{option} = {text}: must be a whole number above 0 of bytes, KB, MB or GB; as in 64KB.")
    return int(match[1]) * 1024 ** ("", "K", "M", "G", "T").index(match[2])


def size_range(smallest: str, largest: str) -> list[int]:
    """Return sizes from `smallest` to `largest`, each four times the one before. Raises UserError."""
    first, last = parse(smallest, "--smallest"), parse(largest, "--largest")
    if first > last:
        raise UserError(f"--smallest = {smallest}: is more than --largest = {largest}; give a smaller one.")
    return list(takewhile(lambda size: size <= last, (first * STEP**power for power in count())))


def choose_operations(names: Sequence[str]) -> list[str]:
    """Validate operations; all if `names` is empty. Raises UserError with the nearest name."""
    for name in names:
        if name not in NAMES:
            near = get_close_matches(name.lower(), NAMES, n=1, cutoff=0.4)
            raise UserError(
                f"--operation = {name}: must be one of {', '.join(NAMES)}" + (f"; the nearest is {near[0]}." if near else "; use one.")
            )
    return list(dict.fromkeys(names)) or list(NAMES)


def format_size(size: int) -> str:
    """Format bytes with three digits: 1024 is `1 KB`."""
    unit = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    value = size / 1024**unit
    return f"{value:.0f} {UNITS[unit]}" if value >= 999.5 else f"{value:.3g} {UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(value: float) -> str:
    """Format a number with three digits, and one of four or more digits as a whole number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def check_options(given: Collection[str], *, during_training: bool) -> None:
    """Raise UserError for an option that has no meaning with, or without, --during-training."""
    wrong = next((name for name in (OF_COLLECTIVES if during_training else OF_TRAINING) if name in given), None)
    if wrong is not None:
        fix = "leave one of them out" if during_training else "add that, or leave it out"
        raise UserError(f"--{wrong}: is only for bench-comm {'without' if during_training else 'with'} --during-training; {fix}.")


def split_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split into (CONFIG, settings). Raises UserError for several configs."""
    names = [one for one in arguments if "=" not in one]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: give one CONFIG, and settings as key=value.")
    return names[0] if names else None, [one for one in arguments if "=" in one]


def one_config(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """`split_config`, where a config must be named."""
    name, settings = split_config(arguments)
    if name is None:
        raise UserError("--during-training: needs a CONFIG to train, such as runs/quickstart; add one.")
    return name, settings
