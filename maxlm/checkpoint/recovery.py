"""Restore from the copies in the memory of hosts: each takes its own tiles, and those that it lacks come from the hosts that hold them.

All processes call `find` and `load`, and all get the same outcome. A tile that a peer sent while the run went on is used only if no process
has that tile from its own devices. The digests of the state, which `load` compares, find bytes that changed on the way.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint.digest import digest
from maxlm.checkpoint.errors import DamagedError
from maxlm.checkpoint.folder import HEALTHY
from maxlm.checkpoint.host_copies import HostCopy, Layout, RunFolder, Tile, parse
from maxlm.checkpoint.reader import check_leaves
from maxlm.checkpoint.tiles import Index, bounded, overlap
from maxlm.cluster import agree

_CANDIDATES = 4  # copies of a host, newest first, that are looked at
_WORD = 4  # bytes of a content's digest that processes exchange
_BLOCK = 16 << 20  # bytes that are sent at a time
_THREADS = 16  # that read and verify
Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A state with an undamaged copy of every tile in the memory of some host. `here`: the copies that hold the tiles of this host."""

    layout: Layout
    here: dict[Tile, HostCopy]

    @property
    def step(self) -> int:
        """Updates that the state has had."""
        return self.layout.described.step

    @property
    def tiles(self) -> list[Tile]:
        """All tiles of the state, in the same order everywhere."""
        return [(name, number) for name, tiling in self.layout.tilings.items() for number in range(tiling.count)]


@dataclass(frozen=True)
class Loaded:
    """Arrays by name, the data position, and how many bytes were sent because a process lacked them."""

    arrays: dict[str, jax.Array]
    data_position: dict[str, Any]
    sent: int


def find(folder: RunFolder, identity: dict[str, str], say: Say, before: int | None = None) -> Found | None:
    """Find the newest state of this run, `before` a step, that the copies hold completely. `say` gets a line for every newer one: why it is
    not used.
    """
    here = _usable(folder, identity, say)
    words = [np.frombuffer(content[: 2 * _WORD], np.int32) for content, _, _ in here]
    heads = np.full((_CANDIDATES, 3), -1, np.int32)
    for row, (word, (_, layout, _)) in enumerate(zip(words, here, strict=True)):
        heads[row] = (layout.described.step, *word)
    everywhere = agree.gather(heads)
    candidates = sorted({tuple(map(int, head)) for head in everywhere.reshape(-1, 3) if head[0] >= 0}, reverse=True)
    for candidate in candidates if before is None else [one for one in candidates if one[0] < before]:
        holders = [number for number, rows in enumerate(everywhere) if candidate in {tuple(map(int, row)) for row in rows}]
        mine = [item for item, row in zip(here, heads, strict=False) if tuple(map(int, row)) == candidate]
        found = _complete(mine, holders[0], say)
        if found is not None:
            return found
        say(
            f"the copies of step {candidate[0]} in memory are not used: they do not hold all of the state "
            f"({len(holders)} of {jax.process_count()} processes have one)"
        )
    return None


def load(found: Found, wanted: dict[str, jax.ShapeDtypeStruct], say: Say) -> Loaded:
    """Load the arrays named in `wanted` onto their shardings, and verify them against the digests from before the copy.

    Raises DamagedError: a tile has changed since `find`; CheckpointError: the state belongs to another run.
    """
    described = found.layout.described
    check_leaves(described.leaves, wanted, f"the copy of step {found.step} in memory", described.maxlm, whole=True)
    tilings = found.layout.tilings
    needed: dict[str, set[int]] = {}
    for name, leaf in wanted.items():
        assert leaf.sharding is not None, "checked before"
        regions = [index for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values() if index is not None]
        needed[name] = {tile for index in regions for tile in tilings[name].overlapping(bounded(index, leaf.shape))}
    received, sent = _exchange(found, wanted, needed)
    arrays: dict[str, jax.Array] = {}
    failure = False
    try:
        for name, leaf in wanted.items():
            arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, _reader(found, received, name, leaf))
    except (OSError, DamagedError) as error:
        say(str(error))
        failure = True
    if agree.max_over_processes(int(failure)):
        raise DamagedError("a copy could not be read, here or in another process")
    digests = digest(arrays)
    changed = [name for name in wanted if digests[name] != described.leaves[name].digest]
    if agree.max_over_processes(int(bool(changed))):
        names = ", ".join(changed[:3]) or "leaves of another process"
        raise DamagedError(f"the bytes of {names} are not the ones that were written ({len(changed)} of {len(wanted)} leaves)")
    return Loaded(arrays, described.data_position, sent)


def _usable(folder: RunFolder, identity: dict[str, str], say: Say) -> list[tuple[bytes, Layout, list[HostCopy]]]:
    """The states of which this host has copies, newest first: digest of the content, layout, copies."""
    copies, problems = folder.copies()
    states: dict[bytes, tuple[Layout, list[HostCopy]]] = {}
    for copy in copies:
        layout = parse(copy.layout)
        if layout.described.identity != identity:
            problems.append(f"the copy {copy.folder} is not used: it was written with other settings")
        elif layout.described.data_position.get(HEALTHY, True) is False:
            problems.append(f"the copy {copy.folder} is not used: training was not healthy")
        elif reason := layout.described.disagreement(copy.folder.name.partition("-")[0]):
            problems.append(f"the copy {copy.folder} is not used: {reason}")
        else:
            states.setdefault(layout.content, (layout, []))[1].append(copy)
    for problem in problems:
        say(problem)
    return [(content, layout, group) for content, (layout, group) in states.items()][:_CANDIDATES]


