"""Elements of tuples as libtpu 0.0.52 writes them in a scheduled program: `%x#1` where others have a get-tuple-element of `%x`."""

import re
from collections.abc import Sequence
from functools import lru_cache

_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")
_TYPED = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)) [a-z][\w\-]*\(")


def written_out(statements: Sequence[str]) -> list[str]:
    """The statements of a computation, with a get-tuple-element, before the first use, in place of each `%x#1`."""
    if not any("#" in statement for statement in statements):
        return list(statements)
    tuples = {match.group(1): match.group(2) for statement in statements if (match := _TYPED.match(statement))}
    lines: list[str] = []
    known: set[str] = set()
    for statement in statements:
        for name, index in dict.fromkeys(_ELEMENT.findall(statement)):
            element = f"{name}.element.{index}"
            if name in tuples and element not in known:
                known.add(element)
                shape = _parts(tuples[name][1:-1])[int(index)]
                lines.append(f"  %{element} = {shape} get-tuple-element(%{name}), index={index}")
        lines.append(_ELEMENT.sub(lambda found: f"%{found[1]}.element.{found[2]}" if found[1] in tuples else found[0], statement))
    return lines


@lru_cache(maxsize=64)  # asked for once an element
def _parts(text: str) -> tuple[str, ...]:
    """The shapes of a tuple, some of which may be tuples."""
    parts: list[str] = []
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return (*parts, text[start:].strip())
