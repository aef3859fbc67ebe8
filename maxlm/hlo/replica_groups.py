"""Mesh axes of a collective: replica groups, in every form XLA writes, decoded to device numbers and matched by membership.

A device's number is its position in the flattened mesh: XLA's replica groups count places in the device assignment, which jit takes
from the mesh. The axis names XLA writes ('axis_0') are its own, so the members of a group determine its axes.
"""

import itertools
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from maxlm.config.errors import UserError

Groups = tuple[tuple[int, ...], ...]
UNKNOWN = ("unknown",)

_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$")
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")  # 'a':(2)4 is the part of `a` of size 4 that lies below a part of size 2
_IOTA = re.compile(r"^\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?$")
_ORDER = re.compile(r"^\[([\d,]*)\](?:T\(([\d,]*)\))?$")  # device_ids=([4,2]T(1,0)): the numbers 0..7, reshaped and transposed
_NUMBER = re.compile(r"\d+")
_LISTED = re.compile(r"\{([\d,]+)\}")


@lru_cache(maxsize=4096)
def device_groups(text: str) -> Groups:
    """The device numbers of each group in `text`: `mesh[...] {...}`, `[2,4]<=[4,2]T(1,0)` or `{{0,1},{2,3}}`; () for `{}`, all devices.

    For source_target_pairs, the pairs. Raises UserError on an unknown form.
    """
    mesh = _MESH.match(text)
    iota = _IOTA.match(text)
    listed = _LISTED.findall(text)
    if text == "{}":
        return ()
    if mesh:
        return _of_mesh(mesh.group(1), mesh.group(2) or "", mesh.group(3))
    if iota:
        dims, order = _numbers(iota.group(1)), _iota(_numbers(iota.group(2)), _numbers(iota.group(3) or ""))
        if len(dims) == 2 and math.prod(dims) == len(order):
            return _rows(order, dims[1])
    if listed and text == "{" + ",".join("{" + group + "}" for group in listed) + "}":
        return tuple(map(_numbers, listed))
    raise _unknown(text)


@lru_cache(maxsize=4096)
def axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes of `mesh` (name and size, outermost first) whose groups are exactly `groups`; ("unknown",) if no set of axes has them.

    No groups at all means every device in one. Groups of one device are no axis: ().
    """
    sizes = [size for _, size in mesh]
    devices = math.prod(sizes)
    groups = groups or (tuple(range(devices)),)
    if max(map(max, groups)) >= devices:
        return UNKNOWN
    varied = _varied(groups[0], sizes)
    whole = {frozenset(group) for group in groups}
    return tuple(mesh[i][0] for i in varied) if whole == set(_along(varied, tuple(sizes))) else UNKNOWN


@lru_cache(maxsize=4096)
def axes_of_pairs(pairs: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes of `mesh` along which the (source, target) `pairs` of a permutation move; () if none."""
    sizes = [size for _, size in mesh]
    if max((max(pair) for pair in pairs), default=0) >= math.prod(sizes):
        return UNKNOWN
    moved = {axis for pair in pairs for axis in _varied(pair, sizes)}
    return tuple(name for i, (name, _) in enumerate(mesh) if i in moved)


def _of_mesh(axes: str, device_ids: str, named: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(axes)}
    count = math.prod(sizes.values())
    order = _ORDER.match(device_ids)
    devices = _iota(_numbers(order.group(1)), _numbers(order.group(2) or "")) if order else _numbers(device_ids) or tuple(range(count))
    # Each axis is cut into (above, itself, below) where only a part of it is named.
    parts: list[int] = []
    chosen: dict[int, None] = {}
    wanted = {name: (int(above or 1), int(size or sizes[name])) for name, above, size in _AXIS.findall(named) if name in sizes}
    if len(wanted) != len(_AXIS.findall(named)) or len(devices) != count:
        raise _unknown(f"mesh[{axes}] {{{named}}}")
    for name, size in sizes.items():
        above, itself = wanted.get(name, (1, 1))
        if name in wanted:
            chosen[len(parts) + 1] = None
        parts += [above, itself, size // (above * itself)] if name in wanted else [1, 1, size]
    return tuple(tuple(devices[place] for place in group) for group in _ordered(tuple(chosen), parts))


def _iota(dims: tuple[int, ...], permutation: tuple[int, ...]) -> tuple[int, ...]:
    """0, 1, 2, ... laid out as an array of `dims`, its dims permuted, and flattened."""
    permutation = permutation or tuple(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    return tuple(sum(place) for place in itertools.product(*(range(0, strides[i] * dims[i], strides[i]) for i in permutation)))


def _ordered(axes: tuple[int, ...], sizes: list[int]) -> list[tuple[int, ...]]:
    """The groups of an array of `sizes` along `axes`: one for each place in the other axes."""
    rest = [i for i in range(len(sizes)) if i not in axes]
    order = _iota(tuple(sizes), (*rest, *axes))
    return list(_rows(order, math.prod(sizes[i] for i in axes)))


@lru_cache(maxsize=256)
def _along(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    return tuple(map(frozenset, _ordered(axes, list(sizes))))


def _varied(devices: Iterable[int], sizes: list[int]) -> tuple[int, ...]:
    """The axes along which the coordinates of `devices` differ."""
    varying = []
    for axis, size in enumerate(sizes):
        below = math.prod(sizes[axis + 1 :])
        if len({device // below % size for device in devices}) > 1:
            varying.append(axis)
    return tuple(varying)


def _rows(order: tuple[int, ...], width: int) -> Groups:
    return tuple(order[i : i + width] for i in range(0, len(order), width))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(text)))


def _unknown(text: str) -> UserError:
    return UserError(f"This compiled program writes replica groups in a form maxlm does not know: {text[:80]}; report it with the program.")