def _complete(mine: list[tuple[bytes, Layout, list[HostCopy]]], holder: int, say: Say) -> Found | None:
    """Return the state of these copies, if every tile is undamaged in some process. `holder`: a process that has its layout."""
    content = np.frombuffer(mine[0][2][0].layout.encode() if jax.process_index() == holder else b"", np.uint8)
    size = int(agree.largest(np.array([content.size], np.int32))[0])
    layout = agree.largest(np.pad(content, (0, size - content.size)))
    found, received = Found(parse(layout.tobytes().decode()), {}), dict[Tile, HostCopy]()
    for tile, copy in _verified([copy for _, _, group in mine for copy in group], say):
        (received if copy.tiles[tile].received else found.here).setdefault(tile, copy)
    held = agree.largest(np.array([tile in found.here for tile in found.tiles], np.uint8))
    if not held.all():  # the host that sent the others is lost
        found.here.update({tile: received[tile] for tile, own in zip(found.tiles, held, strict=True) if not own and tile in received})
        held = agree.largest(np.array([tile in found.here for tile in found.tiles], np.uint8))
    return found if bool(held.all()) else None


def _verified(copies: list[HostCopy], say: Say) -> Iterator[tuple[Tile, HostCopy]]:
    """Yield the undamaged tiles."""

    def check(item: tuple[Tile, HostCopy]) -> str:
        try:
            item[1].read(item[0])
        except (OSError, DamagedError) as error:
            return f"the copy {item[1].folder} is damaged: {error}"
        return ""

    items = [(tile, copy) for copy in copies for tile in copy.tiles]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        problems = list(pool.map(check, items))
    for problem in dict.fromkeys(filter(None, problems)):
        say(problem)
    return (item for item, problem in zip(items, problems, strict=True) if not problem)


def _exchange(found: Found, wanted: dict[str, jax.ShapeDtypeStruct], needed: dict[str, set[int]]) -> tuple[dict[Tile, np.ndarray], int]:
    """Receive the tiles that this process needs and its host lacks. Also returns the number of bytes sent for all processes. Tiles are sent
    in blocks, each byte by the process that holds it.
    """
    if jax.process_count() == 1:
        return {}, 0
    tiles = [tile for tile in found.tiles if tile[0] in wanted]  # this run may lack optional leaves that the copy has
    me, count = jax.process_index(), jax.process_count()
    lacking = agree.largest(np.array([tile in needed[name] and (name, tile) not in found.here for name, tile in tiles], np.uint8))
    holders = agree.largest(np.array([count - me if tile in found.here else 0 for tile in tiles], np.int32))
    sizes = {name: found.layout.tilings[name].elements * leaf.dtype.itemsize for name, leaf in wanted.items()}
    sent = [(tile, count - int(holder), sizes[tile[0]]) for tile, lacks, holder in zip(tiles, lacking, holders, strict=True) if lacks]
    received = {tile: np.zeros(size, np.uint8) for tile, _, size in sent if tile[1] in needed[tile[0]] and tile not in found.here}
    end = sum(size for _, _, size in sent)
    read = functools.lru_cache(1)(functools.partial(_read_or_zeros, found))  # a large tile is sent in several blocks
    for begin in range(0, end, _BLOCK):
        block, parts = np.zeros(min(_BLOCK, end), np.uint8), list(_parts(sent, begin, begin + _BLOCK))
        for tile, holder, inside, at in parts:
            if holder == me:
                block[at] = read(tile)[inside]
        block = agree.largest(block)
        for tile, _, inside, at in parts:
            if tile in received:
                received[tile][inside] = block[at]
    return received, end


def _parts(sent: list[tuple[Tile, int, int]], begin: int, end: int) -> Iterator[tuple[Tile, int, slice, slice]]:
    """(tile, its holder, part of the tile, its place in the block) of all tiles in bytes `begin` to `end` of all that is sent."""
    start = 0
    for tile, holder, size in sent:
        first, last = max(start, begin), min(start + size, end)
        if first < last:
            yield tile, holder, slice(first - start, last - start), slice(first - begin, last - begin)
        start += size


def _read_or_zeros(found: Found, tile: Tile) -> np.ndarray:
    """Bytes of a tile; zeros if it cannot be read any more, which the digest of the leaf will show in all processes."""
    copy = found.here[tile]
    try:
        return copy.read(tile)
    except (OSError, DamagedError):
        return np.zeros(copy.tiles[tile].size, np.uint8)


def _reader(found: Found, received: dict[Tile, np.ndarray], name: str, leaf: jax.ShapeDtypeStruct) -> Callable[[Index | None], np.ndarray]:
    """A function of a region: its values, from the tiles that overlap it."""
    tiling = found.layout.tilings[name]

    def read(number: int) -> np.ndarray:
        tile = name, number
        content = received[tile] if tile in received else found.here[tile].read(tile)
        values: np.ndarray = content.view(leaf.dtype).reshape(tiling.tile)
        return values

    def region(whole: Index | None) -> np.ndarray:
        assert whole is not None, "a device of this process"
        index = bounded(whole, leaf.shape)
        numbers = list(tiling.overlapping(index))
        if len(numbers) == 1 and tiling.index(numbers[0]) == index:
            return read(numbers[0])
        values = np.empty([part.stop - part.start for part in index], leaf.dtype)
        for number in numbers:
            inner, outer = overlap(tiling.index(number), index)
            values[outer] = read(number)[inner]
        return values

    return region
