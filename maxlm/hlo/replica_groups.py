"""Mesh axes of a collective: replica groups, in every form XLA writes, decoded to device numbers and matched by membership.

A device's number is its position in the flattened mesh: XLA's replica groups count places in the device assignment, which jit takes
from the mesh. The axis names XLA writes ('axis_0') are its own, so the members of a group determine its axes.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from maxlm.base.errors import UserError

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
    if text == "{}":
        return ()
    if mesh := _MESH.match(text):
        return _of_mesh(mesh[1], mesh[2] or "", mesh[3])
    if iota := _IOTA.match(text):
        dims, devices = _numbers(iota[1]), _iota(iota[2], iota[3])
        if len(dims) == 2 and math.prod(dims) == devices.size:
            return _groups(devices.reshape(dims))
    listed = _LISTED.findall(text)
    if listed and text == "{" + ",".join("{" + group + "}" for group in listed) + "}":
        return tuple(map(_numbers, listed))
    raise _unknown(text)


@lru_cache(maxsize=4096)
def axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes of `mesh` (name and size, outermost first) that make exactly these `groups`; ("unknown",) if no set of axes has them.

    No groups at all means every device in one. Groups of one device are no axis: ().
    """
    sizes = [size for _, size in mesh]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    groups = groups or (tuple(range(devices.size)),)
    if max(map(max, groups)) >= devices.size:
        return UNKNOWN
    varied = _varied(groups[0], sizes)
    same = set(map(frozenset, groups)) == set(map(frozenset, _along(devices, varied)))
    return tuple(mesh[axis][0] for axis in varied) if same else UNKNOWN


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
    order = _ORDER.match(device_ids)
    devices = _iota(order[1], order[2]) if order else np.array(_numbers(device_ids) or range(math.prod(sizes.values())))
    wanted = {name: (int(above or 1), int(size or sizes[name])) for name, above, size in _AXIS.findall(named) if name in sizes}
    if len(wanted) != len(_AXIS.findall(named)) or devices.size != math.prod(sizes.values()):
        raise _unknown(f"mesh[{axes}] {{{named}}}")
    parts: list[int] = []  # each axis is cut into (above, itself, below): only a part of it may be named
    for name, size in sizes.items():
        above, itself = wanted.get(name, (1, 1))
        parts += [above, itself, size // (above * itself)]
    return _along(devices.reshape(parts), [3 * place + 1 for place, name in enumerate(sizes) if name in wanted])


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """0, 1, 2, ... laid out as an array of `dims`, its dims permuted."""
    devices = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return devices.transpose(_numbers(permutation)) if permutation else devices


def _along(devices: np.ndarray, axes: Sequence[int]) -> Groups:
    """The groups of an array of devices along `axes`: one for each place in the other axes."""
    last = np.moveaxis(devices, axes, range(-len(axes), 0))
    return _groups(last.reshape(-1, math.prod(devices.shape[axis] for axis in axes)))


def _varied(devices: tuple[int, ...], sizes: Sequence[int]) -> list[int]:
    """The axes along which the coordinates of `devices` differ."""
    return [axis for axis, places in enumerate(np.unravel_index(devices, sizes)) if np.ptp(places)]


def _groups(devices: np.ndarray) -> Groups:
    return tuple(map(tuple, devices.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(text)))


def _unknown(text: str) -> UserError:
    return UserError(f"This compiled program writes replica groups in a form maxlm does not know: {text[:80]}; report it with the program.")
